"""A trace as spans: Triton's names, attributes and events, and a span for the wait before each execution."""

from __future__ import annotations

import copy
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from nerite.core.byte_budget import TRACES, Memo
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.trace_context import TraceContext
from nerite.observability.trace import USUAL_SPANS, OtelTrace
from nerite.observability.trace_file import RECEIVED, SENT
from nerite.wire.fields import nested_field, varint

# OTLP's messages as bytes: as much of protobuf as they need.
#
# Written by hand, because every traced request becomes several spans with a dozen events: the messages that protobuf
# makes cost three times as much. What changes with each span has fields of fixed size, packed in one go; what repeats
# is encoded once. Field numbers are those of ``opentelemetry/proto/trace/v1/trace.proto``.

SERVER: Final = 2
INTERNAL: Final = 1
"""Kinds of spans."""
_ERROR: Final = 2
_ROOT: Final = struct.Struct("<2s16s2s8scQcQ")
_CHILD: Final = struct.Struct("<2s16s2s8s2s8scQcQ")
_LINK: Final = struct.Struct("<2s2s16s2s8s")


def attribute(field: int, name: str, value: str | int) -> bytes:
    """Return an attribute in the list that has this number."""
    if isinstance(value, str):
        of_kind = nested_field(1, value.encode(errors="replace"))
    else:
        of_kind = b"\x18" + varint(value & 0xFFFFFFFFFFFFFFFF)
    return nested_field(field, nested_field(1, name.encode()) + nested_field(2, of_kind))


def attributes(field: int, values: Mapping[str, Any]) -> bytes:
    """Return attributes; what is neither text nor a whole number is told as text."""
    return b"".join(
        attribute(field, name, value if isinstance(value, (str, int)) else str(value)) for name, value in values.items()
    )


@lru_cache(4096)
def span_header(name: str, kind: int, *given: tuple[str, str | int]) -> bytes:
    """Return what many spans have in common: name, kind, and these attributes."""
    return nested_field(5, name.encode(errors="replace")) + b"\x30" + varint(kind) + attributes(9, dict(given))


@lru_cache(256)
def _event(name: str) -> bytes:
    """Return an event up to its time."""
    told = nested_field(2, name.encode())
    return b"\x5a" + varint(len(told) + 9) + told + b"\x09"


def event(name: str, at: int) -> bytes:
    """Return something that happened during a span."""
    return _event(name) + at.to_bytes(8, "little")


def span_link(trace_id: int, span_id: int) -> bytes:
    """Return the mention of a span that this one belongs together with."""
    return _LINK.pack(b"\x6a\x1c", b"\x0a\x10", trace_id.to_bytes(16), b"\x12\x08", span_id.to_bytes(8))


def failed_status(message: str) -> bytes:
    """Return the status of a span that is an error."""
    return nested_field(15, nested_field(2, message.encode(errors="replace")) + b"\x18" + varint(_ERROR))


def dropped_events(count: int) -> bytes:
    """Return how many events were left out."""
    return b"\x60" + varint(count) if count else b""


def span(form: bytes, trace_id: int, span_id: int, parent: int, start: int, end: int, *more: bytes) -> bytes:
    """Return a span, as an entry of its list."""
    trace = trace_id.to_bytes(16)
    own = span_id.to_bytes(8)
    if parent:
        ids = _CHILD.pack(
            b"\x0a\x10", trace, b"\x12\x08", own, b"\x22\x08", parent.to_bytes(8), b"\x39", start, b"\x41", end
        )
    else:
        ids = _ROOT.pack(b"\x0a\x10", trace, b"\x12\x08", own, b"\x39", start, b"\x41", end)
    body = b"".join((ids, form, *more))
    return b"\x12%b%b" % (varint(len(body)), body)


def trace_state(text: str) -> bytes:
    """Return the ``tracestate`` of a span."""
    return nested_field(3, text.encode()) if text else b""


def message(resource: Mapping[str, str], scope: Mapping[str, str], spans: bytes) -> bytes:
    """Return the whole request: ``spans`` one behind the other, and who says so."""
    named = nested_field(1, nested_field(1, scope["name"].encode()) + nested_field(2, scope["version"].encode()))
    return nested_field(1, nested_field(1, attributes(1, resource)) + nested_field(2, named + spans))


_MAX_SENDS: Final = 128
"""Times of responses that a span has: of a long stream, the first ones."""
_QUEUE: Final = span_header("queue", INTERNAL)
_NAMES: Final = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")


def spans_of(trace: OtelTrace, epoch: int) -> bytes:
    """Return the spans of a trace; ``epoch`` is the time of day at which the clock of its times was 0."""
    state = trace_state(trace.state)
    error = trace.error
    status = b"" if error is None else failed_status(error.message)
    found = []
    if not trace.parent:
        found.append(_request(trace, epoch, state + status))
    found.append(_model(trace, epoch, state + status))
    for number, (queued_ns, timings) in enumerate(trace.executions):
        if timings is not None:
            found += (
                span(
                    _QUEUE,
                    trace.trace_id,
                    trace.queue_span(number),
                    trace.model_span,
                    epoch + queued_ns,
                    epoch + max(queued_ns, timings.started_ns),
                    state,
                ),
                _compute(trace, epoch, number, timings, state + status if timings.failed else state),
            )
    return b"".join(found)


def _request(trace: OtelTrace, epoch: int, more: bytes) -> bytes:
    """Return the span of what the client sees."""
    events: list[bytes] = []
    end = trace.final_ns
    left_out = 0
    if trace.protocol:
        begun, here = RECEIVED[trace.protocol]
        events += (event(begun, epoch + trace.first_ns), event(here, epoch + trace.received_ns))
    if trace.answered_ns:
        events.append(event("INFER_RESPONSE_COMPLETE", epoch + trace.answered_ns))
    if trace.sends:
        end = max(end, trace.sends[-1])
        sends = trace.sends[:_MAX_SENDS]
        left_out = len(trace.sends) - len(sends)
        names = SENT[trace.protocol]
        events += (event(names[number & 1], epoch + at) for number, at in enumerate(sends))
    form = span_header("InferRequest", SERVER)
    if trace.attributes:
        form += attributes(9, trace.attributes)
    return span(
        form,
        trace.trace_id,
        trace.span_id,
        trace.parent_span,
        epoch + trace.first_ns,
        epoch + end,
        *events,
        dropped_events(left_out),
        more,
    )


def _model(trace: OtelTrace, epoch: int, more: bytes) -> bytes:
    """Return the span of what the model does for the request."""
    name = trace.header.model_name
    form = span_header(
        name, INTERNAL, ("triton.model_name", name), ("triton.model_version", trace.version)
    ) + attribute(9, "triton.trace_id", trace.number)
    form += attribute(9, "triton.trace_parent_id", trace.parent)
    if trace.id:
        form += attribute(9, "triton.request_id", trace.id)
    events = [event("REQUEST_START", epoch + trace.began_ns)]
    events += (event("QUEUE_START", epoch + queued_ns) for queued_ns, _ in trace.executions)
    if trace.ended_ns:
        events.append(event("REQUEST_END", epoch + trace.ended_ns))
    return span(
        form,
        trace.trace_id,
        trace.model_span,
        trace.parent_span if trace.parent else trace.span_id,
        epoch + trace.began_ns,
        epoch + max(trace.ended_ns, trace.final_ns),
        *events,
        more,
    )


def _compute(trace: OtelTrace, epoch: int, number: int, timings: ExecutionTimes, more: bytes) -> bytes:
    """Return the span of an execution, which other requests may have shared: the first of them is linked."""
    own = trace.compute_span(number)
    form = span_header("compute", INTERNAL, ("nerite.batch.requests", timings.requests))
    end = timings.ended_ns
    if trace.last_part is not None and number == len(trace.executions) - 1:
        end = max(end, trace.last_part.ended_ns)  # it went on answering
    leader = timings.leader
    if leader is not None and leader.span_id != own:
        more += span_link(leader.trace_id, leader.span_id)
    times = (timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns)
    return span(
        form,
        trace.trace_id,
        own,
        trace.model_span,
        epoch + timings.started_ns,
        epoch + end,
        *(event(name, epoch + at) for name, at in zip(_NAMES, times, strict=True)),
        more,
    )


# The spans of usual requests, cast in a mould: ran once, answered once, under no other span of ours, without an
# error.
#
# Their messages differ in times and ids alone, which have fixed sizes. So what ``spans_of`` makes of one of them is
# kept, and of the next ones only those are put in their places, in columns: of many at once.

_MOULD: Final = 16 * 1024
"""Bytes that a mould takes in memory beside its text."""
_TIMES: Final = 12
_EPOCH: Final = 0x1122334455000000
"""What no message has by chance, nor with any small number added to it."""
_TRACE_ID: Final = 0x5AA5C33C69960FF0A5553AAAC99C7117
_SPAN_ID: Final = 0x39C6A55A00F00000
_PARENT: Final = 0x6A95C33A0FF05AA5
_LEADER: Final = TraceContext(0x33CC0FF0965A69A5AA556996F00FC33C, 0x0F5A96C3)


class SpanTemplate:
    """What the spans of like requests have in common, and where they differ."""

    def __init__(self, like: OtelTrace) -> None:
        """``like`` is one of them."""
        number = attribute(9, "triton.trace_id", like.number)
        name = attribute(9, "triton.request_id", like.id) if like.id else b""
        link = span_link(_LEADER.trace_id, _LEADER.span_id)
        self._number = number.removesuffix(varint(like.number))
        self._name = name.removesuffix(like.id.encode())
        # In the order of the columns below.
        values: list[tuple[bytes, str]] = [((_EPOCH + at).to_bytes(8, "little"), "<i8") for at in range(1, _TIMES + 1)]
        values += [((_SPAN_ID + span).to_bytes(8), ">u8") for span in range(USUAL_SPANS)]
        values += [(_PARENT.to_bytes(8), ">u8"), (_TRACE_ID.to_bytes(16), "V16")]
        values += [(text, f"V{len(text)}") for text in (number, name, link)]
        places = {value: place for place, (value, _) in enumerate(values) if value}
        self._text = spans_of(_stand_in(like), _EPOCH)
        found = [*re.finditer(b"|".join(map(re.escape, places)), self._text)]
        self._fields = [(str(match.start()), places[match[0]]) for match in found]
        self._layout = np.dtype(
            {
                "names": [name for name, _ in self._fields],
                "formats": [values[place][1] for _, place in self._fields],
                "offsets": [match.start() for match in found],
                "itemsize": len(self._text),
            }
        )
        texts = {"number": len(number), "name": len(name) or 1, "link": len(link)}
        self._pack = struct.Struct(f"<{_TIMES}qQQ16s" + "".join(f"{size}s" for size in texts.values())).pack
        numbers = [("times", "<i8", _TIMES), ("span", "<u8"), ("parent", "<u8"), ("trace", "V16")]
        self._given = np.dtype([*numbers, *((text, f"V{size}") for text, size in texts.items())])

    @property
    def footprint(self) -> int:
        """Bytes that it takes in memory, about."""
        return _MOULD + 2 * len(self._text)

    def cast(self, traces: Sequence[OtelTrace], epoch: int) -> bytes:
        """Return the spans of traces that are like the first."""
        given = np.frombuffer(b"".join(map(self._packed, traces)), self._given)
        span = given["span"]
        texts = (given["number"], given["name"], given["link"])
        columns = [*(given["times"] + epoch).T, *(span + number for number in range(USUAL_SPANS))]
        columns += [given["parent"], given["trace"], *texts]
        rows = np.frombuffer(bytearray(self._text * len(traces)), self._layout)
        for field, place in self._fields:
            rows[field] = columns[place]
        return rows.tobytes()

    def _packed(self, trace: OtelTrace) -> bytes:
        """Return what a trace has of its own, as ``_given`` has it."""
        ((queued_ns, timings),) = trace.executions
        assert timings is not None
        leader = timings.leader
        return self._pack(
            trace.first_ns,
            trace.received_ns,
            trace.began_ns,
            queued_ns,
            timings.started_ns,
            timings.inputs_ready_ns,
            timings.computed_ns,
            timings.ended_ns,
            trace.ended_ns,
            trace.answered_ns,
            *trace.sends,
            trace.span_id,
            trace.parent_span,
            trace.trace_id.to_bytes(16),
            self._number + varint(trace.number),
            self._name + trace.id.encode(),
            b"" if leader is None else span_link(leader.trace_id, leader.span_id),
        )


class SpanTemplates:
    """Makes spans of traces, and keeps moulds. For one thread."""

    def __init__(self) -> None:
        self._moulds: Memo[Sequence[object], SpanTemplate] = Memo()

    def spans_of(self, traces: Iterable[OtelTrace], epoch: int) -> bytes:
        """Return the spans of traces, in any order; ``epoch`` as for those of any."""
        made: list[bytes] = []
        alike: dict[Sequence[object], list[OtelTrace]] = {}
        for trace in traces:
            timings = _usual(trace)
            if timings is None:
                made.append(spans_of(trace, epoch))
                continue
            key = (
                trace.header.model_name,
                trace.version,
                trace.protocol,
                timings.requests,
                (trace.number.bit_length() + 6) // 7,
                len(trace.id),
                trace.parent_span > 0,
                timings.leader is not None and _is_led(trace, timings),
            )
            alike.setdefault(key, []).append(trace)
        for like, those in alike.items():
            template = self._moulds.get(like)
            if template is None:
                template = SpanTemplate(those[0])
                TRACES.put(self._moulds, like, template, template.footprint)
            made.append(template.cast(those, epoch))
        return b"".join(made)


def _usual(trace: OtelTrace) -> ExecutionTimes | None:
    """Return the times of the one execution of a trace that is like most; None if it is not."""
    if (
        len(trace.executions) != 1
        or len(trace.sends) != 2
        or trace.parent
        or trace.error is not None
        or trace.state
        or trace.attributes
        or trace.last_part is not None
        or not trace.id.isascii()
    ):
        return None
    ((queued_ns, timings),) = trace.executions
    if timings is None or not queued_ns <= timings.started_ns:
        return None
    # The ends of spans are those of the last that happens in them.
    return timings if trace.ended_ns <= trace.final_ns == trace.sends[0] <= trace.sends[1] else None


def _is_led(trace: OtelTrace, timings: ExecutionTimes) -> bool:
    """Return whether another request of the batch is linked."""
    return timings.leader is not None and timings.leader.span_id != trace.compute_span(0)


def _stand_in(like: OtelTrace) -> OtelTrace:
    """Return a trace that says the same, with times and ids that can be found again."""
    trace = copy.copy(like)
    ((_, given),) = like.executions
    assert given is not None
    trace.first_ns, trace.received_ns, trace.began_ns = 1, 2, 3
    timings = ExecutionTimes()
    timings.requests = given.requests
    timings.leader = _LEADER if _is_led(like, given) else None
    timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns = 5, 6, 7, 8
    trace.executions = [(4, timings)]
    trace.ended_ns, trace.answered_ns = 9, 10
    trace.final_ns = 11
    trace.sends = [11, 12]
    trace._trace_id, trace._span_id = _TRACE_ID, _SPAN_ID
    trace.parent_span = _PARENT if like.parent_span else 0
    return trace
