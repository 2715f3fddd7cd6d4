"""Calls: everything that follows from a request's header alone, memoized by header.

Headers that differ only in what a model does not see (parameters, correlation ids) have the same call.
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

# Selections: the outputs that a request wants, and the headers of its responses.

_SELECTION: Final = 768
_NAME: Final = 192
"""Bytes of memory for a selection, and for each of its outputs."""


class OutputSelection:
    """Subset of a model's outputs.

    Response headers are interned, so that transports can keep their encoded form on them.
    """

    def __init__(self, model_name: str, model_version: str, ports: Sequence[TensorPort]) -> None:
        self.ports = tuple(ports)
        self.names = [port.name for port in ports]
        self._model_name = model_name
        self._model_version = model_version
        self._headers: Memo[tuple[Shape, ...], ResponseHeader] = Memo()

    def header(self, shapes: tuple[Shape, ...]) -> ResponseHeader:
        """Return the header of a response whose outputs have these shapes in the model."""
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
    """Memo of the selections of one model. Equal ones are mostly the same object."""

    def __init__(self, model_name: str, model_version: str, ports: Iterable[TensorPort]) -> None:
        self._model_name = model_name
        self._model_version = model_version
        # Triton answers in this order whatever the configuration says, and clients use positions.
        self._ports = sorted(ports, key=lambda port: port.name)
        self.text = any(port.datatype is dtypes.BYTES for port in self._ports)
        """True if any output has strings, which are encoded one by one."""
        self._known: Memo[frozenset[str], OutputSelection] = Memo()

    def of(self, wanted: frozenset[str]) -> OutputSelection:
        """Return the selection of these outputs; of all outputs if ``wanted`` is empty."""
        selection = self._known.get(wanted)
        if selection is None:
            ports = [port for port in self._ports if not wanted or port.name in wanted]
            selection = OutputSelection(self._model_name, self._model_version, ports)
            CALLS.put(self._known, wanted, selection, _SELECTION + _NAME * len(wanted))
        return selection

    def union(self, selections: Sequence[OutputSelection]) -> OutputSelection:
        """Return the selection of all outputs in ``selections``."""
        return self.of(frozenset(name for selection in selections for name in selection.names))


# Strings: from wire form to the arrays that frameworks take.


def strings_as_bytes(shape: Shape, data: Buffer) -> Array:
    """Return an object array of ``bytes``."""
    return decode_bytes(data, prod(shape)).reshape(shape)


def strings_as_text(shape: Shape, data: Buffer) -> Array:
    """Return an object array of ``str``; a fixed-width array of C strings if an element is not valid UTF-8."""
    elements = decode_bytes(data, prod(shape))
    try:
        return np.array([element.decode() for element in elements], object).reshape(shape)
    except UnicodeDecodeError:
        # The only form in which ONNX Runtime takes such bytes; it needs the terminating zero.
        return elements.astype(f"S{max(map(len, elements)) + 1}").reshape(shape)


_CALL: Final = 1024
_FEED: Final = 768
"""Bytes of memory for a call and its key, and for each of its inputs."""

Text: TypeAlias = Callable[[Shape, Buffer], Array]
"""Converts strings of a shape from wire form to the array that a framework takes."""


class Feed(NamedTuple):
    """One input of a request, as the model takes it."""

    name: str
    dtype: np.dtype[np.generic]
    shape: Shape
    """Batch dimension included; flat for a ragged input."""
    text: Text | None
    """None for numbers, whose bytes are the array."""


class ArrayCall:
    """Header as a model sees it. Compared by identity: equal calls are mostly the same object."""

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
        """Identifies the model that it is a call of: headers may outlive models."""
        self.rows = rows
        self.feeds = feeds
        """In the order of the request's data."""
        self.positions = {feed.name: position for position, feed in enumerate(feeds)}
        self.shapes = shapes
        """The model's shape of each input, batch dimension included, not flattened."""
        self.selection = selection
        """The requested outputs."""


class ArrayCalls:
    """Memo of the calls of one model, shared by its instances. Two that miss at the same time both compute the call."""

    def __init__(
        self, inputs: Mapping[str, TensorPort], selections: OutputSelections, text: Text = strings_as_text
    ) -> None:
        self._inputs = inputs
        self._selections = selections
        self._text = text
        self._known: Memo[tuple[object, ...], ArrayCall] = Memo()
        self._model = object()

    def of(self, header: RequestHeader) -> ArrayCall:
        """Return the call for ``header``, which has been validated against the model's signature."""
        call = header.call
        if not isinstance(call, ArrayCall) or call.of is not self._model:
            call = header.call = self._known_call(header)
        return call

    def _known_call(self, header: RequestHeader) -> ArrayCall:
        """Return the call that is shared by all headers with these inputs and outputs."""
        key = (header.inputs, header.wanted)
        call = self._known.get(key)
        if call is None:
            call = self._computed(header)
            CALLS.put(self._known, key, call, _CALL + sum([_FEED + 80 * len(spec.shape) for spec in header.inputs]))
        return call

    def _computed(self, header: RequestHeader) -> ArrayCall:
        feeds = []
        shapes = {}
        for spec in header.inputs:
            port = self._inputs[spec.name]
            shape = shapes[spec.name] = port.to_model(spec.shape)
            text = self._text if port.datatype is dtypes.BYTES else None
            feeds.append(Feed(spec.name, port.datatype.numpy, (prod(shape),) if port.ragged else shape, text))
        return ArrayCall(self._model, header.batch_size, tuple(feeds), shapes, self._selections.of(header.wanted))
