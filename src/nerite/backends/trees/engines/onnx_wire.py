"""What is needed of protobuf to write an ONNX model of one node. Field numbers are those of onnx.proto.

By hand, since the package ``onnx`` is not there where models are served, and this is a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nerite.core.tensor import Array
from nerite.wire.fields import nested, varint
from nerite.wire.fields import number as field

DOUBLE, FLOAT = 11, 1
"""Data types."""
_INT, _STRING, _TENSOR, _INTS, _STRINGS = 2, 3, 4, 7, 8
"""Types of attributes."""


def number(name: str, value: int) -> bytes:
    """Return an attribute that is a number."""
    return _attribute(name, _INT, field(3, value))


def text(name: str, value: str) -> bytes:
    """Return an attribute that is a text."""
    return _attribute(name, _STRING, nested(4, value.encode()))


def numbers(name: str, values: Array) -> bytes:
    """Return an attribute that is a list of numbers, none of them below 0."""
    known = [varint(value) for value in range(int(values.max(initial=0)) + 1)]
    return _attribute(name, _INTS, nested(8, b"".join([known[value] for value in values.tolist()])))


def texts(name: str, values: Iterable[int], known: Sequence[str]) -> bytes:
    """Return an attribute that is a list of texts, each given as its place in ``known``."""
    written = [nested(9, value.encode()) for value in known]
    return _attribute(name, _STRINGS, b"".join([written[value] for value in values]))


def doubles(name: str, values: Array) -> bytes:
    """Return an attribute that is a tensor of doubles."""
    raw = np.ascontiguousarray(values, "<f8").tobytes()
    tensor = field(1, len(values)) + field(2, DOUBLE) + nested(8, name.encode()) + nested(9, raw)
    return _attribute(name, _TENSOR, nested(5, tensor))


def node(operator: str, domain: str, taken: str, given: str, attributes: Iterable[bytes]) -> bytes:
    """Return a node of one input and one output."""
    names = nested(1, taken.encode()) + nested(2, given.encode()) + nested(4, operator.encode())
    return b"".join([names, *[nested(5, attribute) for attribute in attributes], nested(7, domain.encode())])


def table(name: str, kind: int, width: int) -> bytes:
    """Return what an input or output is, which is a tensor of any number of rows."""
    rows, columns = nested(1, nested(2, b"rows")), nested(1, field(1, width))
    return nested(1, name.encode()) + nested(2, nested(1, field(1, kind) + nested(2, rows + columns)))


def model(node: bytes, taken: bytes, given: bytes, opsets: Iterable[tuple[str, int]]) -> bytes:
    """Return a model of one node."""
    graph = nested(1, node) + nested(2, b"graph") + nested(11, taken) + nested(12, given)
    used = [nested(8, nested(1, domain.encode()) + field(2, version)) for domain, version in opsets]
    return b"".join([field(1, 8), nested(7, graph), *used])


def _attribute(name: str, kind: int, value: bytes) -> bytes:
    return b"".join([nested(1, name.encode()), value, field(20, kind)])
