"""Messages between the server and a worker: kinds, framing, and the encoding of frequent ones.

A message is a frame: length, kind and a count in eight bytes, then a body, padded to a multiple of eight so that tensor
data is aligned. Rare messages carry JSON. The frequent ones are packed:

    EXECUTE   batch, returned tokens, then a record per request; in the end the number of its fused steps, if any
    RESULT    batch, returned tokens, ``ExecutionTimes``, then a record per response; in the end the executions of
              fused steps, if there were any (see ``child.fused``)
    PART      batch, returned tokens, ``ExecutionTimes``, then the record of one response to one request of the batch
    LAST      like PART, for the last response to the request
    CONTEXTS  batch, then for each traced request its index and trace context: sent before EXECUTE, once the worker
              has asked for ``contexts``
    CALL      call, returned tokens, the batch that the call is made for and how, then the record of a request to
              another model
    ANSWER    call, returned tokens, then the record of one response to the call
    REPORT    state of an engine, and the progress of its requests in the last step: see ``report_frame``

Records are defined in ``codec``. RESULT answers each request of its batch, or says that its responses come one by one
(PART, LAST): some may have come before, and more may come while other batches run. Calls of models are numbered
separately from batches.

Nothing is unpickled: a corrupted or malicious worker can send nonsense, but cannot make the server execute it.
"""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from nerite.core.engine_report import AdapterUse, EngineReport, RequestBegun, RequestEnded, RequestProgress
from nerite.core.errors import BY_CODE, BY_NAME, Internal, NeriteError
from nerite.core.execution_observer import ExecutionTimes, TraceContext
from nerite.core.tensor import Buffer

if TYPE_CHECKING:
    from nerite.core.request import InferenceRequest
    from nerite.instances.instance import Batch

# From the server to a worker.
COMPLETE: Final = 1  # JSON: complete this model's configuration
LOAD: Final = 2  # JSON: open this model, make this instance, at this seat
EXECUTE: Final = 3
CANCEL: Final = 4  # no more responses to this request of a batch are wanted
IS_READY: Final = 5  # JSON: query the model at this seat
CLOSE: Final = 6  # JSON: finalize the model at this seat, and exit if it is the last
PAUSE: Final = 7  # the receiver of the responses to this request cannot take more for now
RESUME: Final = 8  # the receiver can take more again
OF_REQUEST: Final = (CANCEL, PAUSE, RESUME)
ANSWER: Final = 9  # the count is 1 for the last response
REPLY: Final = 10  # JSON: the reply to ASK
FUSED_STEPS: Final = 11  # JSON: steps that may follow a batch in this worker, and the number that refers to them
ADAPTER: Final = 12  # JSON: load this LoRA adapter at this seat, or unload it if it has no path
CONTEXTS: Final = 13  # the count is the number of requests in it
TRIM: Final = 14  # release tensor memory that was not used since the last TRIM
SLEEP: Final = 15  # JSON: have the instance at this seat sleep, or wake
DEVICE_POOL: Final = 36  # JSON: the server's pool of memory on a GPU, which later messages refer to
DEVICE_GRANT: Final = 37  # JSON: a part of it that the worker may write to; of no bytes if there is none
VERBOSE: Final = 38  # the count is 1 if what models log as VERBOSE is written
# From a worker to the server.
DONE: Final = 16  # JSON: the reply to COMPLETE, LOAD, IS_READY, ADAPTER, SLEEP or CLOSE; with the count of that message
FAILED: Final = 17  # JSON: code and message of an error; sent instead of DONE
RESULT: Final = 18
LOG: Final = 19  # JSON: level, text, file, line and the ids of the requests that it is about
PART: Final = 20
LAST: Final = 21
CALL: Final = 22
GIVE_UP: Final = 23  # no more responses to a call are wanted
TAKEN: Final = 24  # the count is the number of responses to a call that were read
ASK: Final = 25  # JSON: query or control other models for a model
REPORT: Final = 27  # the count is the seat of the engine
METRICS: Final = 28  # JSON: number of changes, and the metrics of the models in this worker with all those changes
METRICS_DUE: Final = 30  # JSON: number of changes before the next response; METRICS with them follows
CANCEL_CALL: Final = 29  # cancel a call; its responses are still wanted
DEVICE_WANTED: Final = 31  # JSON: a GPU, and how many bytes of the server's pool there the worker lacks
DEVICE_COPIES: Final = 32  # JSON: number and bytes of the copies since the last one, by direction
# In both directions.
SEGMENT: Final = 33  # JSON: memory to map; its descriptor comes over the second socket
RETURN: Final = 34  # tokens of borrowed views that are released
FORGET: Final = 35  # JSON: number of a segment that no later message refers to

STACKS_SIGNAL: Final = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""A signal instead of a message, to reach a worker that reads none: it writes the stack of its main thread. The last
real-time signal is hardly ever used otherwise; macOS has no real-time signals."""
THREADS_SIGNAL: Final = STACKS_SIGNAL - 1
"""It writes the stacks of all threads as soon as the main thread interprets a line: while it waits, at once. On macOS,
SIGUSR1."""
FRAME: Final = struct.Struct("<IHH")
_BATCH: Final = struct.Struct("<II")
_MARKS: Final = struct.Struct("<QQQQQ")
_CALLER: Final = struct.Struct("<IHH")
NUMBER: Final = struct.Struct("<Q")
_CONTEXT: Final = struct.Struct("<16sQHH4x")
SEATS: Final = 256
"""Maximum number of instances in one worker. The lowest byte of a batch number is the seat of its instance."""
SEAT: Final = SEATS - 1
NO_BATCH: Final = 0
"""Batch number of a call that is not made for a particular batch."""
ALL: Final = 0xFFFF
"""Request index of a call that is made for a whole batch."""
_ERROR_DETAILS: Final = ("retry_after", "begun")
PADDING: Final = (b"", b"\0" * 7, b"\0" * 6, b"\0" * 5, b"\0" * 4, b"\0" * 3, b"\0" * 2, b"\0")


def frame(kind: int, body: bytes = b"", count: int = 0) -> bytes:
    """Return a message with this body."""
    padding = PADDING[len(body) & 7]
    return FRAME.pack(FRAME.size + len(body) + len(padding), kind, count) + body + padding


def json_frame(kind: int, value: object, count: int = 0) -> bytes:
    """Return a message that carries JSON."""
    return frame(kind, json.dumps(value).encode(), count)


def read_json(body: memoryview) -> Any:
    """Return the value that ``json_frame`` encoded."""
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
    """Splits a stream of bytes into messages. Owns the receive buffers.

    Each buffer is used once: views on it may outlive the message, and arrays made of them are writable.
    """

    __slots__ = ("_buffer", "_capacity", "_filled")

    def __init__(self) -> None:
        self._capacity = 4096
        self._buffer = bytearray(self._capacity)
        self._filled = 0

    def space(self) -> memoryview:
        """Return the buffer for the next bytes to receive."""
        return memoryview(self._buffer)[self._filled :]

    def received(self, size: int) -> Iterator[tuple[int, int, memoryview]]:
        """Record that ``size`` bytes were received; yield kind, count and body of each complete message."""
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


def error_json(error: NeriteError) -> dict[str, Any]:
    """Return the body of a FAILED message as JSON."""
    described: dict[str, Any] = {"code": error.code, "message": error.message}
    if BY_CODE.get(error.code) is not type(error):
        described["kind"] = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in BY_NAME)
    described.update((name, getattr(error, name)) for name in _ERROR_DETAILS if getattr(error, name))
    return described


def error_of(value: dict[str, Any]) -> NeriteError:
    """Return the error that ``error_json`` encoded."""
    kind = BY_NAME.get(value.get("kind", "")) or BY_CODE.get(value["code"], Internal)
    error = kind(value["message"], value.get("retry_after", 0))
    error.begun = value.get("begun", False)
    return error


def read_error(body: memoryview) -> NeriteError:
    """Return the error of a FAILED message or an error record."""
    return error_of(read_json(body))


def batch_message(
    kind: int, batch: int, count: int, tokens: Sequence[int], timings: ExecutionTimes | None, records: list[Buffer]
) -> bytes:
    """Return an EXECUTE, RESULT, PART, LAST, CALL or ANSWER message with ``records``.

    ``count`` is the number of records; for PART and LAST, the index of the request. CALL and ANSWER have the number of
    the call in place of the batch.
    """
    head = _BATCH.pack(batch, len(tokens))
    if tokens:
        padded = (*tokens, 0) if len(tokens) & 1 else tokens
        head += struct.pack(f"<{len(padded)}I", *padded)
    if timings is not None:
        head += packed_times(timings)
    size = FRAME.size + len(head) + sum(map(len, records))
    return b"".join((FRAME.pack(size, kind, count), head, *records))


def request_frame(kind: int, batch: int, index: int) -> bytes:
    """Return a CANCEL, PAUSE or RESUME message; with the number of a call, a CANCEL_CALL, GIVE_UP or TAKEN message."""
    return frame(kind, _BATCH.pack(batch, 0), index)


def caller(batch: int, index: int, decoupled: bool) -> bytes:
    """Return the part before the record of a CALL: the request that it is made for, and whether it is decoupled."""
    return _CALLER.pack(batch, index, decoupled)


def read_caller(body: memoryview, at: int) -> tuple[int, int, bool, int]:
    """Return the values that ``caller`` encoded, and where the record begins."""
    batch, index, decoupled = _CALLER.unpack_from(body, at)
    return batch, index, bool(decoupled), at + _CALLER.size


def contexts_frame(batch: int, contexts: Sequence[TraceContext | None]) -> bytes:
    """Return a CONTEXTS message with the trace context of each traced request; empty if no request is traced."""
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
    """Return the trace contexts of a CONTEXTS message, by the index of the request in the batch."""
    _, _, at = read_batch(body)
    contexts: dict[int, TraceContext] = {}
    for _ in range(count):
        trace, span, index, size = _CONTEXT.unpack_from(body, at)
        at += _CONTEXT.size
        contexts[index] = TraceContext(int.from_bytes(trace), span, bytes(body[at : at + size]).decode())
        at += (size + 7) & ~7
    return contexts


def packed_times(timings: ExecutionTimes) -> bytes:
    """Return the times of a RESULT, PART or LAST message."""
    return _MARKS.pack(
        timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns, timings.failed
    )


def batch_number(body: memoryview) -> int:
    """Return the batch number of a message."""
    number: int = _BATCH.unpack_from(body)[0]
    return number


def read_batch(body: memoryview) -> tuple[int, tuple[int, ...], int]:
    """Return batch number, returned tokens, and where times or records begin."""
    batch, count = _BATCH.unpack_from(body)
    tokens = struct.unpack_from(f"<{count}I", body, _BATCH.size) if count else ()
    return batch, tokens, _BATCH.size + ((count + 1) & ~1) * 4


def read_timings(body: memoryview, at: int) -> tuple[ExecutionTimes, int]:
    """Return the times that ``packed_times`` encoded, and where the rest of the message begins."""
    timings = ExecutionTimes()
    started, ready, computed, ended, failed = _MARKS.unpack_from(body, at)
    timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns = started, ready, computed, ended
    timings.failed = bool(failed)
    return timings, at + _MARKS.size


# Engine reports: first the state of the engine; then the LoRA adapters in use as JSON, if there are adapters; then for
# each request that the step advanced its batch and index, how it ended, the number of new tokens, and the values that
# are reported once, when the request begins.

_STATE: Final = struct.Struct("<10I7Q")
_PROGRESS: Final = struct.Struct("<IHHIIIII4xQ")
_UNKNOWN: Final = 2**64 - 1
_ENDED: Final = (None, *RequestEnded)
_PLACE: Final = {ended: place for place, ended in enumerate(_ENDED)}


def report_frame(seat: int, report: EngineReport, place: Callable[[InferenceRequest], tuple[int, int] | None]) -> bytes:
    """Return a REPORT message; ``place`` gives batch and index of a request, None if it is no longer known."""
    counts = (_UNKNOWN if count is None else count for count in report[9:14])
    adapters = json.dumps(report.adapters).encode() if report.adapters.most else b""
    adapters += b" " * (-len(adapters) % 8)  # the records behind them end where the frame does
    state = (*report[:9], len(adapters), *counts, report.step_began_ns, report.step_ended_ns)
    parts = [_STATE.pack(*state), adapters]
    for request, tokens, begun, ended in report.progress:
        found = place(request)
        if found is None:
            continue
        at_ns, prompt, cached, sequences, images = begun or (0, 0, 0, 0, 0)
        parts.append(_PROGRESS.pack(*found, _PLACE[ended], tokens, sequences, prompt, cached, images, at_ns))
    return frame(REPORT, b"".join(parts), seat)


def read_report(body: memoryview, batch_of: Callable[[int], Batch | None]) -> EngineReport:
    """Return the report of a REPORT message; ``batch_of`` gives the requests of a batch."""
    running, waiting, total, free, size, context, most, patience, failures, length, *rest = _STATE.unpack_from(body)
    *counts, step_began, step_ended = rest
    queries, hits, preempted, drafted, accepted = (None if count == _UNKNOWN else count for count in counts)
    begin = _STATE.size + length
    adapters = _adapters(json.loads(bytes(body[_STATE.size : begin]))) if length else AdapterUse()
    progress = []
    for number, index, ended, tokens, sequences, prompt, cached, images, at_ns in _PROGRESS.iter_unpack(body[begin:]):
        batch = batch_of(number)
        if batch is not None and index < len(batch):
            begun = RequestBegun(at_ns, prompt, cached, sequences, images) if sequences else None
            progress.append(RequestProgress(batch[index], tokens, begun, _ENDED[ended]))
    state = (running, waiting, total, free, size, context, most, patience, failures)
    tallies = (queries, hits, preempted, drafted, accepted)
    return EngineReport(*state, *tallies, progress, step_began, step_ended, adapters)


def _adapters(read: Any) -> AdapterUse:
    most, running, waiting = read
    return AdapterUse(int(most), tuple(map(str, running)), tuple(map(str, waiting)))
