"""Where a request stands in a trace that goes through several programs: W3C Trace Context, as headers carry it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from nerite.core.request import InferenceRequest

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
_MOST_STATE: Final = 512
"""Characters of a ``tracestate`` that have to be passed on; one that is longer is left out."""


class TraceContext(NamedTuple):
    """A span that others belong under."""

    trace_id: int
    span_id: int
    state: str = ""
    """What tracing systems pass on among themselves: ``tracestate``."""
    sampled: bool = True
    """The trace is recorded by whoever began it."""

    @property
    def trace(self) -> str:
        """The id of the trace as it is written: in exemplars, and wherever else somebody may look for it."""
        return f"{self.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """The context as a header."""
        return f"00-{self.trace}-{self.span_id:016x}-{self.sampled:02x}"

    @property
    def carrier(self) -> dict[str, str]:
        """The context as the headers that propagators of OpenTelemetry read."""
        headers = {"traceparent": self.traceparent}
        return {**headers, "tracestate": self.state} if self.state else headers


def parse(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """Return what headers say; None where there is none or it is not valid, which is the same by the standard."""
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip(" \t"))
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return None
    state = tracestate.strip(" \t") if tracestate is not None and len(tracestate) <= _MOST_STATE else ""
    return TraceContext(int(trace, 16), int(span, 16), state, bool(int(flags, 16) & _SAMPLED))


def context_of(request: InferenceRequest) -> TraceContext | None:
    """Return the span of the execution of a request, under which belongs what is done for it. None: there is none."""
    told = getattr(request.sink, "context_of", None)
    context: TraceContext | None = None if told is None else told(request)
    return context
