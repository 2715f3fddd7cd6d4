"""The fields of a protobuf message, without its schema: enough to tell what a file is, and that it is whole.

Nothing is copied: what is long stays where it lies, in a file that is mapped into memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nerite.core.tensor import Buffer

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


class NoMessage(ValueError):
    """These bytes are no protobuf message."""


class CutOff(NoMessage):
    """The message ends before it is complete."""

    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing:,} bytes are missing")
        self.missing = missing


class Field(NamedTuple):
    """A field as it stands in the message."""

    number: int
    value: int | memoryview
    """A number, or the bytes of a text, a message or anything else with a length."""


def fields(message: Buffer) -> Iterator[Field]:
    """Yield the fields of a message. Raises ``NoMessage`` where it is none, ``CutOff`` where its end is missing."""
    data = memoryview(message)
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        number, form = tag >> 3, tag & 7
        if number == 0:
            raise NoMessage("a field has the number 0")
        if form == _VARINT:
            value, at = _varint(data, at)
            yield Field(number, value)
            continue
        if form == _BYTES:
            size, at = _varint(data, at)
        elif form in (_FIXED64, _FIXED32):
            size = 8 if form == _FIXED64 else 4
        else:
            raise NoMessage(f"a field has the form {form}")
        if at + size > end:
            raise CutOff(at + size - end)
        yield Field(number, data[at : at + size])
        at += size


def messages(message: Buffer, number: int) -> Iterator[memoryview]:
    """Yield the values of the field ``number`` that have a length."""
    for found, value in fields(message):
        if found == number and isinstance(value, memoryview):
            yield value


def text(message: Buffer, number: int) -> str:
    """Return the text in the field ``number``; empty if there is none."""
    return next((bytes(value).decode(errors="replace") for value in messages(message, number)), "")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_VARINT):
        if at + place >= len(data):
            raise CutOff(1)
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise NoMessage("a number has no end")
