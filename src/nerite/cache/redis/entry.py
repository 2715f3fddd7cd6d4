"""A response as Redis keeps it. What is read there may have been written by anybody, and cut off anywhere.

    MAGIC, the key, a checksum of all that follows, the size of the header
    the header as JSON, as ``core/header_form.py`` has it, and the size of each tensor
    the tensors

The key stands in it so that an entry is not taken for another one; the magic changes with the form.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any, Final

from nerite.core import footprint, header_form
from nerite.core.byte_budget import RESPONSE_HEADERS, Memo
from nerite.core.response import InferenceResponse, ResponseHeader

MAGIC: Final = b"nerite\0\1"
_HEAD: Final = struct.Struct("<8s32sII")
_LENGTH: Final = struct.Struct("<I")


class BadEntry(Exception):
    """What is no entry, or not one that can be believed; and why."""


class EntryForm:
    """Writes and reads entries. Equal headers are one object, on which transports leave what they made of it."""

    __slots__ = ("_headers",)

    def __init__(self) -> None:
        self._headers: Memo[bytes, tuple[ResponseHeader, list[int]]] = Memo()

    def write(self, key: bytes, response: InferenceResponse) -> bytes:
        """Return the entry of a response that succeeded."""
        assert response.header is not None
        said = {**header_form.describe(response.header), "sizes": [len(part) for part in response.data]}
        header = json.dumps(said).encode()
        body = b"".join((header, *response.data))
        return _HEAD.pack(MAGIC, key, zlib.crc32(body), len(header)) + body

    def read(self, key: bytes, entry: bytes) -> InferenceResponse:
        """Return the response that an entry is of. Raises ``BadEntry``."""
        if len(entry) < _HEAD.size:
            raise BadEntry("it is too short")
        magic, of_key, checksum, size = _HEAD.unpack_from(entry)
        if magic != MAGIC:
            raise BadEntry("it is not one of this version's")
        if of_key != key:
            raise BadEntry("it is that of another key")
        body = memoryview(entry)[_HEAD.size :]
        if zlib.crc32(body) != checksum:
            raise BadEntry("it is damaged")
        header, sizes = self._header(bytes(body[:size]))
        if size + sum(sizes) != len(body):
            raise BadEntry("its tensors are not of the sizes that it says")
        data = []
        at = size
        for spec, length in zip(header.outputs, sizes, strict=True):
            part = body[at : at + length]
            if spec.byte_size < 0 and not _strings(part, spec.elements):
                raise BadEntry(f"the strings of '{spec.name}' are not well-formed")
            data.append(part)
            at += length
        return InferenceResponse(header, data)

    def _header(self, raw: bytes) -> tuple[ResponseHeader, list[int]]:
        known = self._headers.get(raw)
        if known is None:
            try:
                known = _checked(json.loads(raw))
            except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
                raise BadEntry("its header is none") from error
            size = 2 * footprint.of_response_header(known[0]) + len(raw) + 40 * len(known[1])
            RESPONSE_HEADERS.put(self._headers, raw, known, size)
        return known


def _checked(said: Any) -> tuple[ResponseHeader, list[int]]:
    """Return the header, and the sizes of the tensors. Raises ``ValueError`` and its like if anything is strange."""
    header = header_form.read_response_header(said)
    sizes = said["sizes"]
    if not (isinstance(header.model_name, str) and isinstance(header.model_version, str)):
        raise ValueError("names are text")
    if not all(isinstance(value, bool | int | float | str) for value in header.parameters.values()):
        raise ValueError("parameters have simple values")
    for spec, size in zip(header.outputs, sizes, strict=True):
        if not _natural(size, *spec.shape) or not isinstance(spec.name, str) or spec.byte_size not in (-1, size):
            raise ValueError("not a tensor")
    return header, sizes


def _natural(*numbers: object) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _strings(data: memoryview, count: int) -> bool:
    """Say whether this is the wire form of so many strings."""
    at, size = 0, len(data)
    for _ in range(count):
        if size - at < _LENGTH.size:
            return False
        at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
    return at == size
