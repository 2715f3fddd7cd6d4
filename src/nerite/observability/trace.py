"""What happened to one request: a trace stands between it and its sink, and keeps the times.

Nothing is written or built here: that is done with traces that are complete, many at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from nerite.core.errors import NeriteError
from nerite.core.marks import Marks
from nerite.core.request import NOBODY, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, TensorSpec
from nerite.core.trace_context import TraceContext
from nerite.core.witness import Relay
from nerite.observability.tensor_text import described
from nerite.observability.trace_settings import Sampler

_now = time.monotonic_ns
_SPANS = 2
"""The first spans of a trace: the request, and the model. Two for each execution follow: the queue, and the compute."""


class Trace(Relay):
    """Takes the place of the sink of a request."""

    __slots__ = (
        "_between",
        "_complete",
        "_ran",
        "_runs",
        "answered_ns",
        "attributes",
        "began_ns",
        "ended_ns",
        "error",
        "executions",
        "final_ns",
        "first_ns",
        "header",
        "id",
        "last_part",
        "number",
        "parent",
        "parent_span",
        "protocol",
        "received_ns",
        "sampler",
        "sends",
        "span_id",
        "state",
        "tensors",
        "times",
        "trace_id",
        "version",
    )

    def __init__(
        self,
        request: InferenceRequest,
        version: int,
        number: int,
        sampler: Sampler,
        complete: Callable[[Trace], None],
        parent: int = 0,
    ) -> None:
        """``complete`` is called once nothing more can happen; ``parent`` is the trace it belongs to, or 0."""
        sink = request.sink
        super().__init__(sink)
        self._complete = complete
        self._runs = self._ran = self._between = False
        self.header = request.header
        self.id = request.id
        self.version = version
        self.number = number
        self.sampler = sampler
        self.parent = parent
        self.protocol: str = getattr(sink, "protocol", "")
        """Empty for what no client sent."""
        self.received_ns = request.arrived_ns
        self.first_ns: int = getattr(sink, "began_ns", 0) or request.arrived_ns
        """When the first of the request was here. Mostly it is one piece."""
        self.trace_id = self.span_id = self.parent_span = 0
        """For OpenTelemetry, and 0 without. The ids of the other spans follow that of the first."""
        self.state = ""
        self.began_ns = _now()
        self.answered_ns = self.final_ns = self.ended_ns = 0
        """When the first response was here, the last, and when it was known how the request ran. 0: not at all."""
        self.executions: list[tuple[int, Marks | None]] = []
        """Since when the request waited for each of them, and its times."""
        self.last_part: Marks | None = None
        """The times of the last of several responses."""
        self.sends: list[int] = []
        """When the writing of each response began and ended."""
        self.error: NeriteError | None = None
        self.attributes: dict[str, Any] | None = None
        """What whoever sent the request has to say of it."""
        levels = sampler.values.levels
        self.times = "TIMESTAMPS" in levels
        self.tensors: list[tuple[int, str, dict[str, str]]] | None = [] if "TENSORS" in levels else None
        self._note_tensors("TENSOR_QUEUE_INPUT", request.header.inputs, request.data)

    @property
    def trace(self) -> Trace:
        """Itself: whoever stands before it passes this on."""
        return self

    def context_of(self, request: InferenceRequest) -> TraceContext | None:
        """Return the span of the execution that is under way, or comes next. None: spans are not made."""
        if not self.trace_id:
            return None
        return TraceContext(self.trace_id, self.compute_span(len(self.executions)), self.state)

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

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Pass a response on, and note it."""
        now = _now()
        if not self.answered_ns:
            self.answered_ns = now
        if response.error is not None:
            self.error = response.error
        elif self.tensors is not None and response.header is not None:
            self._note_tensors("TENSOR_BACKEND_OUTPUT", response.header.outputs, response.data)
            now = _now()
        self._sink.respond(request, response, final)
        if self.protocol and not response.empty:
            self.sends += (now, _now())
        if final:
            self.final_ns = now
            if self._between:
                self.ended_ns = now
            if not self._runs:
                self._complete(self)

    def parted(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Take note that an instance answers: sooner or later it says how it ran."""
        self._runs = not self._ran
        self._between = False
        self.last_part = marks
        super().parted(request, marks)

    def composed(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Note that all steps are done: each has a trace of its own, with its times."""
        super().composed(request, marks)
        self._note_end(request, None)

    def turned(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Note one of several executions: who gives up before the next ends the request there."""
        super().turned(request, marks)
        self._runs, self._between = False, True
        self._note_execution(request, marks)

    def ran(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Note the execution, after which there is no other."""
        super().ran(request, marks)
        self._note_end(request, marks)

    def let_go(self) -> None:
        """Keep nothing of the request but what is noted."""
        self._sink = NOBODY

    def _note_execution(self, request: InferenceRequest, marks: Marks | None) -> None:
        if marks is not None and marks.requests > 1 and marks.leader is None:
            marks.leader = self.context_of(request)
        self.executions.append((max(request.queued_ns, self.began_ns), marks))

    def _note_end(self, request: InferenceRequest, marks: Marks | None) -> None:
        self._note_execution(request, marks)
        self._runs, self._ran, self._between = False, True, False
        self.ended_ns = _now()
        if self.final_ns:
            self._complete(self)

    def _note_tensors(self, activity: str, specs: Iterable[TensorSpec], data: Iterable[Buffer]) -> None:
        if self.tensors is not None:
            for spec, buffer in zip(specs, data, strict=False):
                self.tensors.append((_now(), activity, described(spec, buffer)))
