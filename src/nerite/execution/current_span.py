"""The span of an execution, for models that use OpenTelemetry themselves: it is current while their code runs.

A batch may have requests of several traces. The first of them that is traced has what the model notes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from nerite.core.request import InferenceRequest
from nerite.core.trace_context import TraceContext, context_of

_API = "opentelemetry.trace"


def of(batch: Iterable[InferenceRequest]) -> TraceContext | None:
    """Return the span of a batch, None where nobody here would look at it."""
    if _API not in sys.modules:
        return None
    return next((context for request in batch if (context := context_of(request)) is not None), None)


def enter(context: TraceContext) -> Any:
    """Make a span current; return what ``leave`` needs, None if nobody has imported OpenTelemetry's interface."""
    trace = sys.modules.get(_API)
    if trace is None:
        return None
    from opentelemetry.context import attach  # there, if the other is

    span = trace.SpanContext(
        context.trace_id,
        context.span_id,
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        trace_state=trace.TraceState.from_header([context.state] if context.state else []),
    )
    return attach(trace.set_span_in_context(trace.NonRecordingSpan(span)))


def leave(entered: Any) -> None:
    """Make current what was so before."""
    from opentelemetry.context import detach

    detach(entered)
