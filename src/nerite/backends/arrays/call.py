"""What follows from a request's header alone, worked out once for each header.

Headers that differ in what a model does not see (parameters, the correlation id of a sequence) have one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from nerite.backends.arrays.selection import Selection, Selections
from nerite.backends.arrays.strings import as_text
from nerite.backends.ports import Port, Shape
from nerite.core import dtype as dtypes
from nerite.core.byte_budget import CALLS, Memo
from nerite.core.request import RequestHeader
from nerite.core.tensor import Array, Buffer

_CALL: Final = 1024
_FEED: Final = 768
"""Bytes that a call takes in memory with the key that it is found by, and each input in it."""

Text: TypeAlias = Callable[[Shape, Buffer], Array]
"""Makes of strings in wire form the array that a framework takes."""


class Feed(NamedTuple):
    """One input of a request, as the model wants it."""

    name: str
    dtype: np.dtype[np.generic]
    shape: Shape
    """Batch dimension included; flat for a ragged input."""
    text: Text | None
    """None for numbers, whose bytes are the array."""


class Call:
    """A header, as a model sees it. Compared by identity: those that are alike are mostly the same."""

    __slots__ = ("feeds", "of", "positions", "rows", "selection", "shapes")

    def __init__(
        self,
        of: object,
        rows: int,
        feeds: tuple[Feed, ...],
        shapes: Mapping[str, Shape],
        selection: Selection,
    ) -> None:
        self.of = of
        """The model that it is a call of: a header may outlive one."""
        self.rows = rows
        self.feeds = feeds
        """In the order of the request's data."""
        self.positions = {feed.name: position for position, feed in enumerate(feeds)}
        self.shapes = shapes
        """The model's shape of each input, batch dimension included, not flattened."""
        self.selection = selection
        """The outputs that are wanted."""


class Calls:
    """The calls of one model. Shared by its instances: a header that two of them meet at once is worked out twice."""

    def __init__(self, inputs: Mapping[str, Port], selections: Selections, text: Text = as_text) -> None:
        self._inputs = inputs
        self._selections = selections
        self._text = text
        self._known: Memo[tuple[object, ...], Call] = Memo()
        self._model = object()

    def of(self, header: RequestHeader) -> Call:
        """Return the call for ``header``, which was checked against the model's signature."""
        call: Call | None = header.call
        if call is None or call.of is not self._model:
            call = header.call = self._like(header)
        return call

    def _like(self, header: RequestHeader) -> Call:
        """Return the call for all headers with such inputs and outputs."""
        key = (header.inputs, header.wanted)
        call = self._known.get(key)
        if call is None:
            call = self._worked_out(header)
            CALLS.put(self._known, key, call, _CALL + sum([_FEED + 80 * len(spec.shape) for spec in header.inputs]))
        return call

    def _worked_out(self, header: RequestHeader) -> Call:
        feeds = []
        shapes = {}
        for spec in header.inputs:
            port = self._inputs[spec.name]
            shape = shapes[spec.name] = port.to_model(spec.shape)
            text = self._text if port.datatype is dtypes.BYTES else None
            feeds.append(Feed(spec.name, port.datatype.numpy, (prod(shape),) if port.ragged else shape, text))
        return Call(self._model, header.batch_size, tuple(feeds), shapes, self._selections.of(header.wanted))
