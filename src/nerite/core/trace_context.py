"""W3C Trace Context: parses and writes the headers that link a request to a distributed trace."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from nerite.core.request import InferenceRequest

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
_MAX_STATE: Final = 512
"""Characters of a ``tracestate`` that the standard requires to be propagated; a longer one is dropped."""


class TraceContext(NamedTuple):
    """A parent span."""

    trace_id: int
    span_id: int
    state: str = ""
    """Vendor-specific data that tracing systems propagate (``tracestate``)."""
    sampled: bool = True
    """The program that started the trace records it."""

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
        headers = {"traceparent": self.traceparent}
        return {**headers, "tracestate": self.state} if self.state else headers


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
