"""Parts of the configuration of a bound model, each with its form in Triton's configuration."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nerite.core.tensor import BYTES, DataType, from_numpy
from nerite.pytriton.exceptions import PyTritonModelConfigError


class DeviceKind(enum.Enum):
    """Kind of an instance group."""

    KIND_AUTO = "KIND_AUTO"
    KIND_CPU = "KIND_CPU"
    KIND_GPU = "KIND_GPU"


class TimeoutAction(enum.Enum):
    """What happens to a request whose time in the queue is over."""

    REJECT = "REJECT"
    DELAY = "DELAY"


def datatype_of(dtype: Any) -> DataType:
    """Return the data type of a numpy type, its name, or ``bytes``. Raises ``PyTritonModelConfigError``."""
    if dtype in (bytes, str, object, np.bytes_, np.str_, np.object_):
        return BYTES
    try:
        found = from_numpy(np.dtype(dtype))
    except TypeError:
        found = None
    if found is None:
        raise PyTritonModelConfigError(f"{dtype!r} is not a type that tensors can have, such as numpy.float32 or bytes")
    return found


@dataclass
class QueuePolicy:
    """How long and how many requests wait."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return Triton's form."""
        return {
            "timeout_action": self.timeout_action.value,
            "default_timeout_microseconds": self.default_timeout_microseconds,
            "allow_timeout_override": self.allow_timeout_override,
            "max_queue_size": self.max_queue_size,
        }


@dataclass
class DynamicBatcher:
    """How requests are gathered into batches."""

    max_queue_delay_microseconds: int = 0
    preferred_batch_size: Sequence[int] | None = None
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: dict[int, QueuePolicy] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return Triton's form."""
        found: dict[str, Any] = {
            "max_queue_delay_microseconds": self.max_queue_delay_microseconds,
            "preferred_batch_size": list(self.preferred_batch_size or ()),
            "preserve_ordering": self.preserve_ordering,
            "priority_levels": self.priority_levels,
            "default_priority_level": self.default_priority_level,
        }
        if self.default_queue_policy is not None:
            found["default_queue_policy"] = self.default_queue_policy.to_json()
        policies = self.priority_queue_policy or {}
        if policies:
            found["priority_queue_policy"] = {str(level): policy.to_json() for level, policy in policies.items()}
        return found


@dataclass
class WarmupInput:
    """Data of one input of a warm-up request; one of the last three is set."""

    dtype: Any
    shape: Sequence[int]
    zero_data: bool = False
    random_data: bool = False
    input_data_file: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return Triton's form."""
        found: dict[str, Any] = {"data_type": datatype_of(self.dtype).config_name, "dims": list(self.shape)}
        if self.input_data_file is not None:
            found["input_data_file"] = self.input_data_file
        elif self.random_data:
            found["random_data"] = True
        else:
            found["zero_data"] = True
        return found


@dataclass
class ModelWarmup:
    """Requests that a model answers before it is ready."""

    name: str
    batch_size: int
    inputs: dict[str, WarmupInput]
    count: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return Triton's form."""
        inputs = {name: each.to_json() for name, each in self.inputs.items()}
        return {"name": self.name, "batch_size": self.batch_size, "inputs": inputs, "count": self.count}
