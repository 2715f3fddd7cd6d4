"""What an engine says of itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nerite.backends.arrays.graph import Graph, GraphTensor
from nerite.core.dtype import DataType

Shape = tuple[int, ...]


class EngineTensor(NamedTuple):
    """An input or output of an engine; -1 stands for a size that a profile bounds, or that the data decides."""

    name: str
    datatype: DataType
    dims: Shape
    shape_values: bool = False
    """Its values are sizes, and it is in the memory of the host."""


class Range(NamedTuple):
    """The shapes of an input that a profile is for."""

    least: Shape
    best: Shape
    most: Shape


Profile = Mapping[str, Range]
"""The range of each input, by its name; not of inputs whose values are sizes."""


class Description(NamedTuple):
    """The tensors of an engine, in its order, and its profiles."""

    inputs: Sequence[EngineTensor]
    outputs: Sequence[EngineTensor]
    profiles: Sequence[Profile]

    @property
    def graph(self) -> Graph:
        """The tensors, as configurations are compared with them."""
        inputs, outputs = (
            {tensor.name: GraphTensor(tensor.name, tensor.datatype, tensor.dims) for tensor in side}
            for side in (self.inputs, self.outputs)
        )
        return Graph(inputs, outputs, {})

    @property
    def shape_tensors(self) -> frozenset[str]:
        """The names of the tensors whose values are sizes."""
        return frozenset(tensor.name for tensor in (*self.inputs, *self.outputs) if tensor.shape_values)


def largest_batch(profiles: Sequence[Profile]) -> int:
    """Return the rows of the largest batch that one of ``profiles`` takes."""
    return max(min((bounds.most[0] for bounds in profile.values()), default=0) for profile in profiles)
