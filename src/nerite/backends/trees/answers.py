"""From a forest's numbers to what clients asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nerite.backends.arrays.selection import Selection
from nerite.backends.ports import Port
from nerite.backends.trees.engines.engine import Engine, Explainer
from nerite.backends.trees.parameters import Parameters
from nerite.backends.trees.ports import SHAP, Ports
from nerite.core.errors import InvalidArgument
from nerite.core.tensor import Array


class Computation:
    """Computes the outputs of one model with an engine. What it returns is in memory of its own."""

    def __init__(self, engine: Engine, ports: Ports, parameters: Parameters, features: int) -> None:
        self._engine = engine
        self._ports = ports
        self._parameters = parameters
        self._features = features

    def __call__(self, selection: Selection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Return the outputs of a selection, in its order. Raises ``Internal``."""
        rows = self._rows(inputs[self._ports.taken.name])
        return [self._output(port, rows) for port in selection.ports]

    def _rows(self, values: Array) -> Array:
        """Return the input as the engine takes it: itself, where that is possible."""
        if values.dtype not in self._engine.takes:
            values = values.astype(self._engine.takes[0])
        elif not values.flags.aligned:
            values = values.copy()
        try:
            rows: Array = values.reshape(-1, self._features)
        except ValueError:
            raise InvalidArgument(
                f"input '{self._ports.taken.name}' has shape {list(values.shape)}; its last dimension has to be the "
                f"number of features, {self._features}"
            ) from None
        return rows

    def _output(self, port: Port, rows: Array) -> Array:
        if port.name == SHAP:
            assert isinstance(self._engine, Explainer)  # Checked when the instance was made.
            numbers = self._engine.contributions(rows) if len(rows) else np.empty(0)
        else:
            numbers = self._prediction(self._engine.predict(rows)) if len(rows) else np.empty(0)
        numbers = numbers.astype(port.datatype.numpy, copy=False)
        if port.batching:
            width = numbers.size // len(rows)
            inner = tuple(width if dim == -1 else dim for dim in port.dims)
            return numbers.reshape(len(rows), *inner)
        return _shaped(numbers, port.dims, len(rows), port.name)

    def _prediction(self, numbers: Array) -> Array:
        if self._parameters.classes:
            classes: Array = numbers > self._parameters.threshold if numbers.shape[1] == 1 else numbers.argmax(1)
            return classes
        if self._ports.both_classes:
            return np.concatenate((1 - numbers, numbers), 1)
        return numbers


def _shaped(numbers: Array, dims: Sequence[int], rows: int, name: str) -> Array:
    """Give the numbers of all rows the shape that a model without batches declares."""
    try:
        return numbers.reshape(rows, -1) if dims.count(-1) > 1 and rows else numbers.reshape(dims)
    except ValueError:
        raise InvalidArgument(
            f"output '{name}' has dims {list(dims)}, which do not hold the {numbers.size} numbers for {rows} rows"
        ) from None
