"""An instance in a worker process, seen from the server: its batches, and what happens to them if the process ends.

``WorkerProcess`` starts and restarts the process. A death fails the requests that the worker had and nothing else; the
model is not ready until the instance is loaded in a new process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from nerite.core.engine_report import EngineReport
from nerite.core.errors import Internal, NeriteError, Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest, RequestHeader, request_ids_of
from nerite.core.response import InferenceResponse
from nerite.core.work_loop import STALL_SECONDS, WorkLoop
from nerite.instances.instance import Batch, Done, ModelInstance, OnReport, Part, ReadinessCheck
from nerite.observability.custom_metrics import ReportedMetrics
from nerite.scheduling.stall_detectors import EngineStallDetector, SlowBatchDetector
from nerite.workers.host.fused import FusedPath
from nerite.workers.host.process import WorkerPlan, WorkerProcess
from nerite.workers.ipc import messages
from nerite.workers.ipc.codec import Packer

_log = logging.getLogger("nerite.execution")


class RemoteInstance:
    """One instance, in the current process of its ``WorkerProcess``. For the loop's thread only."""

    def __init__(self, plan: WorkerPlan, family: object, worker_process: WorkerProcess) -> None:
        """``family``: see ``HostedInstance``. Usable after ``move_in``."""
        self.plan = plan
        self.family = family
        self.name = plan.instance.name
        self.ahead = False
        self.usable = False
        self.done: Done
        self.part: Part
        self.traced = False
        self.report: EngineReport | None = None
        self.on_report: OnReport = _ignored
        self.on_usable: Callable[[ModelInstance], None] = lambda _instance: None
        self.on_lost: Callable[[Sequence[InferenceRequest]], None] = lambda _requests: None
        self.restarts = 0
        self.metrics: ReportedMetrics | None = worker_process.metrics
        self.failure: NeriteError | None = None
        """Error of the last attempt to restart the worker; None if it succeeded."""
        self._worker_process = worker_process
        self._seat = 0
        self.checks_readiness = True
        """The model has a readiness check of its own; set when it is loaded."""
        self.can_sleep = False
        """It can give the memory of its GPUs back while it has no requests; set when it is loaded."""
        self._readiness = ReadinessCheck(plan.server_context.loop, self._ask_ready)
        self._packer: Packer[RequestHeader]
        self._batch: Batch | None = None
        self._number = 0
        self._fused_path: FusedPath | None = None
        """Fused steps that may follow the running batch in the worker."""
        self._open: dict[int, Batch] = {}
        """Executed batches with requests that still get their responses one by one."""
        self._due: dict[int, set[int]] = {}
        """By batch number, the requests in ``_open`` without their last response."""
        self._early: set[int] = set()
        """Requests of the running batch that have had their last response."""
        self._watch = EngineStallDetector()
        """Watches the engine, if the instance has one."""
        self._check_timer: asyncio.TimerHandle | None = None
        self._changes: set[asyncio.Future[Any]] = set()
        """Changes that the worker makes: of adapters, or between sleep and work."""

    async def move_in(self) -> None:
        """Load the model in the worker. Raises ``NeriteError``; then the worker is as before."""
        self._seat = self._number = await self._worker_process.admit(self)
        self._begin()

    def _begin(self) -> None:
        """Become usable: the model is loaded, in a worker that has packed nothing for it yet."""
        self._packer = self._worker_process.running.channel.packer()
        self.usable = True
        if self.checks_readiness:
            self._readiness.refresh()

    @property
    def busy(self) -> bool:
        """The worker has a batch, or a request whose responses come one by one."""
        return self._batch is not None or bool(self._open)

    def run(self, batch: Batch) -> None:
        """Send a batch to the worker."""
        number = (self._number + messages.SEATS) & 0xFFFFFFFF
        if number < messages.SEATS or number in self._open:  # the numbers wrapped around, or this one is still in use
            number = self._free_number()
        running = self._worker_process.running
        fused_path = running.fused_paths.of(batch)
        fused_steps = 0 if fused_path is None else fused_path.number
        running.channel.execute(self._packer, number, batch, fused_steps, traced=self.traced)
        self._number, self._batch, self._fused_path = number, batch, fused_path
        if self.report is not None:
            self._watch.handed(batch, self.plan.server_context.loop.time())
            self._watch_engine()

    def cancel(self, request: InferenceRequest) -> None:
        """Notify the worker if it has the request, and cancel the model's calls that only served cancelled requests."""
        number = self._notify(messages.CANCEL, request)
        if number is not None:
            self._worker_process.running.bls_server.parent_cancelled(number)

    def pause(self, request: InferenceRequest, paused: bool) -> None:
        """Notify the worker if it has the request."""
        self._notify(messages.PAUSE if paused else messages.RESUME, request)

    def calls(self) -> Sequence[InferenceRequest]:
        """Return the unanswered calls of the running batch."""
        if self._batch is None or not self.usable:
            return ()
        return self._worker_process.running.bls_server.under_way(self._number)

    def calls_for(self, request: InferenceRequest) -> Sequence[InferenceRequest] | None:
        """Return the unanswered calls of the batch of ``request``; None if the worker does not have it."""
        place = self._place(request) if self.usable else None
        return None if place is None else self._worker_process.running.bls_server.under_way(place[0])

    def is_ready(self, answered: Callable[[bool], None], patience: float) -> None:
        """Report whether the worker is up; query the model in it if that has a check of its own."""
        if self.usable and self.checks_readiness:
            self._readiness.check(answered, patience, executing=self._batch is not None)
        else:
            answered(self.usable)

    def _ask_ready(self, answered: Callable[[bool], None]) -> None:
        def said(value: object, error: NeriteError | None) -> None:
            answered(error is None and bool(value))

        self._worker_process.running.channel.request(messages.IS_READY, {"seat": self._seat}, said)

    async def change_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter, or unload it if ``path`` is empty; so does a new process. Raises ``NeriteError``."""
        if not path:
            self.plan.adapters.pop(name, None)
        await self._change(messages.ADAPTER, {"name": name, "path": path})
        if path:
            self.plan.adapters[name] = path

    async def sleep(self, asleep: bool) -> None:
        """Give the memory of the GPUs back, or take it again. It has no requests until it is awake.

        Raises ``NeriteError``. A new process is awake.
        """
        await self._change(messages.SLEEP, {"asleep": asleep})

    async def _change(self, kind: int, wanted: dict[str, Any]) -> None:
        """Have the worker make a change. Raises ``NeriteError``."""
        if not self.usable:
            raise Unavailable(f"instance '{self.name}' restarts: try again")
        change: asyncio.Future[Any] = self.plan.server_context.loop.create_future()
        self._changes.add(change)

        def answered(value: object, error: NeriteError | None) -> None:
            if change.done():
                return
            if error is None:
                change.set_result(value)
            else:
                change.set_exception(error)

        self._worker_process.running.channel.request(kind, {"seat": self._seat, **wanted}, answered)
        try:
            await change
        finally:
            self._changes.discard(change)

    def memory(self) -> int:
        """Return the private memory of the worker in bytes; 0 while there is none."""
        return self._worker_process.memory if self.usable else 0

    def process(self) -> tuple[int, float] | None:
        """Return id and start time of the worker; None while there is none."""
        return self._worker_process.process if self.usable else None

    def kill(self, reason: str) -> None:
        """Kill the worker, which is stuck. Its requests are lost to the instance, and a new worker is started."""
        self._worker_process.kill(reason)

    def close(self, closed: Callable[[], None]) -> None:
        """Finalize the model; with the last instance in it the process ends."""
        self._watch.gone()

        def left() -> None:
            self._fail_changes(f"instance '{self.name}' was unloaded")
            closed()

        self._worker_process.leave(self._seat, left)

    def _fail_changes(self, why: str) -> None:
        """Fail the changes that the worker has not made: it will not answer any more."""
        for change in self._changes:
            if not change.done():
                change.set_exception(Unavailable(why))

    # Called by the worker process

    def result(
        self,
        number: int,
        responses: Sequence[InferenceResponse | None],
        timings: ExecutionTimes,
        fused_runs: memoryview,
    ) -> None:
        """Take the result of a batch, and of the fused steps that followed it."""
        batch = self._batch
        assert batch is not None and number == self._number
        self._batch = None
        if self._fused_path is not None:
            responses = self._fused_path.finish(batch, responses, timings, fused_runs)
        if self.report is not None:
            self._watch.answered(request for request, it in zip(batch, responses, strict=True) if it is not None)
        if None in responses:
            due = {index for index, response in enumerate(responses) if response is None} - self._early
            if due:
                self._open[number], self._due[number] = batch, due
        self._early.clear()
        self.done(self, batch, responses, timings)

    def response(
        self, number: int, index: int, response: InferenceResponse, final: bool, timings: ExecutionTimes
    ) -> None:
        """Take one of several responses to a request of a batch."""
        batch = self.batch_of(number)
        if batch is None or index >= len(batch):
            return
        self.part(batch[index], response, final, timings)
        if final:
            self._watch.answered((batch[index],))
            self._had_last(number, index)

    def reported(self, report: EngineReport) -> None:
        """Take a report of the engine."""
        self.report = report
        self._watch.reported(report, self.plan.server_context.loop.time())
        self.on_report(self, report)

    def batches(self) -> Sequence[tuple[int, Batch]]:
        """Return the batches that the worker has, with their numbers; the running one is the last."""
        batches = list(self._open.items())
        if self._batch is not None:
            batches.append((self._number, self._batch))
        return batches

    @property
    def executes(self) -> int | None:
        """Number of the batch that the worker executes; None while it is idle."""
        return None if self._batch is None else self._number

    def log_stacks(self, seconds: float) -> None:
        """Log that a batch takes very long, and make the worker write the stacks of its threads."""
        batch = self._batch or ()
        _log.warning(
            "instance '%s' has executed a batch for more than %.1f s (requests: %d). This is where the threads of its "
            "worker are:",
            self.name,
            seconds,
            len(batch),
            extra={"request_id": request_ids_of(batch)},
        )
        self._worker_process.write_stacks()

    def batch_of(self, number: int) -> Batch | None:
        """Return a batch that the worker has."""
        return self._batch if number == self._number and self._batch is not None else self._open.get(number)

    def died(self, pid: int, ending: str) -> None:
        """Fail the requests that the worker had."""
        batch, self._batch = self._batch, None
        unanswered = [self._open[number][index] for number, due in self._due.items() for index in sorted(due)]
        self._open.clear()
        self._due.clear()
        self._early.clear()
        self._readiness.lost()
        self._fail_changes(f"the worker of '{self.name}' died: {ending}")
        _log.error(
            "worker '%s' (pid %d) died: %s; starting another",
            self.name,
            pid,
            ending,
            extra={"request_id": request_ids_of([*(batch or ()), *unanswered])},
        )
        if self.report is not None:
            self.report = None
            self._watch.gone()
            self.on_report(self, None)
        self.on_usable(self)
        error = Internal(
            f"Stub process '{self.name}' is not healthy. The worker died while it ran this request: {ending}."
        )
        self.on_lost([*(batch or ()), *unanswered])
        for request in unanswered:
            self.part(request, InferenceResponse.failed(error), True, None)
        if batch is not None:
            self.done(self, batch, [InferenceResponse.failed(error)] * len(batch), None)

    def restarted(self, pid: int) -> None:
        """Resume in a new process."""
        self.restarts += 1
        self.failure = None
        self._begin()
        _log.warning("worker '%s' runs again (pid %d)", self.name, pid)
        self.on_usable(self)

    def failed(self, why: NeriteError, pause: float) -> None:
        """Record that a restart failed."""
        self.failure = why
        _log.error("no new worker for '%s': %s; next try in %.1f s", self.name, why.message, pause)
        self.on_usable(self)

    # Internal

    def _watch_engine(self) -> None:
        """Schedule a check for the time when the engine counts as hanging if no report comes before."""
        at = self._watch.hangs_at
        if at is not None and self._check_timer is None:
            self._check_timer = self.plan.server_context.loop.call_at(at, self._check_engine)

    def _check_engine(self) -> None:
        self._check_timer = None
        if self._watch.hangs(self.plan.server_context.loop.time()):
            self.kill(f"its engine has finished no step for {self._watch.patience} s")
        else:
            self._watch_engine()

    def _had_last(self, number: int, index: int) -> None:
        """Record the last response to a request; forget its batch if it was executed and has no open requests."""
        due = self._due.get(number)
        if due is None:
            self._early.add(index)
            return
        due.discard(index)
        if not due:
            del self._open[number], self._due[number]

    def _notify(self, kind: int, request: InferenceRequest) -> int | None:
        """Notify the worker about a request; return its batch number, None if the worker does not have it."""
        place = self._place(request) if self.usable else None
        if place is None:
            return None
        number, index = place
        self._worker_process.running.channel.notify(kind, number, index)
        return number

    def _place(self, request: InferenceRequest) -> tuple[int, int] | None:
        """Return batch number and index of a request; None if the worker does not have it."""
        origin = request.origin
        # From the last: a request that runs again is in several batches.
        for number, batch in reversed(self.batches()):
            for index, each in enumerate(batch):
                if each.origin is origin:
                    return number, index
        return None

    def _free_number(self) -> int:
        number = self._number | messages.SEATS
        while number in self._open:
            number += messages.SEATS
        return number


def _ignored(_instance: ModelInstance, _report: EngineReport | None) -> None:
    """Ignore a report. ``RemoteInstance.report`` keeps the last one all the same."""


# Detection of slow batches: the stacks of a worker are logged when an execution takes very long.

LONG: Final = 60
"""An execution may last this many times as long as the event loop may stall."""
_CHECKS: Final = 4
"""Number of checks within that time."""


class SlowBatchMonitor:
    """Watches the workers of a server. Its cost does not depend on the number of requests."""

    def __init__(self, instances: Callable[[], Iterable[ModelInstance]], stall_seconds: float) -> None:
        """``instances`` returns the current instances; ``stall_seconds`` is the flag."""
        self._instances = instances
        self._limit = stall_seconds * LONG
        self.loop = WorkLoop("stalls", "batches", stall_seconds=STALL_SECONDS + 3 * self._limit / _CHECKS)
        self._watches: WeakKeyDictionary[RemoteInstance, SlowBatchDetector] = WeakKeyDictionary()

    async def run(self) -> None:
        """Check periodically, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._limit / _CHECKS)
            with self.loop.step("instances"):
                for instance in self._instances():
                    if isinstance(instance, RemoteInstance):
                        self._check(instance, loop.time())

    def _check(self, instance: RemoteInstance, now: float) -> None:
        watch = self._watches.get(instance)
        if watch is None:
            watch = self._watches[instance] = SlowBatchDetector(self._limit)
        seconds = watch.check(instance.executes, now)
        if seconds is not None:
            instance.log_stacks(seconds)
