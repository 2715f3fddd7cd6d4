"""A trace that becomes spans of OpenTelemetry."""

from __future__ import annotations

from random import Random
from typing import Final

from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.core.trace_context import TraceContext
from nerite.observability.trace import Trace

_SPANS: Final = 2
"""The first spans of a trace: the request, and the model. Two for each execution follow: the queue, and the compute."""
USUAL_SPANS: Final = _SPANS + 2
"""What a trace becomes whose request runs once."""
_COUNTED_BITS: Final = 20
"""Of the id of a span: which span of a request it is. The rest is by chance."""
_random: Final = Random()  # of our own: a model in this process may have seeded the common one


class SpannedTrace(Trace):
    """Has ids once somebody asks for them: most often that is when the spans are made."""

    _trace_id = _span_id = 0

    @property
    def trace_id(self) -> int:
        """The id of the whole, which may have begun elsewhere."""
        if not self._trace_id:
            self._trace_id = _random.getrandbits(128) | 1
        return self._trace_id

    @property
    def span_id(self) -> int:
        """The id of the first span. Those of the others follow."""
        if not self._span_id:
            self._span_id = (_random.getrandbits(64 - _COUNTED_BITS) | 1) << _COUNTED_BITS
        return self._span_id

    def begin_under(self, trace_id: int, span_id: int, state: str) -> None:
        """Go on with a trace, under this span of it."""
        self._trace_id, self.parent_span, self.state = trace_id, span_id, state

    def context_of(self, request: InferenceRequest) -> TraceContext:
        """Return the span of the execution that is under way, or comes next; of the last, once that is known."""
        return TraceContext(self.trace_id, self.compute_span(len(self.executions) - self._ran), self.state)

    def _lead(self, request: InferenceRequest, marks: Marks) -> None:
        marks.leader = self.context_of(request)

    @property
    def model_span(self) -> int:
        """The id of the span of the model."""
        return self.span_id + 1

    def queue_span(self, execution: int) -> int:
        """Return the id of the span of the wait before an execution, counted from 0."""
        return self.span_id + _SPANS + 2 * execution

    def compute_span(self, execution: int) -> int:
        """Return the id of the span of an execution, counted from 0."""
        return self.span_id + _SPANS + 2 * execution + 1

    @property
    def spans(self) -> int:
        """How many spans it becomes."""
        return _SPANS + 2 * len(self.executions)
