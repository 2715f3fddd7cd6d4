"""What is needed of protobuf to write an ONNX model of one node. Field numbers are those of onnx.proto.

By hand, since the package ``onnx`` is not there where models are served, and this is a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nerite.core.tensor import Array

DOUBLE, FLOAT = 11, 1
"""Data types."""
_INT, _STRING, _TENSOR, _INTS, _STRINGS = 2, 3, 4, 7, 8
"""Types of attributes."""


def number(name: str, value: int) -> bytes:
    """Return an attribute that is a number."""
    return _attribute(name, _INT, _field(3, value))


def text(name: str, value: str) -> bytes:
    """Return an attribute that is a text."""
    return _attribute(name, _STRING, _bytes(4, value.encode()))


def numbers(name: str, values: Array) -> bytes:
    """Return an attribute that is a list of numbers, none of them below 0."""
    known = [_varint(value) for value in range(int(values.max(initial=0)) + 1)]
    return _attribute(name, _INTS, _bytes(8, b"".join([known[value] for value in values.tolist()])))


def texts(name: str, values: Iterable[int], known: Sequence[str]) -> bytes:
    """Return an attribute that is a list of texts, each given as its place in ``known``."""
    written = [_bytes(9, value.encode()) for value in known]
    return _attribute(name, _STRINGS, b"".join([written[value] for value in values]))


def doubles(name: str, values: Array) -> bytes:
    """Return an attribute that is a tensor of doubles."""
    raw = np.ascontiguousarray(values, "<f8").tobytes()
    tensor = _field(1, len(values)) + _field(2, DOUBLE) + _bytes(8, name.encode()) + _bytes(9, raw)
    return _attribute(name, _TENSOR, _bytes(5, tensor))


def node(operator: str, domain: str, taken: str, given: str, attributes: Iterable[bytes]) -> bytes:
    """Return a node of one input and one output."""
    names = _bytes(1, taken.encode()) + _bytes(2, given.encode()) + _bytes(4, operator.encode())
    return b"".join([names, *[_bytes(5, attribute) for attribute in attributes], _bytes(7, domain.encode())])


def table(name: str, kind: int, width: int) -> bytes:
    """Return what an input or output is, which is a tensor of any number of rows."""
    rows, columns = _bytes(1, _bytes(2, b"rows")), _bytes(1, _field(1, width))
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, _field(1, kind) + _bytes(2, rows + columns)))


def model(node: bytes, taken: bytes, given: bytes, opsets: Iterable[tuple[str, int]]) -> bytes:
    """Return a model of one node."""
    graph = _bytes(1, node) + _bytes(2, b"graph") + _bytes(11, taken) + _bytes(12, given)
    used = [_bytes(8, _bytes(1, domain.encode()) + _field(2, version)) for domain, version in opsets]
    return b"".join([_field(1, 8), _bytes(7, graph), *used])


def _attribute(name: str, kind: int, value: bytes) -> bytes:
    return b"".join([_bytes(1, name.encode()), value, _field(20, kind)])


def _field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    return b"".join([_varint(number << 3 | 2), _varint(len(value)), value])


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
