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
from nerite.core.witness import Relay, Witness
from nerite.observability.tensor_text import described
from nerite.observability.trace_settings import Sampler

_now = time.monotonic_ns


class Trace(Relay):
    """Takes the place of the sink of a request. There is one for each that is traced: it only notes."""

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
        "state",
        "tensors",
        "version",
    )

    def __init__(
        self,
        request: InferenceRequest,
        version: int,
        number: int,
        sampler: Sampler,
        complete: Callable[[Trace], None],
    ) -> None:
        """``complete`` is called once nothing more can happen."""
        sink = request.sink
        self._sink = sink  # as the class above does
        self._complete = complete
        self._runs = self._ran = self._between = False
        self.header = request.header
        self.id = request.id
        self.version = version
        self.number = number
        self.sampler = sampler
        self.parent = 0
        """The number of the trace it belongs to, or 0."""
        self.parent_span = 0
        self.state = ""
        self.protocol: str = getattr(sink, "protocol", "")
        """Empty for what no client sent."""
        self.received_ns = request.arrived_ns
        self.first_ns: int = getattr(sink, "began_ns", 0) or request.arrived_ns
        """When the first of the request was here. Mostly it is one piece."""
        self.began_ns = _now()
        self.executions: list[tuple[int, Marks | None]] = []
        """Since when the request waited for each of them, and its times."""
        self.last_part: Marks | None = None
        """The times of the last of several responses."""
        self.sends: list[int] = []
        """When the writing of each response began and ended."""
        self.answered_ns = self.final_ns = self.ended_ns = 0
        """When the first response was here, the last, and when it was known how the request ran. 0: not at all."""
        self.error: NeriteError | None = None
        self.attributes: dict[str, Any] | None = None
        """What whoever sent the request has to say of it."""
        self.tensors: list[tuple[int, str, dict[str, str]]] | None = None
        if sampler.tensors:
            self.tensors = []
            self._note_tensors("TENSOR_QUEUE_INPUT", request.header.inputs, request.data)

    @property
    def trace(self) -> Trace:
        """Itself: whoever stands before it passes this on."""
        return self

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
        if self.protocol and (response.header is not None or response.error is not None):
            self.sends += (now, _now())
        if final:
            self.final_ns = now
            told = getattr(self._sink, "span_attributes", None)
            if told is not None:
                self.attributes = told(request)
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
        if isinstance(self._sink, Witness):
            self._sink.ran(request, marks)
        self._note_end(request, marks)

    def let_go(self) -> None:
        """Keep nothing of the request but what is noted."""
        self._sink = NOBODY

    def _note_execution(self, request: InferenceRequest, marks: Marks | None) -> None:
        if marks is not None and marks.requests > 1 and marks.leader is None:
            self._lead(request, marks)
        queued_ns, began_ns = request.queued_ns, self.began_ns
        self.executions.append((queued_ns if queued_ns > began_ns else began_ns, marks))

    def _lead(self, request: InferenceRequest, marks: Marks) -> None:
        """Have the others of a batch refer to this one, the first of it, where they can."""

    def _note_end(self, request: InferenceRequest, marks: Marks | None) -> None:
        self._note_execution(request, marks)
        self._ran = True
        self._runs = self._between = False
        self.ended_ns = _now()
        if self.final_ns:
            self._complete(self)

    def _note_tensors(self, activity: str, specs: Iterable[TensorSpec], data: Iterable[Buffer]) -> None:
        if self.tensors is not None:
            for spec, buffer in zip(specs, data, strict=False):
                self.tensors.append((_now(), activity, described(spec, buffer)))
