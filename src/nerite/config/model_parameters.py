"""What bounds the queue of one model: its own configuration, before the flags."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from nerite.config.mistake import Mistake
from nerite.config.model_config import ModelConfig
from nerite.config.options import QueueOptions

_EXAMPLES: Final = {"MAX_QUEUED_REQUESTS": "1000", "MAX_QUEUE_SECONDS": "0.5", "QUEUE_BURST_SECONDS": "30"}
"""The parameters, each with a value that it may have."""


def bounds_of(config: ModelConfig, options: QueueOptions) -> QueueOptions:
    """Return the bounds of a model's queue: none beside its own ``max_queue_size``, if it has one.

    ``config`` has been checked.
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
    """Find parameters that are no numbers."""
    for name, example in _EXAMPLES.items():
        if not 0 <= _number(config, name, 0) < math.inf:
            yield Mistake(
                message=f"parameter '{name}' of model '{config.name}' is '{config.parameters[name].string_value}'; it "
                "must be a number from 0 on",
                path=("parameters", name),
                remedy=f'Write a number, as in: value {{ string_value: "{example}" }}, or remove the parameter.',
            )


def _number(config: ModelConfig, name: str, default: float) -> float:
    """Return a parameter; ``default`` where the model does not have it, NaN for one that is no number."""
    parameter = config.parameters.get(name)
    if parameter is None:
        return default
    try:
        return float(parameter.string_value)
    except ValueError:
        return math.nan


# Whether tenants find in a model's caches what others have asked: its own configuration says so.

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
