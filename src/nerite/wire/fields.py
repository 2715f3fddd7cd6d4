"""Fields of protobuf messages as bytes, for code that writes them without the protobuf package."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """Return a number of no negative value, seven bits a byte."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number_field(field: int, value: int) -> bytes:
    """Return a field that is a number of no negative value."""
    return varint(field << 3) + varint(value)


def nested_field(field: int, data: bytes) -> bytes:
    """Return a field that is a message, a text, or bytes."""
    return b"%b%b%b" % (varint(field << 3 | 2), varint(len(data)), data)
