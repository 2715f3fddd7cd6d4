"""What all instances have in common that run in the server's own process."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from nerite.backends.interface import Instance
from nerite.core.engine_report import EngineReport
from nerite.core.errors import NeriteError
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.failures import report
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.trace_context import TraceContext
from nerite.instances.instance import (
    Batch,
    BriefExecutionPolicy,
    Done,
    ModelInstance,
    OnReport,
    Part,
    current_span_of,
    run_model,
)
from nerite.observability.custom_metrics import ReportedMetrics

_log = logging.getLogger("nerite.execution")


class InProcessInstance:
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
        self.on_usable: Callable[[ModelInstance], None]
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

    def _execute(
        self, batch: Batch, timings: ExecutionTimes, span: TraceContext | None
    ) -> list[InferenceResponse | None]:
        """Return one answer for each request, whatever happens. On any thread."""
        try:
            return run_model(self._instance, self.name, batch, timings, span, contained=True)
        except BaseException as error:
            timings.failed = True
            timings.end()
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


# An instance with a thread of its own: for frameworks that release the GIL while they compute.


class ThreadInstance(InProcessInstance):
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
        self._brief_policy = BriefExecutionPolicy() if on_loop else None
        self._pending = 0
        self._jobs: queue.SimpleQueue[Callable[[], Callable[[], None] | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """The thread has a batch."""
        return self._pending > 0

    def run(self, batch: Batch) -> None:
        """Execute a batch at once if it will be brief; else hand it to the thread."""
        brief_policy = self._brief_policy
        span = current_span_of(batch) if self.traced else None
        if brief_policy is not None and brief_policy.on_loop and not self._pending:
            timings = ExecutionTimes()
            responses = self._execute(batch, timings, span)
            brief_policy.ran_on_loop(timings.ended_ns - timings.started_ns)
            self.done(self, batch, responses, timings)
            return

        def job() -> Callable[[], None]:
            timings = ExecutionTimes()
            computing = time.thread_time_ns()
            responses = self._execute(batch, timings, span)
            computed = time.thread_time_ns() - computing

            def hand_over() -> None:
                self._pending -= 1
                if brief_policy is not None:
                    brief_policy.ran_in_thread(computed, timings.ended_ns - timings.started_ns)
                    if brief_policy.on_loop and not self._pending:
                        self._end_thread()
                self.done(self, batch, responses, timings)

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


# An instance that runs on the loop itself: no isolation, no hand-over, for steps of a few microseconds.


class LoopInstance(InProcessInstance):
    """``EXECUTION_MODE: in_process``. While a batch runs, the whole server waits for it."""

    def __init__(self, name: str, instance: Instance) -> None:
        super().__init__(name, instance, ahead=False)

    @property
    def busy(self) -> bool:
        """Never: a batch is over when ``run`` returns."""
        return False

    def run(self, batch: Batch) -> None:
        """Execute a batch at once; ``done`` is called before this returns."""
        timings = ExecutionTimes()
        span = current_span_of(batch) if self.traced else None
        self.done(self, batch, self._execute(batch, timings, span), timings)

    def close(self, closed: Callable[[], None]) -> None:
        """Finalize the model."""
        self._finalize()
        closed()
