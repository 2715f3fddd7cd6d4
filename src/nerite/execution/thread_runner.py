"""An instance in a thread of the server: for frameworks that release the GIL while they compute."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from nerite.backends.interface import Instance
from nerite.core.errors import NeriteError
from nerite.core.marks import Marks
from nerite.execution import guard
from nerite.execution.runner import Batch, Done, Runner


class ThreadRunner:
    """One thread, one instance, one job at a time. The thread begins with the first job, which some never get."""

    def __init__(self, name: str, instance: Instance, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.usable = True
        self.failure: NeriteError | None = None
        self.done: Done
        self.on_usable: Callable[[Runner], None]
        self._instance = instance
        self._loop = loop
        self._jobs: queue.SimpleQueue[Callable[[], Callable[[], None] | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, batch: Batch) -> None:
        """Hand a batch to the thread."""
        marks = Marks()

        def job() -> Callable[[], None]:
            responses = guard.run(self._instance, self.name, batch, marks)
            return lambda: self.done(self, batch, responses, marks)

        self._do(job)

    def is_ready(self, answered: Callable[[bool], None]) -> None:
        """Ask the model, here and now: native backends answer from memory."""
        answered(self._instance.is_ready())

    def close(self, closed: Callable[[], None]) -> None:
        """Finalize the model in its thread, and end that."""

        def job() -> Callable[[], None]:
            self._instance.close()
            return closed

        self._do(job)
        self._jobs.put(lambda: None)

    def _do(self, job: Callable[[], Callable[[], None]]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (report := self._jobs.get()()) is not None:
            self._loop.call_soon_threadsafe(report)
