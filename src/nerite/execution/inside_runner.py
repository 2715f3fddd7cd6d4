"""What all instances have in common that run in the server's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nerite.backends.interface import Instance
from nerite.core.engine_report import EngineReport
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.execution.runner import Done, OnReport, Part, Runner
from nerite.observability.custom_metrics import ReportedMetrics


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

    def is_ready(self, answered: Callable[[bool], None]) -> None:
        """Ask the model, here and now: it answers from memory."""
        answered(self._instance.is_ready())

    def memory(self) -> int:
        """Return 0: what it takes is the server's."""
        return 0

    def process(self) -> None:
        """Return None: it is in the server's."""
