"""What server and worker say to each other: every message, and one codec for it.

A message is a frame: length, kind and a count in eight bytes, then a body, padded to a multiple of eight so that tensor
data is aligned. Rare messages carry JSON. The two frequent ones, EXECUTE and RESULT, are packed:

    EXECUTE   batch, tokens returned, then for each request a record
    RESULT    batch, tokens returned, ``Marks``, then for each response a record
    record    header key, 0; inline tensor data
              header key, 1 + id length; a table of placements; id; inline tensor data

A header (``RequestHeader``, ``ResponseHeader``) crosses once, in a message of its own, and is referred to by its key
afterwards. Both sides overwrite the keys in the same order, so they agree without further talk. A header whose key is
old is introduced again before it is used, so that no key is overwritten in the batch that uses it: introductions go
before the batch. Where every tensor of a record is inline and its size follows from the header there is no table: the
usual small request costs sixteen bytes.

Nothing is unpickled: a worker gone mad can send nonsense, but cannot make the server run it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

from nerite.core import dtype as dtypes
from nerite.core.errors import BY_CODE, Internal, NeriteError
from nerite.core.marks import Marks
from nerite.core.request import RequestedOutput, RequestHeader
from nerite.core.response import ResponseHeader
from nerite.core.tensor import Buffer, TensorSpec
from nerite.execution.arena import Arena, Borrower, Loans

# From the server to a worker.
COMPLETE: Final = 1  # JSON: complete this model's configuration
LOAD: Final = 2  # JSON: open this model, make this instance
EXECUTE: Final = 3
CANCEL: Final = 4  # batch, indices: nobody waits for these answers
IS_READY: Final = 5
CLOSE: Final = 6  # finalize the model and exit
# From a worker to the server.
DONE: Final = 16  # JSON: the answer to COMPLETE, LOAD, IS_READY or CLOSE
FAILED: Final = 17  # JSON: code and message, instead of DONE
RESULT: Final = 18
LOG: Final = 19  # JSON: level, text, file and line
# Either way.
HEADER: Final = 32  # JSON: the header that the next key stands for
SEGMENT: Final = 33  # a segment of the sender's arena; its descriptor comes by the second socket
RETURN: Final = 34  # tokens of borrowed views that are done with

FRAME: Final = struct.Struct("<IHH")
_BATCH: Final = struct.Struct("<II")
_MARKS: Final = struct.Struct("<QQQQQ")
_RECORD: Final = struct.Struct("<II")
_PLACE: Final = struct.Struct("<QQII")
_SIZE: Final = struct.Struct("<Q")

INLINE_LIMIT: Final = 32 * 1024
"""A tensor of this many bytes or more goes through the arena."""
KEYS: Final = 4096
"""Headers that are remembered; twice as many as any batch has."""
_ERROR: Final = 0xFFFFFFFF
_INLINE: Final = 0
_YOURS: Final = 0x80000000
"""The data lies in the receiver's own arena: an input that is handed back as an output."""
_PADDING: Final = (b"", b"\0" * 7, b"\0" * 6, b"\0" * 5, b"\0" * 4, b"\0" * 3, b"\0" * 2, b"\0")

Header = TypeVar("Header", RequestHeader, ResponseHeader)


def frame(kind: int, body: bytes = b"", count: int = 0) -> bytes:
    """Return a message of ready bytes."""
    padding = _PADDING[len(body) & 7]
    return FRAME.pack(FRAME.size + len(body) + len(padding), kind, count) + body + padding


def json_frame(kind: int, value: object) -> bytes:
    """Return a message that carries JSON."""
    return frame(kind, json.dumps(value).encode())


def read_json(body: memoryview) -> Any:
    """Return what ``json_frame`` was given."""
    return json.loads(bytes(body).rstrip(b"\0"))


def tokens_frame(tokens: Sequence[int]) -> bytes:
    """Return a RETURN message."""
    return frame(RETURN, struct.pack(f"<{len(tokens)}I", *tokens), len(tokens) if len(tokens) < 65536 else 0)


def read_tokens(body: memoryview, count: int) -> tuple[int, ...]:
    """Return the tokens of a RETURN message."""
    return struct.unpack_from(f"<{count}I", body)


class Frames:
    """Cuts a stream of bytes into messages. Owns the buffers they arrive in.

    Each buffer is used once: views on it may outlive the message, and arrays made of them are writable.
    """

    __slots__ = ("_buffer", "_capacity", "_filled")

    def __init__(self) -> None:
        self._capacity = 4096
        self._buffer = bytearray(self._capacity)
        self._filled = 0

    def space(self) -> memoryview:
        """Return where the next bytes are to be received."""
        return memoryview(self._buffer)[self._filled :]

    def received(self, size: int) -> Iterator[tuple[int, int, memoryview]]:
        """Take note of ``size`` bytes more; yield kind, count and body of each message that is complete."""
        end = self._filled + size
        buffer = self._buffer
        view = memoryview(buffer)
        at = 0
        needed = 0
        while end - at >= FRAME.size:
            length, kind, count = FRAME.unpack_from(buffer, at)
            if end - at < length:
                needed = length
                break
            yield kind, count, view[at + FRAME.size : at + length]
            at += length
        if end == len(buffer) and self._capacity < 65536:
            self._capacity *= 2
        rest = end - at
        if at == 0 and needed <= len(buffer) and rest < len(buffer):
            self._filled = end
            return
        self._buffer = bytearray(max(self._capacity, needed))
        self._buffer[:rest] = view[at:end]
        self._filled = rest


class _Entry(Generic[Header]):
    """A header that has a key, and where the tensors of its plain records are."""

    __slots__ = ("extent", "header", "layout", "number", "plain", "record")

    def __init__(self, number: int, header: Header, specs: Sequence[TensorSpec]) -> None:
        """``number`` counts introductions; the key is what is left of it by ``KEYS``."""
        self.number = number
        self.header: Header = header
        self.plain = all(0 <= spec.byte_size < INLINE_LIMIT for spec in specs)
        self.record = _RECORD.pack(number % KEYS, 0)
        self.layout: list[tuple[int, int]] = []
        at = _RECORD.size
        for spec in specs:
            self.layout.append((at, at + spec.byte_size))
            at += (spec.byte_size + 7) & ~7
        self.extent = at


class Packer(Generic[Header]):
    """The sending half of the codec: headers to keys, tensors to places."""

    __slots__ = ("_arena", "_borrower", "_entries", "_keys", "_loans", "_next")

    def __init__(self, arena: Arena, loans: Loans, borrower: Borrower) -> None:
        self._arena = arena
        self._loans = loans
        self._borrower = borrower
        self._entries: dict[Header, _Entry[Header]] = {}
        self._keys: list[Header | None] = [None] * KEYS
        self._next = 0

    def entry(self, header: Header, parts: list[Buffer]) -> _Entry[Header]:
        """Return the entry of ``header``; append the message that introduces it to ``parts``, if it needs one."""
        entry = self._entries.get(header)
        if entry is None or self._next - entry.number > KEYS // 2:
            if entry is not None:
                self._keys[entry.number % KEYS] = None
            number = self._next
            self._next += 1
            if (old := self._keys[number % KEYS]) is not None:
                del self._entries[old]
            self._keys[number % KEYS] = header
            if isinstance(header, RequestHeader):
                entry = _Entry(number, header, header.inputs)
            else:
                entry = _Entry(number, header, header.outputs)
            self._entries[header] = entry
            parts.append(json_frame(HEADER, describe(header)))
        return entry

    def record(self, entry: _Entry[Header], name: str, data: Sequence[Buffer], parts: list[Buffer]) -> None:
        """Append one request or response to ``parts``."""
        if entry.plain and not name:
            parts.append(entry.record)
            for buffer in data:
                parts.append(buffer)
                if odd := len(buffer) & 7:
                    parts.append(_PADDING[odd])
            return
        raw = name.encode()
        (key,) = struct.unpack_from("<I", entry.record)
        inline: list[Buffer] = []
        places: list[bytes] = []
        for buffer in data:
            size = len(buffer)
            if size >= INLINE_LIMIT and (place := self._lend(memoryview(buffer))) is not None:
                places.append(place)
            else:
                places.append(_PLACE.pack(size, 0, _INLINE, 0))
                inline += (buffer, _PADDING[size & 7])
        parts += (_RECORD.pack(key, 1 + len(raw)), *places, raw, _PADDING[len(raw) & 7], *inline)

    def _lend(self, view: memoryview) -> bytes | None:
        size = len(view)
        borrowed = self._borrower.find(view)
        if borrowed is not None:
            segment, offset, token = borrowed
            return _PLACE.pack(size, offset, (segment + 1) | _YOURS, token)
        place = self._arena.place(view)
        if place is None:
            copy = self._arena.allocate(size)
            if copy is None:
                return None
            copy[:] = view
            view = copy
            place = self._arena.place(view)
            assert place is not None
        segment, offset = place
        return _PLACE.pack(size, offset, segment + 1, self._loans.lend(view, offset))


class Unpacker(Generic[Header]):
    """The receiving half of the codec."""

    __slots__ = ("_borrower", "_entries", "_loans", "_next")

    def __init__(self, loans: Loans, borrower: Borrower) -> None:
        self._loans = loans
        self._borrower = borrower
        self._entries: list[_Entry[Header] | None] = [None] * KEYS
        self._next = 0

    def introduce(self, header: Header) -> None:
        """Take note of the header that the next key stands for."""
        number = self._next
        self._next += 1
        specs = header.inputs if isinstance(header, RequestHeader) else header.outputs
        self._entries[number % KEYS] = _Entry(number, header, specs)

    def record(self, body: memoryview, at: int) -> tuple[Header | NeriteError, str, list[Buffer], int]:
        """Return header (or the error in its place), id, tensors, and where the next record begins."""
        key, name_size = _RECORD.unpack_from(body, at)
        if key == _ERROR:
            return self._error(body, at)
        entry = self._entries[key]
        assert entry is not None
        if not name_size:
            return entry.header, "", [body[at + a : at + b] for a, b in entry.layout], at + entry.extent
        at += _RECORD.size
        places = [_PLACE.unpack_from(body, at + index * _PLACE.size) for index in range(len(entry.layout))]
        at += len(places) * _PLACE.size
        name_size -= 1
        name = bytes(body[at : at + name_size]).decode()
        at += (name_size + 7) & ~7
        data: list[Buffer] = []
        for size, offset, segment, token in places:
            if segment == _INLINE:
                data.append(body[at : at + size])
                at += (size + 7) & ~7
            elif segment & _YOURS:
                data.append(self._loans.part(token, offset, size))
            else:
                data.append(self._borrower.view(segment - 1, offset, size, token))
        return entry.header, name, data, at

    def _error(self, body: memoryview, at: int) -> tuple[Header | NeriteError, str, list[Buffer], int]:
        at += _RECORD.size
        (size,) = _SIZE.unpack_from(body, at)
        at += _SIZE.size
        return read_error(body[at : at + size]), "", [], at + ((size + 7) & ~7)


def error_record(error: NeriteError, parts: list[Buffer]) -> None:
    """Append a response that is an error."""
    raw = json.dumps({"code": error.code, "message": error.message}).encode()
    parts += (_RECORD.pack(_ERROR, 0), _SIZE.pack(len(raw)), raw, _PADDING[len(raw) & 7])


def error_json(error: NeriteError) -> dict[str, str]:
    """Return what a FAILED message carries."""
    return {"code": error.code, "message": error.message}


def read_error(body: memoryview) -> NeriteError:
    """Return the error that a FAILED message or an error record carries."""
    value = read_json(body)
    return BY_CODE.get(value["code"], Internal)(value["message"])


def batch_message(
    kind: int, batch: int, count: int, tokens: Sequence[int], marks: Marks | None, records: list[Buffer]
) -> bytes:
    """Return an EXECUTE or RESULT message of ``records``."""
    head = _BATCH.pack(batch, len(tokens))
    if tokens:
        padded = (*tokens, 0) if len(tokens) & 1 else tokens
        head += struct.pack(f"<{len(padded)}I", *padded)
    if marks is not None:
        head += _MARKS.pack(marks.started_ns, marks.inputs_ready_ns, marks.computed_ns, marks.ended_ns, marks.failed)
    size = FRAME.size + len(head) + sum(map(len, records))
    return b"".join((FRAME.pack(size, kind, count), head, *records))


def read_batch(body: memoryview) -> tuple[int, tuple[int, ...], int]:
    """Return batch, tokens returned, and where marks or records begin."""
    batch, count = _BATCH.unpack_from(body)
    tokens = struct.unpack_from(f"<{count}I", body, _BATCH.size) if count else ()
    return batch, tokens, _BATCH.size + ((count + 1) & ~1) * 4


def read_marks(body: memoryview, at: int) -> tuple[Marks, int]:
    """Return the times of a RESULT message, and where its records begin."""
    marks = Marks()
    started, ready, computed, ended, failed = _MARKS.unpack_from(body, at)
    marks.started_ns, marks.inputs_ready_ns, marks.computed_ns, marks.ended_ns = started, ready, computed, ended
    marks.failed = bool(failed)
    return marks, at + _MARKS.size


def describe(header: RequestHeader | ResponseHeader) -> dict[str, Any]:
    """Return a header as JSON."""
    if isinstance(header, ResponseHeader):
        return {
            "model": header.model_name,
            "version": header.model_version,
            "tensors": [_spec(spec) for spec in header.outputs],
            "parameters": header.parameters,
        }
    return {
        "model": header.model_name,
        "version": header.model_version,
        "tensors": [_spec(spec) for spec in header.inputs],
        "outputs": [output.name for output in header.outputs],
        "parameters": header.parameters,
        "priority": header.priority,
        "timeout_us": header.timeout_us,
        "sequence": [header.sequence_id, header.sequence_start, header.sequence_end],
        "batch_size": header.batch_size,
    }


def read_request_header(value: dict[str, Any]) -> RequestHeader:
    """Return the request header that ``describe`` was given."""
    sequence_id, start, end = value["sequence"]
    header = RequestHeader(
        value["model"],
        value["version"],
        _specs(value),
        [RequestedOutput(name) for name in value["outputs"]],
        parameters=value["parameters"],
        priority=value["priority"],
        timeout_us=value["timeout_us"],
        sequence_id=sequence_id,
        sequence_start=start,
        sequence_end=end,
    )
    header.batch_size = value["batch_size"]
    return header


def read_response_header(value: dict[str, Any]) -> ResponseHeader:
    """Return the response header that ``describe`` was given."""
    return ResponseHeader(value["model"], value["version"], _specs(value), value["parameters"])


def _spec(spec: TensorSpec) -> list[object]:
    return [spec.name, spec.datatype.name, spec.shape]


def _specs(value: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec(name, dtypes.BY_NAME[datatype], tuple(shape)) for name, datatype, shape in value["tensors"]]
