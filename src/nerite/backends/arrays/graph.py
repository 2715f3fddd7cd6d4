"""What a model says about itself: its inputs, outputs and inputs with a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType


class GraphTensor(NamedTuple):
    """An input or output of the model. ``dims`` is all of its shape, -1 for any size; empty for a scalar."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]


class Graph(NamedTuple):
    """The tensors of a model, by name, in the model's order."""

    inputs: Mapping[str, GraphTensor]
    outputs: Mapping[str, GraphTensor]
    defaulted: Mapping[str, GraphTensor]
    """Initializers that a caller may override: what a configuration calls an optional input."""

    @property
    def uses_bfloat16(self) -> bool:
        """Whether any tensor is of the one type that numpy does not have."""
        sides = (self.inputs, self.outputs, self.defaulted)
        return any(tensor.datatype is dtypes.BF16 for side in sides for tensor in side.values())
