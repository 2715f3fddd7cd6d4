"""An instance that runs on the loop itself: no isolation, no hand-over, for steps of a few microseconds."""

from __future__ import annotations

from collections.abc import Callable

from nerite.backends.interface import Instance
from nerite.core.marks import Marks
from nerite.execution import current_span
from nerite.execution.inside_runner import InsideRunner
from nerite.execution.runner import Batch


class LoopRunner(InsideRunner):
    """``EXECUTION_MODE: in_process``. While a batch runs, the whole server waits for it."""

    def __init__(self, name: str, instance: Instance) -> None:
        super().__init__(name, instance, ahead=False)

    @property
    def busy(self) -> bool:
        """Never: a batch is over when ``run`` returns."""
        return False

    def run(self, batch: Batch) -> None:
        """Execute a batch at once; ``done`` is called before this returns."""
        marks = Marks()
        span = current_span.of(batch) if self.traced else None
        self.done(self, batch, self._execute(batch, marks, span), marks)

    def close(self, closed: Callable[[], None]) -> None:
        """Finalize the model."""
        self._finalize()
        closed()
