"""An instance that lives in a worker process: its batches, and what becomes of them.

The process, and its end, are the business of the household. A death fails the batch that was running and nothing else;
the model is not ready until the instance has moved into a new process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from nerite.core.engine_report import EngineReport
from nerite.core.errors import Internal, NeriteError
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest, RequestHeader, request_ids_of
from nerite.core.response import EMPTY, InferenceResponse
from nerite.instances.instance import Batch, Done, ModelInstance, OnReport, Part, ReadinessCheck
from nerite.observability.custom_metrics import ReportedMetrics
from nerite.scheduling.stall_detectors import EngineStallDetector, SlowBatchDetector
from nerite.workers.host.fused import FusedPath
from nerite.workers.host.process import WorkerPlan, WorkerProcess
from nerite.workers.ipc import messages
from nerite.workers.ipc.codec import Packer
from nerite.workers.ipc.messages import FusedBatch

_log = logging.getLogger("nerite.execution")


class RemoteInstance:
    """One instance, in whatever process its household has at the moment. For the loop's thread only."""

    def __init__(self, plan: WorkerPlan, family: object, worker_process: WorkerProcess) -> None:
        """``family``: as members have it. Usable once it has moved in."""
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
        self.restarts = 0
        self.metrics: ReportedMetrics | None = worker_process.metrics
        self.failure: NeriteError | None = None
        """Why the last attempt to make a new worker failed; None if it did not."""
        self._worker_process = worker_process
        self._seat = 0
        self.checks_readiness = True
        """The model has a check of its own of whether it can serve; set when it is loaded."""
        self._readiness = ReadinessCheck(plan.server_context.loop, self._ask_ready)
        self._packer: Packer[RequestHeader]
        self._batch: Batch | None = None
        self._number = 0
        self._way: FusedPath | None = None
        """What the batch may go on to in the worker."""
        self._open: dict[int, Batch] = {}
        """Batches that have run, of which requests get their responses one by one."""
        self._due: dict[int, set[int]] = {}
        """Which requests of each of them have not had the last."""
        self._early: set[int] = set()
        """Which requests of the batch that runs have had it."""
        self._watch = EngineStallDetector()
        """On the engine, if it has one."""
        self._looking: asyncio.TimerHandle | None = None

    async def move_in(self) -> None:
        """Have the model loaded. Raises ``NeriteError``; nothing is left behind then."""
        self._seat = self._number = await self._worker_process.admit(self)
        self._begin()

    def _begin(self) -> None:
        """Be usable: the model is loaded, in a worker that has packed nothing for it yet."""
        self._packer = self._worker_process.channel.packer()
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
        if number < messages.SEATS or number in self._open:  # they begin again, or one is still in use
            number = self._free_number()
        worker_process = self._worker_process
        ways = worker_process.ways
        way = None if ways is None else ways.of(batch)
        following = 0 if way is None else way.number
        worker_process.channel.execute(self._packer, number, batch, following, traced=self.traced)
        self._number, self._batch, self._way = number, batch, way
        if self.report is not None:
            self._watch.handed(batch, self.plan.server_context.loop.time())
            self._watch_over()

    def cancel(self, request: InferenceRequest) -> None:
        """Tell the worker, if it has the request, and cancel what the model asks of others for nobody."""
        number = self._tell(messages.CANCEL, request)
        if number is not None:
            self._worker_process.bls_server.parent_cancelled(number)

    def pause(self, request: InferenceRequest, paused: bool) -> None:
        """Tell the worker, if it has the request."""
        self._tell(messages.PAUSE if paused else messages.RESUME, request)

    def calls(self) -> Sequence[InferenceRequest]:
        """Return the calls that the batch waits for."""
        return () if self._batch is None or not self.usable else self._worker_process.bls_server.under_way(self._number)

    def calls_for(self, request: InferenceRequest) -> Sequence[InferenceRequest] | None:
        """Return the calls that the batch of ``request`` waits for, None if the worker does not have it."""
        place = self._place(request) if self.usable else None
        return None if place is None else self._worker_process.bls_server.under_way(place[0])

    def is_ready(self, answered: Callable[[bool], None], patience: float) -> None:
        """Say whether the worker is up; ask the model in it, if that has a check of its own."""
        if self.usable and self.checks_readiness:
            self._readiness.check(answered, patience, executing=self._batch is not None)
        else:
            answered(self.usable)

    def _ask_ready(self, answered: Callable[[bool], None]) -> None:
        def said(value: object, error: NeriteError | None) -> None:
            answered(error is None and bool(value))

        self._worker_process.channel.request(messages.IS_READY, {"seat": self._seat}, said)

    def memory(self) -> int:
        """Return how many bytes the worker has for itself now: 0 while there is none."""
        return self._worker_process.memory if self.usable else 0

    def process(self) -> tuple[int, float] | None:
        """Return the worker's; None while there is none."""
        return self._worker_process.process if self.usable else None

    def close(self, closed: Callable[[], None]) -> None:
        """Have the model finalized; with the last one that lives there the process ends."""
        self._watch.gone()
        self._worker_process.leave(self._seat, closed)

    # As a member

    def result(
        self,
        number: int,
        responses: Sequence[InferenceResponse | None],
        timings: ExecutionTimes,
        along: FusedBatch | None,
    ) -> None:
        """Take what a batch returned, and what became of it where others could follow."""
        batch = self._batch
        assert batch is not None and number == self._number
        self._batch = None
        if along is not None:
            responses = self._gone_on(batch, responses, along)
            timings.followed = bool(along.runs)
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
        """Take what the engine says of itself."""
        self.report = report
        self._watch.reported(report, self.plan.server_context.loop.time())
        self.on_report(self, report)

    def batches(self) -> Sequence[tuple[int, Batch]]:
        """Return the batches that the worker has, with their numbers: what runs is the last."""
        batches = list(self._open.items())
        if self._batch is not None:
            batches.append((self._number, self._batch))
        return batches

    @property
    def executes(self) -> int | None:
        """The number of the batch that the worker executes; None while it executes none."""
        return None if self._batch is None else self._number

    def tell_where_it_is(self, seconds: float) -> None:
        """Say in the log that a batch takes so long, and have the worker write down where its threads are."""
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
        """Return the requests of a batch that the worker has."""
        return self._batch if number == self._number and self._batch is not None else self._open.get(number)

    def died(self, pid: int, ending: str) -> None:
        """Answer what the worker had with the reason."""
        batch, self._batch = self._batch, None
        unanswered = [self._open[number][index] for number, due in self._due.items() for index in sorted(due)]
        self._open.clear()
        self._due.clear()
        self._early.clear()
        self._readiness.lost()
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
        for request in unanswered:
            self.part(request, InferenceResponse.failed(error), True, None)
        if batch is not None:
            self.done(self, batch, [InferenceResponse.failed(error)] * len(batch), None)

    def moved_in(self, pid: int) -> None:
        """Go on in a new process."""
        self.restarts += 1
        self.failure = None
        self._begin()
        _log.warning("worker '%s' runs again (pid %d)", self.name, pid)
        self.on_usable(self)

    def failed(self, why: NeriteError, pause: float) -> None:
        """Take note that there will be no new process for a while."""
        self.failure = why
        _log.error("no new worker for '%s': %s; next try in %.1f s", self.name, why.message, pause)
        self.on_usable(self)

    # Its own

    def _watch_over(self) -> None:
        """Look again when the engine will hang, if it will be silent until then."""
        at = self._watch.hangs_at
        if at is not None and self._looking is None:
            self._looking = self.plan.server_context.loop.call_at(at, self._look)

    def _look(self) -> None:
        self._looking = None
        if self._watch.hangs(self.plan.server_context.loop.time()):
            self._worker_process.kill(f"its engine has finished no step for {self._watch.patience} s")
        else:
            self._watch_over()

    def _had_last(self, number: int, index: int) -> None:
        """Note that a request has had its last response; forget its batch, if that has run and no other is due."""
        due = self._due.get(number)
        if due is None:
            self._early.add(index)
            return
        due.discard(index)
        if not due:
            del self._open[number], self._due[number]

    def _tell(self, kind: int, request: InferenceRequest) -> int | None:
        """Tell the worker something of a request; return its batch, None if the worker does not have it."""
        place = self._place(request) if self.usable else None
        if place is None:
            return None
        number, index = place
        self._worker_process.channel.tell(kind, number, index)
        return number

    def _place(self, request: InferenceRequest) -> tuple[int, int] | None:
        """Return which batch has a request, and where in it; None if none has."""
        origin = request.origin
        # From the last: a request that runs again is in several.
        for number, batch in reversed(self.batches()):
            for index, each in enumerate(batch):
                if each.origin is origin:
                    return number, index
        return None

    def _gone_on(
        self, batch: Batch, responses: Sequence[InferenceResponse | None], along: FusedBatch
    ) -> Sequence[InferenceResponse | None]:
        """Take note of what followed; return the responses, where one without anything in it is one all the same."""
        assert self._way is not None
        self._way.gone(batch, along)
        return [
            EMPTY if response is None and reached else response
            for response, reached in zip(responses, along.reached, strict=True)
        ]

    def _free_number(self) -> int:
        number = self._number | messages.SEATS
        while number in self._open:
            number += messages.SEATS
        return number


def _ignored(_instance: ModelInstance, _report: EngineReport | None) -> None:
    """Take no note of a report. There is a last one all the same."""


# Looks after what workers execute: of one that is at it for very long, the log says where its threads are.

LONG: Final = 60
"""How many times as long as the event loop may stand still, an execution may last."""
_LOOKS: Final = 4
"""Within that time."""


class SlowBatchMonitor:
    """Over the workers of a server. What it costs has nothing to do with how many requests there are."""

    def __init__(self, instances: Callable[[], Iterable[ModelInstance]], stall_seconds: float) -> None:
        """``instances`` returns the instances that there are now; ``stall_seconds`` is the flag."""
        self._instances = instances
        self._limit = stall_seconds * LONG
        self._watches: WeakKeyDictionary[RemoteInstance, SlowBatchDetector] = WeakKeyDictionary()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._limit / _LOOKS)
            for instance in self._instances():
                if isinstance(instance, RemoteInstance):
                    self._look(instance, loop.time())

    def _look(self, instance: RemoteInstance, now: float) -> None:
        watch = self._watches.get(instance)
        if watch is None:
            watch = self._watches[instance] = SlowBatchDetector(self._limit)
        seconds = watch.look(instance.executes, now)
        if seconds is not None:
            instance.tell_where_it_is(seconds)
