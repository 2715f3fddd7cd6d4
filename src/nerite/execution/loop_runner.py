"""An instance that runs on the loop itself: no isolation, no hand-over, for steps of a few microseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nerite.backends.interface import Instance
from nerite.core.errors import NeriteError
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.execution import guard
from nerite.execution.runner import Batch, Done, Part, Runner


class LoopRunner:
    """``EXECUTION_MODE: in_process``. While a batch runs, the whole server waits for it."""

    def __init__(self, name: str, instance: Instance) -> None:
        self.name = name
        self.ahead = False
        self.usable = True
        self.failure: NeriteError | None = None
        self.restarts = 0
        self.done: Done
        self.part: Part
        self.on_usable: Callable[[Runner], None]
        self._instance = instance

    @property
    def busy(self) -> bool:
        """Never: a batch is over when ``run`` returns."""
        return False

    def run(self, batch: Batch) -> None:
        """Execute a batch at once; ``done`` is called before this returns."""
        marks = Marks()
        self.done(self, batch, guard.run(self._instance, self.name, batch, marks), marks)

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
        """Ask the model."""
        answered(self._instance.is_ready())

    def memory(self) -> int:
        """Return 0: what it takes is the server's."""
        return 0

    def close(self, closed: Callable[[], None]) -> None:
        """Finalize the model."""
        self._instance.close()
        closed()
