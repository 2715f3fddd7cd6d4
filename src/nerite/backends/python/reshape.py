"""``reshape`` for models in Python: they have the shapes that it says, and callers those of ``dims``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nerite.backends.configuration import batching
from nerite.backends.ports import Port, Shape, of_entry
from nerite.core.errors import Internal
from nerite.core.request import RequestHeader
from nerite.core.signature import show
from nerite.core.tensor import TensorSpec


class Reshape:
    """The inputs and outputs of a model that have a ``reshape``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config`` is in JSON form."""
        self._inputs = _reshaped(config, "input")
        self._outputs = _reshaped(config, "output")

    def __bool__(self) -> bool:
        return bool(self._inputs or self._outputs)

    def inputs(self, header: RequestHeader) -> Sequence[TensorSpec]:
        """Return the inputs of a request as the model has them."""
        if header.call is None:
            header.call = tuple(self._input(spec) for spec in header.inputs)
        specs: Sequence[TensorSpec] = header.call
        return specs

    def _input(self, spec: TensorSpec) -> TensorSpec:
        port = self._inputs.get(spec.name)
        return spec if port is None else TensorSpec(spec.name, spec.datatype, port.to_model(spec.shape))

    def output(self, spec: TensorSpec) -> TensorSpec:
        """Return an output of the model as its caller gets it. Raises ``Internal`` if it is not as ``reshape`` says."""
        port = self._outputs.get(spec.name)
        if port is None:
            return spec
        shape = spec.shape[1:] if port.batching else spec.shape
        if len(shape) != len(port.model_dims) or any(
            declared not in (-1, size) for size, declared in zip(shape, port.model_dims, strict=True)
        ):
            raise Internal(
                f"output '{spec.name}' has the shape {show(spec.shape)}, and its 'reshape' in the configuration says "
                f"{show(_with_batch(port.model_dims, port))}"
            )
        return TensorSpec(spec.name, spec.datatype, port.to_client(spec.shape))


def _reshaped(config: Mapping[str, Any], side: str) -> dict[str, Port]:
    return {
        entry["name"]: of_entry(entry, batching=batching(config))
        for entry in config.get(side, ())
        if entry.get("reshape") is not None
    }


def _with_batch(dims: Shape, port: Port) -> Shape:
    return (-1, *dims) if port.batching else dims
