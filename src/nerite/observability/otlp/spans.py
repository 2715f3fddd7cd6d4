"""A trace as spans: Triton's names, attributes and events, and a span for the wait before each execution."""

from __future__ import annotations

from typing import Final

from nerite.core.marks import Marks
from nerite.observability.otlp import wire
from nerite.observability.spanned_trace import SpannedTrace
from nerite.observability.trace_records import RECEIVED, SENT

_MOST_SENDS: Final = 128
"""Times of responses that a span has: of a long stream, the first ones."""
_QUEUE: Final = wire.form("queue", wire.INTERNAL)
_NAMES: Final = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")


def spans_of(trace: SpannedTrace, epoch: int) -> bytes:
    """Return the spans of a trace; ``epoch`` is the time of day at which the clock of its times was 0."""
    state = wire.state(trace.state)
    error = trace.error
    status = b"" if error is None else wire.failed(error.message)
    found = []
    if not trace.parent:
        found.append(_request(trace, epoch, state + status))
    found.append(_model(trace, epoch, state + status))
    for number, (queued_ns, marks) in enumerate(trace.executions):
        if marks is not None:
            found += (
                wire.span(
                    _QUEUE,
                    trace.trace_id,
                    trace.queue_span(number),
                    trace.model_span,
                    epoch + queued_ns,
                    epoch + max(queued_ns, marks.started_ns),
                    state,
                ),
                _compute(trace, epoch, number, marks, state + status if marks.failed else state),
            )
    return b"".join(found)


def _request(trace: SpannedTrace, epoch: int, more: bytes) -> bytes:
    """Return the span of what the client sees."""
    events: list[bytes] = []
    end = trace.final_ns
    left_out = 0
    if trace.protocol:
        begun, here = RECEIVED[trace.protocol]
        events += (wire.event(begun, epoch + trace.first_ns), wire.event(here, epoch + trace.received_ns))
    if trace.answered_ns:
        events.append(wire.event("INFER_RESPONSE_COMPLETE", epoch + trace.answered_ns))
    if trace.sends:
        end = max(end, trace.sends[-1])
        sends = trace.sends[:_MOST_SENDS]
        left_out = len(trace.sends) - len(sends)
        names = SENT[trace.protocol]
        events += (wire.event(names[number & 1], epoch + at) for number, at in enumerate(sends))
    form = wire.form("InferRequest", wire.SERVER)
    if trace.attributes:
        form += wire.attributes(9, trace.attributes)
    return wire.span(
        form,
        trace.trace_id,
        trace.span_id,
        trace.parent_span,
        epoch + trace.first_ns,
        epoch + end,
        *events,
        wire.dropped_events(left_out),
        more,
    )


def _model(trace: SpannedTrace, epoch: int, more: bytes) -> bytes:
    """Return the span of what the model does for the request."""
    name = trace.header.model_name
    form = wire.form(
        name, wire.INTERNAL, ("triton.model_name", name), ("triton.model_version", trace.version)
    ) + wire.attribute(9, "triton.trace_id", trace.number)
    form += wire.attribute(9, "triton.trace_parent_id", trace.parent)
    if trace.id:
        form += wire.attribute(9, "triton.request_id", trace.id)
    events = [wire.event("REQUEST_START", epoch + trace.began_ns)]
    events += (wire.event("QUEUE_START", epoch + queued_ns) for queued_ns, _ in trace.executions)
    if trace.ended_ns:
        events.append(wire.event("REQUEST_END", epoch + trace.ended_ns))
    return wire.span(
        form,
        trace.trace_id,
        trace.model_span,
        trace.parent_span if trace.parent else trace.span_id,
        epoch + trace.began_ns,
        epoch + max(trace.ended_ns, trace.final_ns),
        *events,
        more,
    )


def _compute(trace: SpannedTrace, epoch: int, number: int, marks: Marks, more: bytes) -> bytes:
    """Return the span of an execution, which other requests may have shared: the first of them is linked."""
    own = trace.compute_span(number)
    form = wire.form("compute", wire.INTERNAL, ("nerite.batch.requests", marks.requests))
    end = marks.ended_ns
    if trace.last_part is not None and number == len(trace.executions) - 1:
        end = max(end, trace.last_part.ended_ns)  # it went on answering
    leader = marks.leader
    if leader is not None and leader.span_id != own:
        more += wire.link(leader.trace_id, leader.span_id)
    times = (marks.started_ns, marks.inputs_ready_ns, marks.computed_ns, marks.ended_ns)
    return wire.span(
        form,
        trace.trace_id,
        own,
        trace.model_span,
        epoch + marks.started_ns,
        epoch + end,
        *(wire.event(name, epoch + at) for name, at in zip(_NAMES, times, strict=True)),
        more,
    )
