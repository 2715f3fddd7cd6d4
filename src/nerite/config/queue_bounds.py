"""What bounds the queue of one model: its own configuration, before the flags."""

from __future__ import annotations

import math

from nerite.config.model_config import ModelConfig
from nerite.config.options import QueueOptions
from nerite.core.errors import InvalidArgument


def bounds_of(config: ModelConfig, options: QueueOptions) -> QueueOptions:
    """Return the bounds of a model's queue: none beside its own ``max_queue_size``, if it has one.

    Raises ``InvalidArgument`` for a parameter that is no number.
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


def _number(config: ModelConfig, name: str, default: float) -> float:
    """Return a parameter that is a number; ``default`` where the model does not have it."""
    parameter = config.parameters.get(name)
    if parameter is None:
        return default
    try:
        number = float(parameter.string_value)
    except ValueError:
        number = math.nan
    if 0 <= number < math.inf:
        return number
    raise InvalidArgument(
        f"parameter '{name}' of model '{config.name}' is '{parameter.string_value}'; it must be a number from 0 on"
    )
