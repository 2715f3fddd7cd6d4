"""The wire form of the two inference messages, read and written without making objects of the tensors.

A serialized ``ModelInferRequest`` from one client begins with the same bytes again and again: model, inputs, outputs.
Only the id in the middle and the contents of the tensors differ. ``split`` takes those apart, so that the rest can be
looked up, and the contents become views. It looks at a bounded number of fields, and only at those that there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from nerite.core.errors import InvalidArgument
from nerite.core.tensor import Buffer
from nerite.core.text import MAX_NAME
from nerite.wire import fields

MAX_FIELDS: Final = 5_000
"""Fields of a request, those of its inputs and outputs among them, but for the values of tensors."""
MAX_REPEATED: Final = 1_024
"""Inputs, outputs, parameters, raw contents, and dimensions of a shape."""
MAX_HEADER: Final = 4 * 1024 * 1024
"""Bytes of a request beside its tensors. A parameter may have a million characters."""
LARGE_HEADER: Final = 64 * 1024
"""From here on the fields of inputs and outputs are counted before protobuf reads them."""
_LONGEST_NAME: Final = 4 * MAX_NAME
"""Bytes of an id or a name, beyond which it has too many characters whatever they are."""
_MAX_PEEKED: Final = 64
"""Fields that are looked at in the first bytes of a message."""

MODEL_NAME = 0x0A  # field 1, length-delimited
MODEL_VERSION = 0x12
ID = 0x1A
RAW_INPUT = 0x3A  # field 7
RAW_OUTPUT = 0x32  # field 6 of the response
_INPUT = 0x2A
_OUTPUT = 0x32
_CONTENTS = 0x2A  # of an input
_NO_CONTENTS = bytes((_CONTENTS, 0))
_RESPONSE_ID = 3
_NAMES: Final = {
    MODEL_NAME: "model_name", MODEL_VERSION: "model_version", 0x22: "parameters", _INPUT: "inputs", _OUTPUT: "outputs",
}  # fmt: skip
"""The fields beside id and raw contents. All of them are messages or texts."""


class Malformed(Exception):
    """The bytes are not a serialized message."""


class TooMany(InvalidArgument):
    """The message has more of something than is read."""


class Parts(NamedTuple):
    """A request taken apart."""

    header: bytes
    """What is left of it without the id, the raw contents, the typed contents, and fields that there are not."""
    id: str
    raw: list[Buffer]
    plain: bool
    """``header`` is the beginning of the message, and the raw contents, with the shortest lengths, are the rest."""
    typed: list[list[memoryview]]
    """The typed contents of each input: messages, of which the fields are to be joined. Empty where there are raw ones,
    unless the header is large."""


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


def read_field(message: memoryview, at: int) -> tuple[int, int, int]:
    """Return tag, start of the value and end of a field. Raises ``Malformed``."""
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
    if stop > len(message):
        raise Malformed
    return tag, at, stop


def each_field(message: memoryview, most: int, what: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield tag, start, start of the value and end of each field.

    Raises ``Malformed``, or ``TooMany`` if there are more than ``most``; ``what`` it is then that has them.
    """
    end = len(message)
    at = 0
    for _ in range(most):
        if at >= end:
            return
        start = at
        tag, at, stop = read_field(message, at)
        yield tag, start, at, stop
        at = stop
    if at < end:
        raise _too_many_fields(what)


def _too_many_fields(what: str) -> TooMany:
    """Return the refusal of a request with more fields than are looked at, most of which are ``what``."""
    return TooMany(f"the request has more than the {MAX_FIELDS} fields that are allowed, most of them {what}")


def split(message: memoryview) -> Parts:
    """Take a serialized ``ModelInferRequest`` apart.

    Raises ``Malformed``, ``TooMany``, or ``InvalidArgument`` for an id that is too long.
    """
    end = len(message)
    at = 0
    kept: list[memoryview] = []
    raw: list[Buffer] = []
    request_id = ""
    plain = True
    header_size = 0
    # As ``read_field``, in line: this runs for each request.
    for _ in range(MAX_FIELDS):
        if at >= end:
            break
        start = at
        tag = message[at]
        at += 1
        if tag > 0x7F:
            tag, at = read_varint(message, start)
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
        elif tag in _NAMES:
            kept.append(message[start:stop])
            header_size += stop - start
            plain = plain and not raw
        else:
            plain = False
            if tag == ID:
                request_id = _text(message[at:stop])
            elif not 8 <= tag < 1 << 32:
                raise Malformed
        at = stop
    if at < end:
        raise _too_many_fields(_most_frequent(kept, raw))
    if len(raw) > MAX_REPEATED:
        raise too_many("raw_input_contents", len(raw))
    typed: list[list[memoryview]] = []
    if (not raw and header_size) or header_size > LARGE_HEADER:
        kept, typed = _without_contents(kept)
        header_size = sum(map(len, kept))
        plain = False
    if header_size > MAX_HEADER:
        raise TooMany(
            f"the request has {header_size} bytes beside its tensors, more than the {MAX_HEADER} that are allowed"
        )
    return Parts(b"".join(kept), request_id, raw, plain, typed)


def too_many(what: str, count: int) -> TooMany:
    """Return the refusal of a request with more than ``MAX_REPEATED`` of something."""
    return TooMany(f"'{what}' has {count} elements, more than the {MAX_REPEATED} that are allowed")


def _text(raw: memoryview) -> str:
    """Return an id. Raises ``Malformed`` for one that is not UTF-8, ``InvalidArgument`` for one of any length."""
    if len(raw) > _LONGEST_NAME:
        raise InvalidArgument(f"'id' is {len(raw)} bytes long, more than the {MAX_NAME} characters that are allowed")
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        raise Malformed from None


def _most_frequent(kept: list[memoryview], raw: list[Buffer]) -> str:
    """Return what most of the fields are."""
    counts = Counter(f"'{_NAMES[read_varint(field, 0)[0]]}'" for field in kept)
    counts["'raw_input_contents'"] = len(raw)
    counts["unknown"] = MAX_FIELDS - len(kept) - len(raw)
    return counts.most_common(1)[0][0]


def _without_contents(kept: list[memoryview]) -> tuple[list[memoryview], list[list[memoryview]]]:
    """Return the fields of a header without the values of tensors, and those of each input.

    Where there were typed contents are empty ones: that there are any is said by the header.
    """
    left = MAX_FIELDS - len(kept)
    rest: list[memoryview] = []
    typed: list[list[memoryview]] = []
    for field in kept:
        tag, at = read_varint(field, 0)
        if tag not in (_INPUT, _OUTPUT):
            rest.append(field)
            continue
        _, at = read_varint(field, at)
        value = field[at:]
        parts: list[memoryview] = []
        contents: list[memoryview] = []
        for inner, start, at, stop in each_field(value, left, f"in '{_NAMES[tag]}'"):
            left -= 1
            if tag == _INPUT and inner == _CONTENTS:
                contents.append(value[at:stop])
            else:
                parts.append(value[start:stop])
        if contents:
            text = b"".join(parts) + _NO_CONTENTS
            rest.append(memoryview(fields.nested(_INPUT >> 3, text)))
        else:
            rest.append(field)
        if tag == _INPUT:
            typed.append(contents)
    return rest, typed


def peek(beginning: memoryview) -> tuple[str, str, int]:
    """Return model name, version, and where the first tensor's bytes begin, from the first bytes of a request.

    What is not there, or not in the usual order, is empty or 0.
    """
    name = version = ""
    at = 0
    end = len(beginning)
    try:
        for _ in range(_MAX_PEEKED):
            if at >= end:
                break
            tag, at = read_varint(beginning, at)
            size, at = read_varint(beginning, at)
            if tag == RAW_INPUT:
                return name, version, at
            if tag & 7 != 2 or at + size > end:
                break
            if tag <= MODEL_VERSION and size > _LONGEST_NAME:
                return "", "", 0
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
    except (Malformed, InvalidArgument):
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
