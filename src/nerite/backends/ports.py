"""Where a client's tensor and the model's meet: one port an input or output, with both shapes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nerite.backends.configuration import model_dims
from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.signature import reshaped

Shape = tuple[int, ...]


class Port(NamedTuple):
    """A declared input or output. Shapes are without the batch dimension."""

    name: str
    datatype: DataType
    dims: Shape
    """As clients send or get it."""
    model_dims: Shape
    """As the model takes or gives it: the ``reshape`` of the configuration, or nothing for a scalar."""
    batching: bool
    ragged: bool = False
    """The rows of a batch differ in length and are handed over as one flat array."""

    def to_model(self, shape: Shape) -> Shape:
        """Return the model's shape for a client's ``shape``."""
        return self._converted(shape, self.dims, self.model_dims)

    def to_client(self, shape: Shape) -> Shape:
        """Return the client's shape for one that the model gave."""
        return self._converted(shape, self.model_dims, self.dims)

    def _converted(self, shape: Shape, have: Shape, want: Shape) -> Shape:
        return shape if have == want else reshaped(shape, have, want, batched=self.batching)


def of_entry(entry: Mapping[str, Any], *, batching: bool, scalar: bool = False) -> Port:
    """Return the port for an entry of ``input`` or ``output``.

    ``scalar``: to the model it has no dimensions, though a configuration always gives it some.
    """
    dims = tuple(int(dim) for dim in entry["dims"])
    return Port(
        entry["name"],
        dtypes.BY_CONFIG_NAME[entry["data_type"]],
        dims,
        () if scalar else model_dims(entry),
        batching,
        bool(entry.get("allow_ragged_batch")),
    )
