"""Encodes traces as OTLP spans: Triton's names, attributes and events, and a span for the time in the queue.

The messages are encoded by hand, because every traced request becomes several spans with a dozen events, and objects of
the protobuf package take three times as long. Events, ids and times have fixed sizes and are packed; what repeats is
encoded once. Field numbers are those of ``opentelemetry/proto/trace/v1/trace.proto``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from nerite.core.byte_budget import TRACES, Memo
from nerite.core.execution_observer import ExecutionTimes
from nerite.observability.trace import OtelTrace
from nerite.observability.trace_file import COMPUTED, RECEIVED, SENT
from nerite.wire.fields import nested_field, number_field, varint

SERVER: Final = 2
INTERNAL: Final = 1
"""Kinds of spans."""
_ERROR: Final = 2
_MAX_SENDS: Final = 128
"""Maximum number of send events of a span: those of the first responses of a long stream."""
_CHILD: Final = struct.Struct("<2s16s2s8s2s8scQcQ").pack
_ROOT: Final = struct.Struct("<2s16s2s8scQcQ").pack
_LINK: Final = struct.Struct("<2s2s16s2s8s").pack
_time: Final = struct.Struct("<Q").pack


def _event(name: str) -> bytes:
    """Return an event without its time, which follows."""
    encoded = nested_field(2, name.encode())
    return b"\x5a" + varint(len(encoded) + 9) + encoded + b"\x09"


_NAMES: Final = ("REQUEST_START", "QUEUE_START", "REQUEST_END", "INFER_RESPONSE_COMPLETE", *COMPUTED)
_EVENTS: Final = {name: _event(name) for name in (*_NAMES, *sum((*RECEIVED.values(), *SENT.values()), ()))}


@lru_cache(256)
def _key(name: str) -> bytes:
    return nested_field(1, name.encode())


def attribute(field: int, name: str, value: Any) -> bytes:
    """Encode an attribute as an entry of a list with this field number. Unsupported types are encoded as text."""
    if isinstance(value, int):
        encoded = b"\x18" + varint(value & 0xFFFFFFFFFFFFFFFF)
    else:
        encoded = nested_field(1, str(value).encode(errors="replace"))
    return nested_field(field, _key(name) + nested_field(2, encoded))


def attributes(field: int, values: Mapping[str, Any]) -> bytes:
    """Encode attributes."""
    return b"".join([attribute(field, name, value) for name, value in values.items()])


def _header(name: str, kind: int, values: Mapping[str, Any]) -> bytes:
    """Return name, kind and attributes of a span."""
    return nested_field(5, name.encode(errors="replace")) + number_field(6, kind) + attributes(9, values)


_REQUEST: Final = _header("InferRequest", SERVER, {})
_QUEUE: Final = _header("queue", INTERNAL, {})


def span(
    header: bytes, trace_id: int, span_id: int, parent: int, start: int, end: int, fields: Iterable[bytes]
) -> bytes:
    """Return a span as an entry of a list. ``fields`` are more of its fields."""
    trace, own = trace_id.to_bytes(16), span_id.to_bytes(8)
    if parent:
        ids = _CHILD(
            b"\x0a\x10", trace, b"\x12\x08", own, b"\x22\x08", parent.to_bytes(8), b"\x39", start, b"\x41", end
        )
    else:
        ids = _ROOT(b"\x0a\x10", trace, b"\x12\x08", own, b"\x39", start, b"\x41", end)
    return nested_field(2, b"".join((ids, header, *fields)))


def message(resource: Mapping[str, str], scope: Mapping[str, str], spans: bytes) -> bytes:
    """Return the whole message. ``spans`` are encoded spans, concatenated."""
    named = nested_field(1, nested_field(1, scope["name"].encode()) + nested_field(2, scope["version"].encode()))
    return nested_field(1, nested_field(1, attributes(1, resource)) + nested_field(2, named + spans))


class SpanEncoder:
    """Encodes traces, and keeps the parts of spans that repeat. For one thread."""

    def __init__(self) -> None:
        self._headers: Memo[object, bytes] = Memo()
        """Headers by model name and version, and by the number of requests of a batch."""

    def spans_of(self, trace: OtelTrace, epoch: int) -> bytes:
        """Return the spans of a trace. ``epoch`` is the time of day at which the clock of its times was 0."""
        state = nested_field(3, trace.state.encode()) if trace.state else b""
        status = state
        if trace.error is not None:
            text = trace.error.message.encode(errors="replace")
            status += nested_field(15, nested_field(2, text) + number_field(3, _ERROR))
        spans = [] if trace.parent else [_request_span(trace, epoch, status)]
        spans.append(self._model_span(trace, epoch, status))
        trace_id, model_span = trace.trace_id, trace.model_span
        for number, (queued_ns, timings) in enumerate(trace.executions):
            if timings is not None:
                start, end = epoch + queued_ns, epoch + max(queued_ns, timings.started_ns)
                spans.append(span(_QUEUE, trace_id, trace.queue_span(number), model_span, start, end, (state,)))
                spans.append(self._compute_span(trace, epoch, number, timings, status if timings.failed else state))
        return b"".join(spans)

    def _model_span(self, trace: OtelTrace, epoch: int, status: bytes) -> bytes:
        """Return the span of the model's work for the request."""
        name = trace.header.model_name
        header = self._headers.get((name, trace.version))
        if header is None:
            values = {"triton.model_name": name, "triton.model_version": trace.version}
            header = self._remember((name, trace.version), _header(name, INTERNAL, values))
        return span(
            header,
            trace.trace_id,
            trace.model_span,
            trace.parent_span if trace.parent else trace.span_id,
            epoch + trace.began_ns,
            epoch + max(trace.ended_ns, trace.final_ns),
            (
                attribute(9, "triton.trace_id", trace.number),
                attribute(9, "triton.trace_parent_id", trace.parent),
                attribute(9, "triton.request_id", trace.id) if trace.id else b"",
                _EVENTS["REQUEST_START"],
                _time(epoch + trace.began_ns),
                *[_EVENTS["QUEUE_START"] + _time(epoch + queued_ns) for queued_ns, _ in trace.executions],
                _EVENTS["REQUEST_END"] + _time(epoch + trace.ended_ns) if trace.ended_ns else b"",
                status,
            ),
        )

    def _compute_span(self, trace: OtelTrace, epoch: int, number: int, timings: ExecutionTimes, status: bytes) -> bytes:
        """Return the span of an execution. If other requests share it, it is linked to that of the first one."""
        own = trace.compute_span(number)
        header = self._headers.get(timings.requests)
        if header is None:
            values = {"nerite.batch.requests": timings.requests}
            header = self._remember(timings.requests, _header("compute", INTERNAL, values))
        end = timings.ended_ns
        if trace.last_part is not None and number == len(trace.executions) - 1:
            end = max(end, trace.last_part.ended_ns)  # it continued to respond
        leader = timings.leader
        link = b""
        if leader is not None and leader.span_id != own:
            link = _LINK(
                b"\x6a\x1c", b"\x0a\x10", leader.trace_id.to_bytes(16), b"\x12\x08", leader.span_id.to_bytes(8)
            )
        times = (timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns)
        return span(
            header,
            trace.trace_id,
            own,
            trace.model_span,
            epoch + timings.started_ns,
            epoch + end,
            (*[_EVENTS[name] + _time(epoch + at) for name, at in zip(COMPUTED, times, strict=True)], status, link),
        )

    def _remember(self, key: object, header: bytes) -> bytes:
        TRACES.put(self._headers, key, header, len(header))
        return header


def _request_span(trace: OtelTrace, epoch: int, status: bytes) -> bytes:
    """Return the span of the request as the client sees it."""
    fields: list[bytes] = [attributes(9, trace.attributes)] if trace.attributes else []
    end = trace.final_ns
    if trace.protocol:
        started, received = RECEIVED[trace.protocol]
        fields += (_EVENTS[started], _time(epoch + trace.first_ns), _EVENTS[received], _time(epoch + trace.received_ns))
    if trace.answered_ns:
        fields += (_EVENTS["INFER_RESPONSE_COMPLETE"], _time(epoch + trace.answered_ns))
    if trace.sends:
        end = max(end, trace.sends[-1])
        events = [_EVENTS[name] for name in SENT[trace.protocol]]
        fields += [events[number & 1] + _time(epoch + at) for number, at in enumerate(trace.sends[:_MAX_SENDS])]
        if len(trace.sends) > _MAX_SENDS:
            fields.append(number_field(12, len(trace.sends) - _MAX_SENDS))
    fields.append(status)
    start = epoch + trace.first_ns
    return span(_REQUEST, trace.trace_id, trace.span_id, trace.parent_span, start, epoch + end, fields)
