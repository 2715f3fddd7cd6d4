"""Tensors and configuration of a bound model, and Triton's configuration that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nerite.core.tensor import DataType
from nerite.pytriton.exceptions import PyTritonModelConfigError
from nerite.pytriton.model_config.common import DynamicBatcher, ModelWarmup, datatype_of


@dataclass(frozen=True)
class Tensor:
    """An input or output: shape without the batch, type, name; -1 is any size."""

    shape: tuple[int, ...]
    dtype: Any
    name: str | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        datatype_of(self.dtype)

    @property
    def datatype(self) -> DataType:
        """The type of the protocol."""
        return datatype_of(self.dtype)


@dataclass
class ModelConfig:
    """Configuration of a bound model."""

    batching: bool = True
    max_batch_size: int = 4
    batcher: DynamicBatcher = field(default_factory=DynamicBatcher)
    response_cache: bool = False
    decoupled: bool = False
    model_warmup: Sequence[ModelWarmup] | None = None


def named(tensors: Sequence[Tensor], prefix: str) -> list[Tensor]:
    """Return tensors that all have names: ``INPUT_1``, ``INPUT_2`` where none was given."""
    if not tensors:
        raise PyTritonModelConfigError(f"a model needs at least one {prefix.lower()}")
    found = [replace(each, name=each.name or f"{prefix}_{index}") for index, each in enumerate(tensors, 1)]
    if len({each.name for each in found}) < len(found):
        raise PyTritonModelConfigError(f"two of the {prefix.lower()}s have the same name")
    return found


def triton_config(
    name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], config: ModelConfig, instances: int
) -> dict[str, Any]:
    """Return the model configuration in JSON form."""
    if config.batching and config.max_batch_size < 1:
        raise PyTritonModelConfigError(f"max_batch_size is {config.max_batch_size}: it must be 1 or more")
    found: dict[str, Any] = {
        "name": name,
        "backend": "python",
        "max_batch_size": config.max_batch_size if config.batching else 0,
        "input": [_entry(each, optional=each.optional) for each in inputs],
        "output": [_entry(each) for each in outputs],
        "instance_group": [{"count": instances, "kind": "KIND_CPU"}],
    }
    if config.batching:
        found["dynamic_batching"] = config.batcher.to_json()
    if config.decoupled:
        found["model_transaction_policy"] = {"decoupled": True}
    if config.response_cache:
        found["response_cache"] = {"enable": True}
    if config.model_warmup:
        found["model_warmup"] = [each.to_json() for each in config.model_warmup]
    return found


def _entry(tensor: Tensor, *, optional: bool = False) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": tensor.name,
        "data_type": tensor.datatype.config_name,
        "dims": list(tensor.shape),
    }
    if optional:
        entry["optional"] = True
    return entry
