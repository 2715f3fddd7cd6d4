"""Which outputs are computed and returned, and the response headers that go with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from nerite.backends.ports import Port, Shape
from nerite.core import dtype as dtypes
from nerite.core import footprint
from nerite.core.byte_budget import CALLS, RESPONSE_HEADERS, Memo
from nerite.core.response import ResponseHeader
from nerite.core.tensor import TensorSpec

_SELECTION: Final = 768
_NAME: Final = 192
"""Bytes that a selection takes in memory, and each output in it."""


class Selection:
    """Some of a model's outputs.

    Response headers are the same object each time, so that transports can keep what they encoded on them.
    """

    def __init__(self, model_name: str, model_version: str, ports: Sequence[Port]) -> None:
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
            RESPONSE_HEADERS.put(self._headers, shapes, header, 2 * footprint.of_response_header(header))
        return header


class Selections:
    """The selections of one model. Equal ones are mostly the same object."""

    def __init__(self, model_name: str, model_version: str, ports: Iterable[Port]) -> None:
        self._model_name = model_name
        self._model_version = model_version
        # Triton answers in this order whatever the configuration says, and clients index.
        self._ports = sorted(ports, key=lambda port: port.name)
        self.text = any(port.datatype is dtypes.BYTES for port in self._ports)
        """Whether any output is strings, which have to be put into wire form one by one."""
        self._known: Memo[frozenset[str], Selection] = Memo()

    def of(self, wanted: frozenset[str]) -> Selection:
        """Return the selection of these outputs; of all, if none is named."""
        selection = self._known.get(wanted)
        if selection is None:
            ports = [port for port in self._ports if not wanted or port.name in wanted]
            selection = Selection(self._model_name, self._model_version, ports)
            CALLS.put(self._known, wanted, selection, _SELECTION + _NAME * len(wanted))
        return selection

    def union(self, selections: Sequence[Selection]) -> Selection:
        """Return the selection of every output that one of ``selections`` has."""
        return self.of(frozenset(name for selection in selections for name in selection.names))
