"""What follows from a request's header alone, worked out once for each header.

Headers that differ in what a model does not see (parameters, the correlation id of a sequence) have one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from nerite.backends.configuration import Shape, TensorPort
from nerite.core import headers
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import CALLS, RESPONSE_HEADERS, Memo
from nerite.core.request import RequestHeader
from nerite.core.response import ResponseHeader
from nerite.core.tensor import Array, Buffer, TensorSpec, decode_bytes

# Which outputs are computed and returned, and the response headers that go with them.

_SELECTION: Final = 768
_NAME: Final = 192
"""Bytes that a selection takes in memory, and each output in it."""


class OutputSelection:
    """Some of a model's outputs.

    Response headers are the same object each time, so that transports can keep what they encoded on them.
    """

    def __init__(self, model_name: str, model_version: str, ports: Sequence[TensorPort]) -> None:
        self.ports = tuple(ports)
        self.names = [port.name for port in ports]
        self._model_name = model_name
        self._model_version = model_version
        self._headers: Memo[tuple[Shape, ...], ResponseHeader] = Memo()

    def header(self, shapes: tuple[Shape, ...]) -> ResponseHeader:
        """Return the header of a response with outputs of these shapes, as the model gave them."""
        header = self._headers.get(shapes)
        if header is None:
            header = ResponseHeader(
                self._model_name,
                self._model_version,
                [
                    TensorSpec(port.name, port.datatype, port.to_client(shape))
                    for port, shape in zip(self.ports, shapes, strict=True)
                ],
            )
            RESPONSE_HEADERS.put(self._headers, shapes, header, 2 * headers.response_header_bytes(header))
        return header


class OutputSelections:
    """The selections of one model. Equal ones are mostly the same object."""

    def __init__(self, model_name: str, model_version: str, ports: Iterable[TensorPort]) -> None:
        self._model_name = model_name
        self._model_version = model_version
        # Triton answers in this order whatever the configuration says, and clients index.
        self._ports = sorted(ports, key=lambda port: port.name)
        self.text = any(port.datatype is dtypes.BYTES for port in self._ports)
        """Whether any output is strings, which have to be put into wire form one by one."""
        self._known: Memo[frozenset[str], OutputSelection] = Memo()

    def of(self, wanted: frozenset[str]) -> OutputSelection:
        """Return the selection of these outputs; of all, if none is named."""
        selection = self._known.get(wanted)
        if selection is None:
            ports = [port for port in self._ports if not wanted or port.name in wanted]
            selection = OutputSelection(self._model_name, self._model_version, ports)
            CALLS.put(self._known, wanted, selection, _SELECTION + _NAME * len(wanted))
        return selection

    def union(self, selections: Sequence[OutputSelection]) -> OutputSelection:
        """Return the selection of every output that one of ``selections`` has."""
        return self.of(frozenset(name for selection in selections for name in selection.names))


# Strings, from their wire form to the arrays that frameworks take.


def strings_as_bytes(shape: Shape, data: Buffer) -> Array:
    """Return an array of ``bytes``, as objects."""
    return decode_bytes(data, prod(shape)).reshape(shape)


def strings_as_text(shape: Shape, data: Buffer) -> Array:
    """Return an array of ``str``, as objects; of C strings of one width, where they are not text."""
    elements = decode_bytes(data, prod(shape))
    try:
        return np.array([element.decode() for element in elements], object).reshape(shape)
    except UnicodeDecodeError:
        # ONNX Runtime takes bytes that are not text in no other way, and needs the end marked.
        return elements.astype(f"S{max(map(len, elements)) + 1}").reshape(shape)


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


class ArrayCall:
    """A header, as a model sees it. Compared by identity: those that are alike are mostly the same."""

    __slots__ = ("feeds", "of", "positions", "rows", "selection", "shapes")

    def __init__(
        self,
        of: object,
        rows: int,
        feeds: tuple[Feed, ...],
        shapes: Mapping[str, Shape],
        selection: OutputSelection,
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


class ArrayCalls:
    """The calls of one model. Shared by its instances: a header that two of them meet at once is worked out twice."""

    def __init__(
        self, inputs: Mapping[str, TensorPort], selections: OutputSelections, text: Text = strings_as_text
    ) -> None:
        self._inputs = inputs
        self._selections = selections
        self._text = text
        self._known: Memo[tuple[object, ...], ArrayCall] = Memo()
        self._model = object()

    def of(self, header: RequestHeader) -> ArrayCall:
        """Return the call for ``header``, which was checked against the model's signature."""
        call = header.call
        if not isinstance(call, ArrayCall) or call.of is not self._model:
            call = header.call = self._like(header)
        return call

    def _like(self, header: RequestHeader) -> ArrayCall:
        """Return the call for all headers with such inputs and outputs."""
        key = (header.inputs, header.wanted)
        call = self._known.get(key)
        if call is None:
            call = self._worked_out(header)
            CALLS.put(self._known, key, call, _CALL + sum([_FEED + 80 * len(spec.shape) for spec in header.inputs]))
        return call

    def _worked_out(self, header: RequestHeader) -> ArrayCall:
        feeds = []
        shapes = {}
        for spec in header.inputs:
            port = self._inputs[spec.name]
            shape = shapes[spec.name] = port.to_model(spec.shape)
            text = self._text if port.datatype is dtypes.BYTES else None
            feeds.append(Feed(spec.name, port.datatype.numpy, (prod(shape),) if port.ragged else shape, text))
        return ArrayCall(self._model, header.batch_size, tuple(feeds), shapes, self._selections.of(header.wanted))
