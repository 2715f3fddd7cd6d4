"""Times of one execution, the trace context of a request, and the interface through which both are observed."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from nerite.core.request import InferenceRequest, ReplySink

if TYPE_CHECKING:
    from nerite.core.request import InferenceRequest

# W3C Trace Context: parses and writes the headers that link a request to a distributed trace.

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
_MAX_STATE: Final = 512
"""Characters of a ``tracestate`` that the standard requires to be propagated; a longer one is dropped."""


class TraceContext(NamedTuple):
    """What the sender of a request calls it: a parent span, the id that a router gave it, or both."""

    trace_id: int
    """0: there is no parent span."""
    span_id: int
    state: str = ""
    """Vendor-specific data that tracing systems propagate (``tracestate``)."""
    sampled: bool = True
    """The program that started the trace records it."""
    request_id: str = ""
    """Of the router that has sent it, whose ledger has the same one."""

    @property
    def trace(self) -> str:
        """The trace id in hexadecimal, as exemplars and headers show it."""
        return f"{self.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """The ``traceparent`` header."""
        return f"00-{self.trace}-{self.span_id:016x}-{self.sampled:02x}"

    @property
    def carrier(self) -> dict[str, str]:
        """The headers that OpenTelemetry propagators read."""
        headers = {"traceparent": self.traceparent} if self.trace_id else {}
        return {**headers, "tracestate": self.state} if self.state else headers


REQUEST_ID: Final = "x-nerite-request"
"""Header with the id that a router gives a request."""
_ID: Final = re.compile(rb"[\x21-\x7e]{1,64}")


def with_request_id(span: TraceContext | None, raw: bytes) -> TraceContext | None:
    """Return a span with the request id in a header; unchanged if it is not one of a router."""
    if _ID.fullmatch(raw) is None:
        return span
    return (span or TraceContext(0, 0))._replace(request_id=raw.decode())


def request_id_of(request: InferenceRequest) -> str:
    """Return the id that a router gave a request; empty if it came directly."""
    sink: object = request.sink
    while sink is not None:
        span: TraceContext | None = getattr(sink, "outer_span", None)
        if span is not None:
            return span.request_id
        sink = getattr(sink, "behind", None)
    return ""


def parse(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """Parse the headers; return None if ``traceparent`` is missing or invalid, which the standard treats alike."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip(" \t"))
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return None
    state = tracestate.strip(" \t") if tracestate is not None and len(tracestate) <= _MAX_STATE else ""
    return TraceContext(int(trace, 16), int(span, 16), state, bool(int(flags, 16) & _SAMPLED))


def context_of(request: InferenceRequest) -> TraceContext | None:
    """Return the span of the execution of a request, as parent for spans of its work; None if it is not traced."""
    find = getattr(request.sink, "context_of", None)
    context: TraceContext | None = None if find is None else find(request)
    return context


class ExecutionTimes:
    """Timestamps of one execution (``time.monotonic_ns``): start, inputs ready, computed and end.

    A backend that cannot tell the phases apart does not set them: input and output then count as zero time.
    """

    __slots__ = (
        "computed_ns",
        "ended_ns",
        "failed",
        "followed",
        "inputs_ready_ns",
        "leader",
        "requests",
        "started_ns",
    )

    def __init__(self) -> None:
        self.started_ns = self.inputs_ready_ns = time.monotonic_ns()
        self.computed_ns = 0
        self.ended_ns = 0
        self.failed = False
        """The execution as a whole failed: it raised, or did not answer every request. Set by ``execution``."""
        self.followed = False
        """Fused steps ran on the responses in the worker, so the server received them later than they were ready."""
        self.requests = 0
        """Number of requests in the batch; set only if one of them is traced."""
        self.leader: TraceContext | None = None
        """Span of the first traced request of the batch: parent of the spans that the model itself creates."""

    def inputs_ready(self) -> None:
        """Record that the inputs are in the framework's form."""
        self.inputs_ready_ns = time.monotonic_ns()

    def computed(self) -> None:
        """Record that the framework has finished and only the outputs remain to be delivered."""
        self.computed_ns = time.monotonic_ns()

    def end(self) -> None:
        """Record the end of the execution. Called by ``execution``, not by the backend."""
        self.ended_ns = time.monotonic_ns()
        if not self.computed_ns:
            self.computed_ns = self.ended_ns


class ExecutionObserver:
    """Base of sinks that also observe how their request ran: a trace, an ensemble that sums the times of its steps.

    The dispatcher calls it on the loop's thread, before it passes on the response that the event is about.
    """

    __slots__ = ()

    def ran(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Handle the end of the execution. ``timings`` is None if the worker died. Responses may still follow."""

    def turned(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Handle the end of an execution after which the request is rescheduled."""

    def composed(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Handle the end of an ensemble. ``timings`` has the sums over its steps; None if it failed."""

    def parted(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Handle one of several responses, with the times up to this response. ``ran`` follows later."""

    @property
    def trace(self) -> object:
        """The trace that records the request, or None. Sinks in front of a trace return it, too."""
        return None

    def context_of(self, request: InferenceRequest) -> TraceContext | None:
        """Return the span that the execution of the request belongs under, or None."""
        return None


class ForwardingSink(ExecutionObserver):
    """A sink that forwards execution events to another sink. Subclasses handle the responses."""

    __slots__ = ("_sink",)

    def __init__(self, sink: ReplySink) -> None:
        self._sink = sink

    @property
    def behind(self) -> ReplySink:
        """The sink that it forwards to."""
        return self._sink

    @behind.setter
    def behind(self, sink: ReplySink) -> None:
        self._sink = sink

    def ran(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Forward the event."""
        if isinstance(self._sink, ExecutionObserver):
            self._sink.ran(request, timings)

    def turned(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Forward the event."""
        if isinstance(self._sink, ExecutionObserver):
            self._sink.turned(request, timings)

    def composed(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Forward the event."""
        if isinstance(self._sink, ExecutionObserver):
            self._sink.composed(request, timings)

    def parted(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Forward the event."""
        if isinstance(self._sink, ExecutionObserver):
            self._sink.parted(request, timings)

    @property
    def trace(self) -> object:
        """The trace of the wrapped sink."""
        return getattr(self._sink, "trace", None)

    def context_of(self, request: InferenceRequest) -> TraceContext | None:
        """Return the context that the wrapped sink reports."""
        return self._sink.context_of(request) if isinstance(self._sink, ExecutionObserver) else None


class CallerSink(ForwardingSink):
    """A sink directly in front of the one of a client, of whose properties traces read."""

    __slots__ = ()

    @property
    def protocol(self) -> str:
        """Protocol of the client; empty for requests that no client sent."""
        found: str = getattr(self._sink, "protocol", "")
        return found

    @property
    def began_ns(self) -> int:
        """Arrival of the first bytes of a request that came in several pieces; else 0."""
        found: int = getattr(self._sink, "began_ns", 0)
        return found

    @property
    def outer_span(self) -> TraceContext | None:
        """The client's span that the request belongs under."""
        return getattr(self._sink, "outer_span", None)

    def span_attributes(self, request: InferenceRequest) -> dict[str, str | int]:
        """Return the attributes that the client's sink adds to a span."""
        told = getattr(self._sink, "span_attributes", None)
        return {} if told is None else told(request)
