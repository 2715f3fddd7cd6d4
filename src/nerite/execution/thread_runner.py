"""An instance with a thread of its own: for frameworks that release the GIL while they compute."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable

from nerite.backends.interface import Instance
from nerite.core.internal_errors import report
from nerite.core.marks import Marks
from nerite.execution import current_span
from nerite.execution.brevity import Brevity
from nerite.execution.inside_runner import InsideRunner
from nerite.execution.runner import Batch


class ThreadRunner(InsideRunner):
    """One instance, one thread, one job after the other; what is brief runs on the loop, while the thread is idle.

    The thread is there while there is work for it: it begins with the first job, which some instances never get, and
    ends where the loop takes over.
    """

    def __init__(
        self,
        name: str,
        instance: Instance,
        loop: asyncio.AbstractEventLoop,
        *,
        on_loop: bool = True,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """``on_loop``: the loop's thread may execute too. ``settle`` is the first thing that a thread does."""
        super().__init__(name, instance, ahead=True)
        self._loop = loop
        self._settle = settle
        self._brevity = Brevity() if on_loop else None
        self._pending = 0
        self._jobs: queue.SimpleQueue[Callable[[], Callable[[], None] | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """The thread has a batch."""
        return self._pending > 0

    def run(self, batch: Batch) -> None:
        """Execute a batch at once if it will be brief; else hand it to the thread."""
        brevity = self._brevity
        span = current_span.of(batch) if self.traced else None
        if brevity is not None and brevity.on_loop and not self._pending:
            marks = Marks()
            responses = self._execute(batch, marks, span)
            brevity.ran_on_loop(marks.ended_ns - marks.started_ns)
            self.done(self, batch, responses, marks)
            return

        def job() -> Callable[[], None]:
            marks = Marks()
            computing = time.thread_time_ns()
            responses = self._execute(batch, marks, span)
            computed = time.thread_time_ns() - computing

            def hand_over() -> None:
                self._pending -= 1
                if brevity is not None:
                    brevity.ran_in_thread(computed, marks.ended_ns - marks.started_ns)
                    if brevity.on_loop and not self._pending:
                        self._end_thread()
                self.done(self, batch, responses, marks)

            return hand_over

        self._do(job)
        self._pending += 1

    def close(self, closed: Callable[[], None]) -> None:
        """Finalize the model in its thread, and end that."""

        def job() -> Callable[[], None]:
            self._finalize()
            return closed

        self._do(job)
        self._end_thread()

    def _do(self, job: Callable[[], Callable[[], None]]) -> None:
        """Have a job done by the thread. Raises ``RuntimeError``, and does nothing, if no thread can be started."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            thread.start()
            self._thread = thread
        self._jobs.put(job)

    def _end_thread(self) -> None:
        """End the thread after the jobs it has. If another begins before that, whichever takes the word for it ends."""
        self._jobs.put(lambda: None)
        self._thread = None

    def _work(self) -> None:
        if self._settle is not None:
            try:
                self._settle()
            except Exception as error:  # the thread computes all the same, where the system has placed it
                report("dispatcher", error, f"of instance '{self.name}'")
        while (hand_over := self._jobs.get()()) is not None:
            self._loop.call_soon_threadsafe(hand_over)
            del hand_over  # it has the batch, and the next one may be long in coming
