"""Batches of rows that differ in length: what the model is told about them, and how its output is dealt out. Pure.

The rows of a ragged input reach the model as one flat array. ``batch_input`` of a configuration adds inputs that say
where each request's part is; ``batch_output`` names outputs that are flat in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.backends.ports import Port, Shape
from nerite.core import dtype as dtypes
from nerite.core.errors import Internal
from nerite.core.tensor import Array


def _element_count(shapes: Sequence[Shape]) -> Array:
    return np.array([prod(shape) for shape in shapes])


def _accumulated(shapes: Sequence[Shape]) -> Array:
    return np.cumsum(_element_count(shapes))


def _accumulated_with_zero(shapes: Sequence[Shape]) -> Array:
    return np.concatenate([[0], _accumulated(shapes)])


def _max_as_shape(shapes: Sequence[Shape]) -> Array:
    # The model looks at the shape alone.
    return np.zeros(max(prod(shape) for shape in shapes))


def _item_shape(shapes: Sequence[Shape]) -> Array:
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])])


def _item_shape_flat(shapes: Sequence[Shape]) -> Array:
    return _item_shape(shapes).reshape(-1)


_KINDS: Final[dict[str, Callable[[Sequence[Shape]], Array]]] = {
    "BATCH_ELEMENT_COUNT": _element_count,
    "BATCH_ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": _accumulated_with_zero,
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": _max_as_shape,
    "BATCH_ITEM_SHAPE": _item_shape,
    "BATCH_ITEM_SHAPE_FLATTEN": _item_shape_flat,
}


class BatchInput(NamedTuple):
    """Inputs that are made for each batch, from the shapes of one input of its requests."""

    kind: str
    targets: tuple[str, ...]
    source: str
    dtype: np.dtype[np.generic]

    def value(self, shapes: Sequence[Shape]) -> Array:
        """Return the tensor for requests whose source inputs have these shapes, batch dimension included."""
        return _KINDS[self.kind](shapes).astype(self.dtype)


class Ragged:
    """The ragged side of a model, from a configuration that has been validated. False if it has none."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._batch_inputs = tuple(
            BatchInput(
                entry.get("kind", "BATCH_ELEMENT_COUNT"),
                tuple(entry["target_name"]),
                entry["source_input"][0],
                dtypes.BY_CONFIG_NAME[entry["data_type"]].numpy,
            )
            for entry in config.get("batch_input", ())
        )
        self.sources = {
            target: entry["source_input"][0]
            for entry in config.get("batch_output", ())
            for target in entry["target_name"]
        }
        """From the name of a flat output to that of the input whose shape its parts have."""
        self._any = bool(
            self._batch_inputs
            or self.sources
            or any(entry.get("allow_ragged_batch") for entry in config.get("input", ()))
        )

    def __bool__(self) -> bool:
        return self._any

    def made(self, shapes: Sequence[Mapping[str, Shape]]) -> dict[str, Array]:
        """Return the inputs that are made for a batch, from the shapes of each request's inputs by name."""
        arrays = {}
        for batch_input in self._batch_inputs:
            value = batch_input.value([each[batch_input.source] for each in shapes])
            arrays.update(dict.fromkeys(batch_input.targets, value))
        return arrays


def scattered(port: Port, size: int, sources: Sequence[Shape]) -> list[Shape]:
    """Return the shape of each request's part of a flat output of ``size`` elements.

    A free dimension of the output is as large as the same dimension of the request's source input. Raises ``Internal``
    if the parts do not make up the whole.
    """
    declared = (-1, *port.model_dims)
    try:
        shapes = [tuple(source[at] if dim == -1 else dim for at, dim in enumerate(declared)) for source in sources]
    except IndexError:
        raise Internal(f"output '{port.name}' has more dimensions than the input whose shape it is to have") from None
    if (expected := sum(map(prod, shapes))) != size:
        raise Internal(f"output '{port.name}' has {size} elements, the requests of the batch make {expected}")
    return shapes
