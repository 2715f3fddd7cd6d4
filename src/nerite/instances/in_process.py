"""Instances that run in the server's own process, in a thread or on the loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from nerite.backends.interface import Instance
from nerite.core.engine_report import EngineReport
from nerite.core.errors import NeriteError
from nerite.core.execution_observer import ExecutionTimes, TraceContext
from nerite.core.failures import report
from nerite.core.request import InferenceRequest, at_hand
from nerite.core.response import InferenceResponse
from nerite.instances.instance import (
    Batch,
    BriefExecutionPolicy,
    Done,
    ModelInstance,
    OnReport,
    OverlappingInstance,
    Part,
    current_span_of,
    enter_span,
    failed_batch,
    leave_span,
    run_model,
)
from nerite.observability.custom_metrics import ReportedMetrics

_log = logging.getLogger("nerite.execution")


class InProcessInstance:
    """An instance without process isolation, whose model gets the server's own request objects."""

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
        """Always None: reports of engines in this process are not supported."""
        self.on_report: OnReport
        self.on_usable: Callable[[ModelInstance], None]
        self.on_lost: Callable[[Sequence[InferenceRequest]], None]
        self._instance = instance

    def cancel(self, request: InferenceRequest) -> None:
        """Do nothing: the model has the same object."""

    def pause(self, request: InferenceRequest, paused: bool) -> None:
        """Do nothing: an instance in this process has one response for each request."""

    def calls(self) -> Sequence[InferenceRequest]:
        """Return none: a model in this process cannot call others."""
        return ()

    def calls_for(self, request: InferenceRequest) -> Sequence[InferenceRequest] | None:
        """Return None: a model in this process cannot call others."""
        return None

    def is_ready(self, answered: Callable[[bool], None], patience: float) -> None:
        """Query the model synchronously: it answers from memory."""
        answered(self._instance.is_ready())

    def _execute(
        self, batch: Batch, timings: ExecutionTimes, span: TraceContext | None
    ) -> list[InferenceResponse | None]:
        """Return one response per request, whatever happens. On any thread."""
        try:
            return run_model(self._instance, self.name, batch, timings, span, contained=True)
        except BaseException as error:
            timings.failed = True
            timings.end()
            return [InferenceResponse.failed(report("dispatcher", error, f"of instance '{self.name}'"))] * len(batch)

    def _finalize(self) -> None:
        """Finalize the model. An exception is logged, and the instance is closed all the same."""
        try:
            self._instance.close()
        except BaseException:
            _log.exception("instance '%s' failed to finalize", self.name)

    def memory(self) -> int:
        """Return 0: its memory is the server's."""
        return 0

    def process(self) -> None:
        """Return None: it runs in the server's process."""


class ThreadInstance(InProcessInstance):
    """Runs batches one by one in a thread of its own, for frameworks that release the GIL while they compute.

    Brief executions run on the loop while the thread is idle. The thread exists only while it is needed: it starts with
    the first job, which some instances never get, and ends when the loop takes over.
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
        """``on_loop``: brief executions may run on the loop. A thread calls ``settle`` first."""
        super().__init__(name, instance, ahead=True)
        self._loop = loop
        self._settle = settle
        self._brief_policy = BriefExecutionPolicy() if on_loop else None
        self._pending = 0
        self._jobs: queue.SimpleQueue[Callable[[], Callable[[], None] | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether the thread has a batch."""
        return self._pending > 0

    def run(self, batch: Batch) -> None:
        """Execute a batch at once if it is expected to be brief; otherwise hand it to the thread."""
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
        """Finalize the model in its thread, and end the thread."""

        def job() -> Callable[[], None]:
            self._finalize()
            return closed

        self._do(job)
        self._end_thread()

    def _do(self, job: Callable[[], Callable[[], None]]) -> None:
        """Queue a job for the thread. Raises ``RuntimeError``, and does nothing, if no thread can be started."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            thread.start()
            self._thread = thread
        self._jobs.put(job)

    def _end_thread(self) -> None:
        """End the thread after its queued jobs. If another one has started by then, either takes the sentinel."""
        self._jobs.put(lambda: None)
        self._thread = None

    def _work(self) -> None:
        if self._settle is not None:
            try:
                self._settle()
            except Exception as error:  # the thread computes all the same, wherever it is placed
                report("dispatcher", error, f"of instance '{self.name}'")
        while (hand_over := self._jobs.get()()) is not None:
            self._loop.call_soon_threadsafe(hand_over)
            del hand_over  # it references the batch, and the next job may take long to come


class OverlappedInstance(InProcessInstance):
    """Begins batches in one thread and finishes them in another, for instances whose work is done by a GPU.

    While one batch is computed, the inputs of the next one are copied. Both threads start with the first batch.
    """

    def __init__(
        self,
        name: str,
        instance: OverlappingInstance,
        loop: asyncio.AbstractEventLoop,
        *,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """Both threads call ``settle`` first."""
        super().__init__(name, instance, ahead=True)
        self._overlapping = instance
        self._loop = loop
        self._settle = settle
        self._pending = 0
        self._batches: queue.SimpleQueue[tuple[Batch, TraceContext | None] | None] = queue.SimpleQueue()
        self._finishing: queue.SimpleQueue[Callable[[], Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def busy(self) -> bool:
        """Whether a batch is not finished."""
        return self._pending > 0

    def run(self, batch: Batch) -> None:
        """Hand a batch to the thread that begins it."""
        self._start()
        self._batches.put((batch, current_span_of(batch) if self.traced else None))
        self._pending += 1

    def close(self, closed: Callable[[], None]) -> None:
        """Finalize the model when all batches are finished, and end the threads."""
        self._start()

        def finalize() -> Callable[[], None]:
            self._finalize()
            return closed

        self._finishing.put(finalize)
        self._batches.put(None)

    def _start(self) -> None:
        """Start the threads. Raises ``RuntimeError``, and nothing has begun, if that is not possible."""
        for work in (self._begin_batches, self._finish_batches)[len(self._threads) :]:
            thread = threading.Thread(target=work, name=self.name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _begin_batches(self) -> None:
        self._prepare()
        while (item := self._batches.get()) is not None:
            batch, span = item
            timings = ExecutionTimes()
            self._finishing.put(partial(self._finished, batch, timings, self._begun(batch, timings, span)))
            del item, batch
        self._finishing.put(None)

    def _begun(
        self, batch: Batch, timings: ExecutionTimes, span: TraceContext | None
    ) -> Callable[[], Sequence[InferenceResponse | None]]:
        before = at_hand.set(batch)
        entered = None if span is None else enter_span(span)
        try:
            return self._overlapping.begin(batch, timings)
        except BaseException as error:
            responses = failed_batch(error, self.name, batch, timings)
            return lambda: responses
        finally:
            if entered is not None:
                leave_span(entered)
            at_hand.reset(before)

    def _finish_batches(self) -> None:
        self._prepare()
        while (finish := self._finishing.get()) is not None:
            self._loop.call_soon_threadsafe(finish())
            del finish

    def _finished(
        self, batch: Batch, timings: ExecutionTimes, finish: Callable[[], Sequence[InferenceResponse | None]]
    ) -> Callable[[], None]:
        """Finish a batch; return what passes the responses on."""
        before = at_hand.set(batch)
        try:
            responses = list(finish())
        except BaseException as error:
            responses = failed_batch(error, self.name, batch, timings)
        at_hand.reset(before)
        timings.end()

        def hand_over() -> None:
            self._pending -= 1
            self.done(self, batch, responses, timings)

        return hand_over

    def _prepare(self) -> None:
        if self._settle is not None:
            try:
                self._settle()
            except Exception as error:  # the thread computes all the same, wherever it is placed
                report("dispatcher", error, f"of instance '{self.name}'")


class LoopInstance(InProcessInstance):
    """Runs batches on the loop itself (``EXECUTION_MODE: in_process``), for steps of a few microseconds.

    No isolation and no hand-over: while a batch runs, the whole server waits for it.
    """

    def __init__(self, name: str, instance: Instance) -> None:
        super().__init__(name, instance, ahead=False)

    @property
    def busy(self) -> bool:
        """False: a batch has finished when ``run`` returns."""
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
