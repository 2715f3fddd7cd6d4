"""The wire form of the two inference messages, read and written without making objects of the tensors.

A serialized ``ModelInferRequest`` from one client begins with the same bytes again and again: model, inputs, outputs.
Only the id in the middle and the raw contents at the end differ. ``split`` takes those three apart, so that the
beginning can be looked up, and the contents become views.
"""

from __future__ import annotations

from typing import NamedTuple

from nerite.core.tensor import Buffer
from nerite.wire import fields

MODEL_NAME = 0x0A  # field 1, length-delimited
MODEL_VERSION = 0x12
ID = 0x1A
RAW_INPUT = 0x3A  # field 7
RAW_OUTPUT = 0x32  # field 6 of the response
_RESPONSE_ID = 3


class Malformed(Exception):
    """The bytes are not a serialized message."""


class Parts(NamedTuple):
    """A request taken apart."""

    header: bytes
    """All of it but the id and the raw contents."""
    id: str
    raw: list[Buffer]
    plain: bool
    """``header`` is the beginning of the message, and the raw contents, with the shortest lengths, are the rest."""


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number and where it ends. Raises ``Malformed``."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise Malformed
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def split(message: memoryview) -> Parts:
    """Take a serialized ``ModelInferRequest`` apart. Raises ``Malformed``."""
    end = len(message)
    at = 0
    kept: list[memoryview] = []
    raw: list[Buffer] = []
    request_id = ""
    plain = True
    while at < end:
        start = at
        tag, at = read_varint(message, at)
        kind = tag & 7
        if kind == 2:
            size, at = read_varint(message, at)
            stop = at + size
        elif kind == 0:
            _, stop = read_varint(message, at)
        elif kind in (1, 5):
            stop = at + (8 if kind == 1 else 4)
        else:
            raise Malformed
        if stop > end:
            raise Malformed
        if tag == RAW_INPUT:
            raw.append(message[at:stop])
            plain = plain and at - start == len(raw_input(stop - at))
        elif tag == ID:
            try:
                request_id = str(message[at:stop], "utf-8")
            except UnicodeDecodeError:
                raise Malformed from None
            plain = False
        else:
            kept.append(message[start:stop])
            plain = plain and not raw
        at = stop
    return Parts(b"".join(kept), request_id, raw, plain)


def peek(beginning: memoryview) -> tuple[str, str, int]:
    """Return model name, version, and where the first tensor's bytes begin, from the first bytes of a request.

    What is not there, or not in the usual order, is empty or 0.
    """
    name = version = ""
    at = 0
    end = len(beginning)
    try:
        while at < end:
            tag, at = read_varint(beginning, at)
            size, at = read_varint(beginning, at)
            if tag == RAW_INPUT:
                return name, version, at
            if tag & 7 != 2 or at + size > end:
                break
            if tag == MODEL_NAME:
                name = str(beginning[at : at + size], "utf-8")
            elif tag == MODEL_VERSION:
                version = str(beginning[at : at + size], "utf-8")
            at += size
    except (Malformed, UnicodeDecodeError):
        return "", "", 0
    return name, version, 0


def id_of(message: memoryview) -> str:
    """Return the id of a request that may be wrong, empty where it cannot be found."""
    try:
        return split(message).id
    except Malformed:
        return ""


def response_id(request_id: str) -> bytes:
    """Return the id field of a response."""
    return fields.nested(_RESPONSE_ID, request_id.encode())


def raw_input(size: int) -> bytes:
    """Return what stands before ``size`` bytes of raw contents in a request, as every encoder writes it."""
    return bytes((RAW_INPUT,)) + fields.varint(size)


def raw_output(size: int) -> bytes:
    """Return what stands before ``size`` bytes of raw contents in a response."""
    return bytes((RAW_OUTPUT, size)) if size < 0x80 else bytes((RAW_OUTPUT,)) + fields.varint(size)
