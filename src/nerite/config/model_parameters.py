"""Parameters of a model's configuration that the server itself uses: queue, caches, and loading on demand."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Final

from nerite.config.mistake import Mistake
from nerite.config.model_config import ModelConfig
from nerite.config.options import QueueOptions

_EXAMPLES: Final = {
    "MAX_QUEUED_REQUESTS": "1000",
    "MAX_QUEUE_SECONDS": "0.5",
    "QUEUE_BURST_SECONDS": "30",
    "KEEP_ALIVE_SECONDS": "600",
}
"""The parameters, each with an example of a value."""


def bounds_of(config: ModelConfig, options: QueueOptions) -> QueueOptions:
    """Return the bounds of a model's queue. Its parameters override ``options``.

    A model with its own ``max_queue_size`` has no other bounds. ``config`` must be valid.
    """
    batching = config.dynamic_batching
    if batching is not None:
        policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
        if any(policy.max_queue_size for policy in policies if policy is not None):
            return QueueOptions(max_requests=0, max_seconds=0)
    return QueueOptions(
        int(_number(config, "MAX_QUEUED_REQUESTS", options.max_requests)),
        _number(config, "MAX_QUEUE_SECONDS", options.max_seconds),
        _number(config, "QUEUE_BURST_SECONDS", options.burst_seconds),
    )


def check_queue_bounds(config: ModelConfig) -> Iterator[Mistake]:
    """Find parameters that are not numbers."""
    for name, example in _EXAMPLES.items():
        if not 0 <= _number(config, name, 0) < math.inf:
            yield Mistake(
                message=f"parameter '{name}' of model '{config.name}' is '{config.parameters[name].string_value}'; it "
                "must be a number from 0 on",
                path=("parameters", name),
                remedy=f'Write a number, as in: value {{ string_value: "{example}" }}, or remove the parameter.',
            )


def _number(config: ModelConfig, name: str, default: float) -> float:
    """Return a parameter; ``default`` if the model does not have it, NaN if it is not a number."""
    parameter = config.parameters.get(name)
    if parameter is None:
        return default
    try:
        return float(parameter.string_value)
    except ValueError:
        return math.nan


PARAMETER: Final = "TENANTS_SHARE_CACHE"
TRUE: Final = "true"


def tenants_share_cache(config: ModelConfig) -> bool:
    """Return True if all tenants share the caches of a model. ``config`` must be valid."""
    parameter = config.parameters.get(PARAMETER)
    return parameter is not None and parameter.string_value == TRUE


def check_tenants_share_cache(config: ModelConfig) -> Iterator[Mistake]:
    """Find a value other than true and false."""
    parameter = config.parameters.get(PARAMETER)
    if parameter is not None and parameter.string_value not in (TRUE, "false"):
        yield Mistake(
            message=f"parameter '{PARAMETER}' of model '{config.name}' is '{parameter.string_value}'; it must be "
            "true or false",
            path=("parameters", PARAMETER),
            remedy='Write value { string_value: "true" } if tenants may learn from response times what others have '
            "requested, or remove the parameter.",
        )


class DemandMode(enum.Enum):
    """Whether requests have a model loaded; the parameter ``LOAD_ON_DEMAND``."""

    NEVER = "false"
    ON_DEMAND = "true"
    PINNED = "pinned"
    """It is loaded at start, and stays."""


ON_DEMAND_PARAMETER: Final = "LOAD_ON_DEMAND"
KEEP_ALIVE_PARAMETER: Final = "KEEP_ALIVE_SECONDS"


def demand_mode_of(config: ModelConfig, default: DemandMode) -> DemandMode:
    """Return whether requests have a model loaded; ``default`` if it does not say, or wrongly."""
    parameter = config.parameters.get(ON_DEMAND_PARAMETER)
    try:
        return default if parameter is None else DemandMode(parameter.string_value)
    except ValueError:
        return default


def keep_alive_of(config: ModelConfig, default: float) -> float:
    """Return the seconds without requests after which a model is unloaded; 0: not for that reason."""
    seconds = _number(config, KEEP_ALIVE_PARAMETER, default)
    return seconds if 0 <= seconds < math.inf else default


def check_demand_mode(config: ModelConfig) -> Iterator[Mistake]:
    """Find a value that is none of the three."""
    parameter = config.parameters.get(ON_DEMAND_PARAMETER)
    if parameter is not None and parameter.string_value not in [mode.value for mode in DemandMode]:
        yield Mistake(
            message=f"parameter '{ON_DEMAND_PARAMETER}' of model '{config.name}' is '{parameter.string_value}'; it "
            "must be true, false or pinned",
            path=("parameters", ON_DEMAND_PARAMETER),
            remedy='Write value { string_value: "pinned" } if the model is to stay in memory, or remove the parameter.',
        )
