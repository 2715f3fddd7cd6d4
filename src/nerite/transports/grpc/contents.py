"""Typed contents of tensors: what protobuf's encoding of numbers and strings means, as the bytes of a tensor.

Floats are encoded as the bytes that they are, so these are not copied. Numbers of variable length are decoded in numpy,
a piece at a time. Protobuf's own parser would make a Python object of each element, and release nothing meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from nerite.core.errors import InvalidArgument
from nerite.core.tensor import Buffer, TensorSpec
from nerite.transports.grpc.infer_wire import MAX_FIELDS, Malformed, each_field, read_field, read_varint

CONTENTS: Final[Mapping[str, str]] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of each datatype."""
_NAMES: Final = (
    "", "bool_contents", "int_contents", "int64_contents", "uint_contents", "uint64_contents", "fp32_contents",
    "fp64_contents", "bytes_contents",
)  # fmt: skip
"""By number."""
_KINDS: Final = (-1, 0, 0, 0, 0, 0, 5, 1, 2)
"""The wire type of one element of each."""
_STRINGS: Final = 8
_STRING_TAG: Final = _STRINGS << 3 | 2
_PACKED: Final = 2
_LONGEST: Final = 10
"""Bytes of a number of 64 bits."""
_PIECE: Final = 256 * 1024
_FEW: Final = 128
"""Bytes of numbers up to which Python is faster than numpy."""
_MASK: Final = (1 << 64) - 1
_PAUSE_EVERY: Final = 4096
"""Strings after which a thread sleeps, so that the event loop need not wait for the interpreter's lock to be taken."""
_PAUSE: Final = 0.0002
_SHORT: Final = tuple(size.to_bytes(4, "little") for size in range(0x80))
"""What stands before a short string in the wire form of a tensor."""

Take = Callable[[int], None]
"""Is told of the size of a tensor before there is memory for it; what it raises ends the work."""


def read(spec: TensorSpec, messages: Sequence[memoryview], model: str, take: Take, *, aside: bool) -> Buffer:
    """Return the bytes of a tensor whose typed contents are ``messages``, joined.

    ``aside``: this is not the event loop's thread, which is let go on now and then. Raises ``Malformed`` for what is no
    message, ``InvalidArgument`` with Triton's text for contents of another type.
    """
    expected = CONTENTS.get(spec.datatype.name)
    if expected == _NAMES[_STRINGS]:
        found, others = _strings(messages, take, aside=aside)
        _check(spec, model, expected, others | {_STRINGS} if found else others)
        return found
    given: dict[int, list[memoryview]] = {}
    for message in messages:
        for tag, _, at, stop in each_field(message, MAX_FIELDS, f"in the contents of '{spec.name}'"):
            number, kind = tag >> 3, tag & 7
            if 0 < number <= _STRINGS and kind in (_PACKED, _KINDS[number]) and (stop > at or number == _STRINGS):
                # Elements that are not packed are together what a packed field has.
                given.setdefault(number, []).append(message[at:stop])
    _check(spec, model, expected, given.keys())
    if not given:
        return b""
    ((number, chunks),) = given.items()
    if _KINDS[number]:
        return _fixed(chunks, spec.datatype.size, take)
    return _varints(chunks, spec.datatype.numpy, take)


def _check(spec: TensorSpec, model: str, expected: str | None, given: Any) -> None:
    """Raise Triton's errors unless all that is given is what is expected. ``given`` are numbers of fields."""
    names = [_NAMES[number] for number in sorted(given)]
    for name in names:
        if name != expected:
            if names[0] == expected:
                raise InvalidArgument(
                    f"unexpected explicit tensor data for input tensor '{spec.name}' for model '{model}', binary data "
                    "was already supplied."
                )
            type_of = next((datatype for datatype, field in CONTENTS.items() if field == name), "")
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{spec.name}' for model '{model}' of type "
                f"'{type_of}', expected datatype '{spec.datatype.name}'"
            )
    if expected is None:
        raise InvalidArgument(
            f"unexpected explicit tensor data for input tensor '{spec.name}' for model '{model}': "
            f"datatype '{spec.datatype.name}' is raw_input_contents only"
        )


def _fixed(chunks: list[memoryview], size: int, take: Take) -> Buffer:
    if any(len(chunk) % size for chunk in chunks):
        raise Malformed
    if len(chunks) == 1:
        return chunks[0]
    take(sum(map(len, chunks)))
    return bytearray().join(chunks)


def _varints(chunks: list[memoryview], datatype: np.dtype[Any], take: Take) -> Buffer:
    if sum(map(len, chunks)) <= _FEW:
        return np.array([*_few(chunks)], np.uint64).astype(datatype).data.cast("B")
    count = sum(int(np.count_nonzero(piece < 0x80)) for chunk in chunks for piece in _pieces(chunk))
    take(count * datatype.itemsize)
    values = np.empty(count, datatype)
    filled = 0
    for chunk in chunks:
        for piece in _pieces(chunk):
            decoded = _decoded(piece)
            # Narrow integers travel in wider fields; what does not fit wraps, as it does in C.
            values[filled : filled + len(decoded)] = decoded != 0 if datatype == np.bool_ else decoded.astype(datatype)
            filled += len(decoded)
    return values.data.cast("B")


def _few(chunks: list[memoryview]) -> Iterator[int]:
    for chunk in chunks:
        at = 0
        while at < len(chunk):
            value, at = read_varint(chunk, at)
            yield value & _MASK


def _pieces(chunk: memoryview) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Yield numbers that follow each other, in pieces that end with the last byte of a number."""
    whole = np.frombuffer(chunk, np.uint8)
    at = 0
    while at < len(whole):
        stop = min(at + _PIECE, len(whole))
        last = np.flatnonzero(whole[max(at, stop - _LONGEST) : stop] < 0x80)
        if not len(last) or (stop == len(whole) and whole[-1] >= 0x80):
            raise Malformed
        stop = max(at, stop - _LONGEST) + int(last[-1]) + 1
        yield whole[at:stop]
        at = stop


def _decoded(piece: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
    """Return the numbers in a piece, all without a sign."""
    ends = np.flatnonzero(piece < 0x80)
    if len(ends) == len(piece):
        return piece
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > _LONGEST:
        raise Malformed
    low = piece & 0x7F
    values = low[starts].astype(np.uint64)
    for byte in range(1, longest):
        longer = np.flatnonzero(lengths > byte)
        values[longer] |= low[starts[longer] + byte].astype(np.uint64) << np.uint64(7 * byte)
    return values


def _strings(messages: Sequence[memoryview], take: Take, *, aside: bool) -> tuple[bytearray, set[int]]:
    """Return the wire form of the strings, and the numbers of the other fields that have contents."""
    joined = bytearray()
    others: set[int] = set()
    taken = count = 0
    for message in messages:
        at, end = 0, len(message)
        while at < end:
            count += 1
            if message[at] == _STRING_TAG and at + 1 < end and (size := message[at + 1]) < 0x80:  # mostly
                at += 2
                stop = at + size
                joined += _SHORT[size]
                if size:
                    joined += message[at:stop]
            else:
                tag, at, stop = read_field(message, at)
                number = tag >> 3
                if tag == _STRING_TAG:
                    joined += (stop - at).to_bytes(4, "little")
                    joined += message[at:stop]
                elif 0 < number < _STRINGS and tag & 7 in (_PACKED, _KINDS[number]) and stop > at:
                    others.add(number)
            if stop > end:
                raise Malformed
            at = stop
            if not count % _PAUSE_EVERY:
                take(len(joined) - taken)
                taken = len(joined)
                if aside:
                    time.sleep(_PAUSE)
    take(len(joined) - taken)
    return joined, others
