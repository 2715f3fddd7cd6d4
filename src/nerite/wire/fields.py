"""Encodes fields of protobuf messages without the protobuf package."""

from __future__ import annotations

from typing import Final

_SMALL: Final = [bytes((value,)) for value in range(0x80)]


def varint(value: int) -> bytes:
    """Encode a non-negative number, seven bits per byte."""
    if value < 0x80:
        return _SMALL[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number_field(field: int, value: int) -> bytes:
    """Encode a field that is a non-negative number."""
    return varint(field << 3) + varint(value)


def nested_field(field: int, data: bytes) -> bytes:
    """Encode a field that is a message, a string, or bytes."""
    return b"%b%b%b" % (varint(field << 3 | 2), varint(len(data)), data)
