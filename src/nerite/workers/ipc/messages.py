"""What server and worker say to each other: every message.

A message is a frame: length, kind and a count in eight bytes, then a body, padded to a multiple of eight so that tensor
data is aligned. Rare messages carry JSON. The frequent ones are packed:

    EXECUTE   batch, tokens returned, then for each request a record
    RESULT    batch, tokens returned, ``ExecutionTimes``, then for each response a record
    EXECUTE_ON, RESULT_ON  the same of a batch that other models here may follow: EXECUTE_ON has the number of a STRETCH
              before its records, RESULT_ON each ``FusedRun`` of theirs, and before each record how far that request got
    PART      batch, tokens returned, ``ExecutionTimes``, then the record of one response to one request of the batch
    LAST      the same; no other follows
    CONTEXTS  batch, then for each request that is traced its index, and where in its trace it stands: before EXECUTE,
              once the worker has asked for ``contexts``
    CALL      call, tokens returned, for which batch it is made and how, then the record of a request to another model
    ANSWER    call, tokens returned, then the record of one response to it
    REPORT    how an engine is, and what its last step has brought to which request: see ``engine_reports``

``records`` says what a record is. RESULT answers each request of its batch, or says that its responses come one by one
(PART, LAST): some may have come before, and they may go on coming while other batches run. A model's calls have numbers
of their own.

Nothing is unpickled: a worker gone mad can send nonsense, but cannot make the server run it.
"""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nerite.core.engine_report import EngineReport, RequestBegun, RequestEnded, RequestProgress
from nerite.core.errors import BY_CODE, Internal, NeriteError
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.tensor import Buffer
from nerite.core.trace_context import TraceContext

if TYPE_CHECKING:
    from nerite.core.request import InferenceRequest
    from nerite.instances.instance import Batch

# From the server to a worker.
COMPLETE: Final = 1  # JSON: complete this model's configuration
LOAD: Final = 2  # JSON: open this model, make this instance, at this seat
EXECUTE: Final = 3
CANCEL: Final = 4  # nobody waits for the responses of this request of a batch
IS_READY: Final = 5  # JSON: ask the model at this seat
CLOSE: Final = 6  # JSON: finalize the model at this seat, and exit if it is the last
PAUSE: Final = 7  # whoever waits for the responses of this request has enough of them for now
RESUME: Final = 8  # and wants more again
OF_REQUEST: Final = (CANCEL, PAUSE, RESUME)
ANSWER: Final = 9  # the count says whether it is the last
TOLD: Final = 10  # JSON: the answer to ASK
STRETCH: Final = 11  # JSON: models here that may follow a batch, and the number that stands for them
EXECUTE_ON: Final = 12
CONTEXTS: Final = 13  # the count says of how many requests
TRIM: Final = 14  # give back memory of tensors that was not used since the last of these
# From a worker to the server.
DONE: Final = 16  # JSON: the answer to COMPLETE, LOAD, IS_READY or CLOSE; the count is that of the question
FAILED: Final = 17  # JSON: code and message, instead of DONE
RESULT: Final = 18
LOG: Final = 19  # JSON: level, text, file, line and the ids of the requests that it is about
PART: Final = 20
LAST: Final = 21
CALL: Final = 22
GIVE_UP: Final = 23  # nobody waits for the answers to a call
TAKEN: Final = 24  # so many answers to a call have found a reader
ASK: Final = 25  # JSON: something that a model wants done, or to know, of other models
RESULT_ON: Final = 26
REPORT: Final = 27  # the count is the seat of the engine
METRICS: Final = 28  # JSON: a number of changes, and what the models here have counted themselves, with all of these
METRICS_DUE: Final = 30  # JSON: the number of changes before the next response; METRICS with them is to come
CANCEL_CALL: Final = 29  # a call is to be cancelled; its answers are still waited for
# Either way.
SEGMENT: Final = 33  # JSON: memory to map; its descriptor comes by the second socket
RETURN: Final = 34  # tokens of borrowed views that are done with
FORGET: Final = 35  # JSON: the number of a segment that no later message will name

STACKS_SIGNAL: Final = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""No message, as it gets through to a worker that reads none: it writes down where its threads are. The last of the
real-time signals is one that hardly anybody uses, and macOS has none of those."""
FRAME: Final = struct.Struct("<IHH")
_BATCH: Final = struct.Struct("<II")
_MARKS: Final = struct.Struct("<QQQQQ")
_CALLER: Final = struct.Struct("<IHH")
_PAIR: Final = struct.Struct("<II")
_RUN: Final = struct.Struct("<HHI")
_CONTEXT: Final = struct.Struct("<16sQHH4x")
SEATS: Final = 256
"""Instances that may live in one worker. The number of a batch says in its lowest byte which of them has it."""
SEAT: Final = SEATS - 1
NO_BATCH: Final = 0
"""The batch of a call that is made for none in particular."""
ALL: Final = 0xFFFF
"""The index of a call that is made for a batch as a whole."""
PADDING: Final = (b"", b"\0" * 7, b"\0" * 6, b"\0" * 5, b"\0" * 4, b"\0" * 3, b"\0" * 2, b"\0")


def frame(kind: int, body: bytes = b"", count: int = 0) -> bytes:
    """Return a message of ready bytes."""
    padding = PADDING[len(body) & 7]
    return FRAME.pack(FRAME.size + len(body) + len(padding), kind, count) + body + padding


def json_frame(kind: int, value: object, count: int = 0) -> bytes:
    """Return a message that carries JSON."""
    return frame(kind, json.dumps(value).encode(), count)


def read_json(body: memoryview) -> Any:
    """Return what ``json_frame`` was given."""
    return json.loads(bytes(body).rstrip(b"\0"))


def segment_frame(number: int, size: int, *, writable: bool = True) -> bytes:
    """Return a SEGMENT message."""
    return json_frame(SEGMENT, {"number": number, "size": size, "writable": writable})


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


def error_json(error: NeriteError) -> dict[str, str]:
    """Return what a FAILED message carries."""
    return {"code": error.code, "message": error.message}


def error_of(value: dict[str, str]) -> NeriteError:
    """Return the error that ``error_json`` was given."""
    return BY_CODE.get(value["code"], Internal)(value["message"])


def read_error(body: memoryview) -> NeriteError:
    """Return the error that a FAILED message or an error record carries."""
    return error_of(read_json(body))


def batch_message(
    kind: int, batch: int, count: int, tokens: Sequence[int], timings: ExecutionTimes | None, records: list[Buffer]
) -> bytes:
    """Return an EXECUTE, RESULT, PART, LAST, CALL or ANSWER message of ``records``.

    ``count`` is how many there are; of PART and LAST, which request is meant. CALL and ANSWER have the number of the
    call in place of the batch.
    """
    head = _BATCH.pack(batch, len(tokens))
    if tokens:
        padded = (*tokens, 0) if len(tokens) & 1 else tokens
        head += struct.pack(f"<{len(padded)}I", *padded)
    if timings is not None:
        head += _packed(timings)
    size = FRAME.size + len(head) + sum(map(len, records))
    return b"".join((FRAME.pack(size, kind, count), head, *records))


def request_frame(kind: int, batch: int, index: int) -> bytes:
    """Return a CANCEL, PAUSE or RESUME message; with the number of a call, CANCEL_CALL, GIVE_UP or TAKEN."""
    return frame(kind, _BATCH.pack(batch, 0), index)


def caller(batch: int, index: int, decoupled: bool) -> bytes:
    """Return what stands before the record of a CALL: for which request it is, and whether it takes any answers."""
    return _CALLER.pack(batch, index, decoupled)


def read_caller(body: memoryview, at: int) -> tuple[int, int, bool, int]:
    """Return what ``caller`` was given, and where the record begins."""
    batch, index, decoupled = _CALLER.unpack_from(body, at)
    return batch, index, bool(decoupled), at + _CALLER.size


def contexts_frame(batch: int, contexts: Sequence[TraceContext | None]) -> bytes:
    """Return a CONTEXTS message: by request, the span of its execution; nothing if no request has one."""
    parts: list[bytes] = []
    count = 0
    for index, context in enumerate(contexts):
        if context is not None:
            count += 1
            state = context.state.encode()
            parts.append(_CONTEXT.pack(context.trace_id.to_bytes(16), context.span_id, index, len(state)))
            if state:
                parts += (state, PADDING[len(state) & 7])
    return frame(CONTEXTS, _BATCH.pack(batch, 0) + b"".join(parts), count) if parts else b""


def read_contexts(body: memoryview, count: int) -> dict[int, TraceContext]:
    """Return what a CONTEXTS message of ``count`` says, by the place of the request in the batch."""
    _, _, at = read_batch(body)
    contexts: dict[int, TraceContext] = {}
    for _ in range(count):
        trace, span, index, size = _CONTEXT.unpack_from(body, at)
        at += _CONTEXT.size
        contexts[index] = TraceContext(int.from_bytes(trace), span, bytes(body[at : at + size]).decode())
        at += (size + 7) & ~7
    return contexts


class FusedRun(NamedTuple):
    """One execution of a model that followed."""

    step: int
    """Which of those that may follow; from 1."""
    timings: ExecutionTimes
    rows: int
    requests: Sequence[int]
    """Their places in the batch."""


class FusedBatch(NamedTuple):
    """What became of a batch that others may follow."""

    runs: list[FusedRun]
    reached: list[int]
    """By request, the step whose answer it has: 0 is the model that was given the batch."""


def fused_part(number: int) -> bytes:
    """Return what is before the records of an EXECUTE_ON message."""
    return _PAIR.pack(number, 0)


def read_fused(body: memoryview, at: int) -> tuple[int, int]:
    """Return what ``fused_segment_part`` was given, and where the records begin."""
    number: int = _PAIR.unpack_from(body, at)[0]
    return number, at + _PAIR.size


def follow_part(along: FusedBatch) -> bytes:
    """Return what is before the records of a RESULT_ON message."""
    parts = [_PAIR.pack(len(along.runs), len(along.reached))]
    for step, timings, rows, requests in along.runs:
        parts += (_RUN.pack(step, len(requests), rows), _packed(timings), _shorts(requests))
    parts.append(_shorts(along.reached))
    return b"".join(parts)


def read_follow(body: memoryview, at: int) -> tuple[FusedBatch, int]:
    """Return what ``along_part`` was given, and where the records begin."""
    runs, size = _PAIR.unpack_from(body, at)
    at += _PAIR.size
    along = FusedBatch([], [])
    for _ in range(runs):
        step, count, rows = _RUN.unpack_from(body, at)
        timings, at = read_timings(body, at + _RUN.size)
        requests, at = _read_shorts(body, at, count)
        along.runs.append(FusedRun(step, timings, rows, requests))
    reached, at = _read_shorts(body, at, size)
    along.reached.extend(reached)
    return along, at


def _shorts(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}H{-len(values) % 4 * 2}x", *values)


def _read_shorts(body: memoryview, at: int, count: int) -> tuple[tuple[int, ...], int]:
    return struct.unpack_from(f"<{count}H", body, at), at + (count + 3) // 4 * 8


def _packed(timings: ExecutionTimes) -> bytes:
    return _MARKS.pack(
        timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns, timings.failed
    )


def batch_number(body: memoryview) -> int:
    """Return the number of the batch that a message is of."""
    number: int = _BATCH.unpack_from(body)[0]
    return number


def read_batch(body: memoryview) -> tuple[int, tuple[int, ...], int]:
    """Return batch, tokens returned, and where marks or records begin."""
    batch, count = _BATCH.unpack_from(body)
    tokens = struct.unpack_from(f"<{count}I", body, _BATCH.size) if count else ()
    return batch, tokens, _BATCH.size + ((count + 1) & ~1) * 4


def read_timings(body: memoryview, at: int) -> tuple[ExecutionTimes, int]:
    """Return the times of a RESULT, PART or LAST message, and where its records begin."""
    timings = ExecutionTimes()
    started, ready, computed, ended, failed = _MARKS.unpack_from(body, at)
    timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns = started, ready, computed, ended
    timings.failed = bool(failed)
    return timings, at + _MARKS.size


# Engine reports as they lie in a message.
#
# First how the engine is; then for each request that the step has brought forward its batch and index, how it ended,
# the tokens that are new, and what is told once, when it begins.

_STATE: Final = struct.Struct("<9I4x5Q")
_PROGRESS: Final = struct.Struct("<IHHIIIII4xQ")
_UNKNOWN: Final = 2**64 - 1
_ENDED: Final = (None, *RequestEnded)
_PLACE: Final = {ended: place for place, ended in enumerate(_ENDED)}


def report_frame(seat: int, report: EngineReport, place: Callable[[InferenceRequest], tuple[int, int] | None]) -> bytes:
    """Return the message; ``place`` gives batch and index of a request, None for one that is not known any more."""
    counts = (_UNKNOWN if count is None else count for count in report[9:14])
    parts = [_STATE.pack(*report[:9], *counts)]
    for request, tokens, begun, ended in report.progress:
        found = place(request)
        if found is None:
            continue
        at_ns, prompt, cached, sequences, images = begun or (0, 0, 0, 0, 0)
        parts.append(_PROGRESS.pack(*found, _PLACE[ended], tokens, sequences, prompt, cached, images, at_ns))
    return frame(REPORT, b"".join(parts), seat)


def read_report(body: memoryview, batch_of: Callable[[int], Batch | None]) -> EngineReport:
    """Return the report; ``batch_of`` gives the requests of a batch."""
    running, waiting, total, free, size, context, most, patience, failures, *counts = _STATE.unpack_from(body)
    queries, hits, preempted, drafted, accepted = (None if count == _UNKNOWN else count for count in counts)
    progress = []
    for number, index, ended, tokens, sequences, prompt, cached, images, at_ns in _PROGRESS.iter_unpack(
        body[_STATE.size :]
    ):
        batch = batch_of(number)
        if batch is not None and index < len(batch):
            begun = RequestBegun(at_ns, prompt, cached, sequences, images) if sequences else None
            progress.append(RequestProgress(batch[index], tokens, begun, _ENDED[ended]))
    state = (running, waiting, total, free, size, context, most, patience, failures)
    return EngineReport(*state, queries, hits, preempted, drafted, accepted, progress)
