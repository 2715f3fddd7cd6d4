"""Whether tenants find in a model's caches what others have asked: its own configuration says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nerite.config.mistake import Mistake
from nerite.config.model_config import ModelConfig

PARAMETER: Final = "TENANTS_SHARE_CACHE"
TRUE: Final = "true"


def tenants_share_cache(config: ModelConfig) -> bool:
    """Return whether the caches of a model are for all tenants together. ``config`` has been checked."""
    parameter = config.parameters.get(PARAMETER)
    return parameter is not None and parameter.string_value == TRUE


def check_tenants_share_cache(config: ModelConfig) -> Iterator[Mistake]:
    """Find a value that is neither true nor false."""
    parameter = config.parameters.get(PARAMETER)
    if parameter is not None and parameter.string_value not in (TRUE, "false"):
        yield Mistake(
            message=f"parameter '{PARAMETER}' of model '{config.name}' is '{parameter.string_value}'; it has to be "
            "true or false",
            path=("parameters", PARAMETER),
            remedy='Write value { string_value: "true" } if tenants may see by how fast they are answered what others '
            "have asked, or remove the parameter.",
        )
