"""What all instances have in common that run in the server's own process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from nerite.backends.interface import Instance
from nerite.core.engine_report import EngineReport
from nerite.core.errors import NeriteError
from nerite.core.internal_errors import report
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.trace_context import TraceContext
from nerite.execution import guard
from nerite.execution.runner import Batch, Done, OnReport, Part, Runner
from nerite.observability.custom_metrics import ReportedMetrics

_log = logging.getLogger("nerite.execution")


class InsideRunner:
    """An instance that nobody can kill, and whose model has the very requests that the server has."""

    def __init__(self, name: str, instance: Instance, *, ahead: bool) -> None:
        self.name = name
        self.ahead = ahead
        self.usable = True
        self.failure: NeriteError | None = None
        self.restarts = 0
        self.metrics: ReportedMetrics | None = None
        self.done: Done
        self.part: Part
        self.traced = False
        self.report: EngineReport | None = None
        """None: what an engine in this process says is not heard."""
        self.on_report: OnReport
        self.on_usable: Callable[[Runner], None]
        self._instance = instance

    def cancel(self, request: InferenceRequest) -> None:
        """Do nothing: the model has the same object."""

    def pause(self, request: InferenceRequest, paused: bool) -> None:
        """Do nothing: an instance in this process has one response for each request."""

    def calls(self) -> Sequence[InferenceRequest]:
        """Return none: a model in this process calls no other."""
        return ()

    def calls_for(self, request: InferenceRequest) -> Sequence[InferenceRequest] | None:
        """Return None: nobody waits here for a call."""
        return None

    def is_ready(self, answered: Callable[[bool], None], patience: float) -> None:
        """Ask the model, here and now: it answers from memory."""
        answered(self._instance.is_ready())

    def _execute(self, batch: Batch, marks: Marks, span: TraceContext | None) -> list[InferenceResponse | None]:
        """Return one answer for each request, whatever happens. On any thread."""
        try:
            return guard.run(self._instance, self.name, batch, marks, span, contained=True)
        except BaseException as error:
            marks.failed = True
            marks.end()
            return [InferenceResponse.failed(report("dispatcher", error, f"of instance '{self.name}'"))] * len(batch)

    def _finalize(self) -> None:
        """Finalize the model. What that raises is for the log: the instance is closed all the same."""
        try:
            self._instance.close()
        except BaseException:
            _log.exception("instance '%s' failed to finalize", self.name)

    def memory(self) -> int:
        """Return 0: what it takes is the server's."""
        return 0

    def process(self) -> None:
        """Return None: it is in the server's."""
