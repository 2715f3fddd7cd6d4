"""A worker process, and the instances in it: one, or one of each of several models that share it.

When the process ends, all its instances are lost. A new process is started, at once after the first time and with
backoff later on, and all models are loaded again. A model that fails to load is retried in the same way; the others do
not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.engine_report import EngineReport
from nerite.core.errors import Internal, NeriteError, Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.failures import report, system_error
from nerite.core.response import InferenceResponse
from nerite.dispatch.interface import VersionHandle
from nerite.instances.instance import Batch, ModelInstance
from nerite.observability.custom_metrics import ReportedMetrics
from nerite.observability.load_times import stage
from nerite.scheduling.backoff import ExponentialBackoff
from nerite.workers.child.worker import write_context
from nerite.workers.host.bls import BlsServer, ControlCaller
from nerite.workers.host.channel import Ask, WorkerChannel
from nerite.workers.host.fork_server import ForkedProcess
from nerite.workers.host.fused import FusedPaths
from nerite.workers.host.server_context import ServerContext
from nerite.workers.host.worker_thread import WorkerThread
from nerite.workers.ipc import messages
from nerite.workers.ipc.shared_memory import Arena


@dataclass(frozen=True)
class WorkerPlan:
    """Everything needed to start the worker of one instance, any number of times."""

    backend: str
    context: ModelContext
    instance: InstanceContext
    interpreter: Path | None
    environment: Mapping[str, str]
    arena: Arena
    server_context: ServerContext
    shared: str = ""
    """Name of the worker that several models share; empty for a worker of the instance's own."""
    threaded: bool = False
    """The worker is a thread of this process."""
    adapters: dict[str, str] = field(default_factory=dict, compare=False)
    """Directories of the LoRA adapters that were loaded since the model was; a new process loads them, too."""

    @property
    def process(self) -> tuple[object, ...]:
        """Key that must be equal for instances that share a process."""
        instance = self.instance
        return self.shared, self.interpreter, instance.cores, instance.memory_node

    def start(self, name: str, arena: Arena, ask: Ask) -> tuple[ForkedProcess, WorkerChannel]:
        """Start a worker without a model. Blocks; not for the loop's thread. Raises ``NeriteError``."""
        process: ForkedProcess
        if self.threaded:
            try:
                process = WorkerThread(name, self.server_context.loop)
            except OSError as error:
                raise Internal(f"could not start a worker thread for '{name}': {system_error(error)}") from error
        else:
            instance = replace(self.instance, name=name)
            process = self.server_context.fork_server.spawn(instance, self.interpreter, self.environment)
        context = self.server_context
        return process, WorkerChannel(process, arena, context.foreign_segments, context.log, ask, context.devices)

    def order(self, seat: int) -> dict[str, Any]:
        """Return the LOAD message's JSON, with which a worker opens the model and makes the instance at ``seat``."""
        # the worker has a reporter and memory of its own
        instance = {name: value for name, value in asdict(self.instance).items() if name not in ("reporter", "pinned")}
        stay_awake = 0.0 if self.threaded else self.server_context.stay_awake
        more = {"adapters": self.adapters} if self.adapters else {}
        return write_context(self.backend, self.context, instance=instance, stay_awake=stay_awake, seat=seat, **more)

    def control_caller(self, *, loading: bool) -> ControlCaller:
        """Return the identity of the instance as the author of control calls."""
        return ControlCaller(self.context.name, self.context.version, self.instance.name, loading)


CLOSE_PATIENCE = 10.0
"""Seconds that a model has for ``finalize`` before its worker is killed."""
EXIT_PATIENCE = 1.0
"""Seconds to wait for the exit status of a worker after its channel closed."""


class HostedInstance(ModelInstance, Protocol):
    """An instance as its worker process sees it."""

    plan: WorkerPlan
    family: object
    """Equal for all instances of one model version: no two of them share a worker."""

    checks_readiness: bool
    """The model has a readiness check of its own."""
    can_sleep: bool
    """It can give the memory of its GPUs back while it has no requests."""

    def result(
        self,
        number: int,
        responses: Sequence[InferenceResponse | None],
        timings: ExecutionTimes,
        fused_runs: memoryview,
    ) -> None:
        """Take the result of a batch, and of the fused steps that followed it."""

    def response(
        self, number: int, index: int, response: InferenceResponse, final: bool, timings: ExecutionTimes
    ) -> None:
        """Take one of several responses to a request of a batch."""

    def reported(self, report: EngineReport) -> None:
        """Take a report of the instance's engine."""

    def batches(self) -> Sequence[tuple[int, Batch]]:
        """Return the batches that the worker has, with their numbers."""

    def batch_of(self, number: int) -> Batch | None:
        """Return a batch that the worker has."""

    def died(self, pid: int, ending: str) -> None:
        """React to the death of the process. ``usable`` is False already."""

    def restarted(self, pid: int) -> None:
        """Resume after the model was loaded again in a new process."""

    def failed(self, why: NeriteError, pause: float) -> None:
        """Record that loading it again failed, and the seconds until the next attempt."""


class RunningWorker(NamedTuple):
    """A process that is up, and what belongs to it."""

    process: ForkedProcess
    channel: WorkerChannel
    bls_server: BlsServer
    """Handles the models' calls to other models."""
    fused_paths: FusedPaths
    """Finds the fused steps that may follow a batch."""


class WorkerProcess:
    """A worker process, restarted when it ends unexpectedly, and its members, the instances in it.

    For the loop's thread only.
    """

    def __init__(self, plan: WorkerPlan, name: str, arena: Arena) -> None:
        """``plan`` is that of the first member: what it says of the process holds for all.

        ``arena`` takes the tensors that are not yet in memory that the process can map.
        """
        self.name = name
        self.on_end: Callable[[], None] = _nothing
        """Called when the last member has left."""
        self._plan = plan
        self._arena = arena
        self._server_context = plan.server_context
        self._loop = plan.server_context.loop
        self._members: dict[int, HostedInstance] = {}
        """By seat."""
        self._loading: dict[int, asyncio.Future[None]] = {}
        """By seat, the members whose model is being opened; some may have left meanwhile."""
        self._leaving: dict[int, Callable[[], None]] = {}
        self._running: RunningWorker | None = None
        self.metrics = ReportedMetrics()
        """Metrics that the models in this worker count themselves."""
        self._starting: asyncio.Task[None] | None = None
        self._backoff = ExponentialBackoff()
        self._pause = 0.0
        """Seconds until the next attempt to restore the members that lost their process."""
        self._restoring: asyncio.Task[None] | None = None
        self._exit_timer: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """Whether all members have left or are leaving: none can be added."""
        return self._leaving.keys() == self._members.keys()

    @property
    def members(self) -> Collection[HostedInstance]:
        """Instances in this worker."""
        return self._members.values()

    @property
    def running(self) -> RunningWorker:
        """The process, while it is up."""
        assert self._running is not None
        return self._running

    @property
    def process(self) -> tuple[int, float] | None:
        """Id and start time of the process; None while there is none."""
        return None if self._running is None else (self._running.process.pid, self._running.process.since)

    @property
    def memory(self) -> int:
        """Private memory of the process in bytes, divided by the number of members."""
        return 0 if self._running is None else self._running.process.memory // max(len(self._members), 1)

    async def admit(self, member: HostedInstance) -> int:
        """Add an instance, and return its seat once its model is open. Raises ``NeriteError``."""
        seat = next(seat for seat in range(messages.SEATS) if seat not in self._members and seat not in self._loading)
        self._members[seat] = member
        try:
            await self._load(seat, member)
        except BaseException:  # whatever it was: the seat must be freed
            self.evict(seat)
            raise
        self._changed()
        return seat

    def leave(self, seat: int, left: Callable[[], None]) -> None:
        """Finalize the model of an instance and remove it, then call ``left``. With the last member the process ends.

        If that takes too long the process is killed, and with it all its other members.
        """
        if self._running is None or not self._members[seat].usable:
            self.evict(seat)
            left()
            return
        process, channel, *_ = self._running
        self._leaving[seat] = left
        last = self.over
        patience = self._loop.call_later(CLOSE_PATIENCE, process.kill)

        def answered(_value: object, _error: NeriteError | None) -> None:
            # The last member has left when the process has ended: the end of the channel reports that.
            if not last:
                patience.cancel()
                self._left(seat)

        channel.request(messages.CLOSE, {"seat": seat, "last": last}, answered)
        process.resume()

    def kill(self, reason: str) -> None:
        """Kill the process, which is stuck. All members are restored in a new one."""
        if self._running is not None:
            self._running.process.kill(reason)

    def write_stacks(self) -> None:
        """Make the process write the stacks of its threads to its standard error, whatever it is doing."""
        if self._running is not None:
            self._running.process.write_stacks()

    def evict(self, seat: int) -> None:
        """Remove an instance at once, without waiting until its model is finalized."""
        member = self._members.pop(seat)
        self._changed()
        if not self._members:
            self._end()
        elif member.usable and self._running is not None:
            self._running.channel.request(messages.CLOSE, {"seat": seat, "last": False}, _ignored)

    # Messages from the process

    def _result(
        self,
        number: int,
        responses: Sequence[InferenceResponse | None],
        timings: ExecutionTimes,
        fused_runs: memoryview,
    ) -> None:
        member = self._members.get(number & messages.SEAT)
        if member is not None:
            member.result(number, responses, timings, fused_runs)

    def _response(
        self, number: int, index: int, response: InferenceResponse, final: bool, timings: ExecutionTimes
    ) -> None:
        member = self._members.get(number & messages.SEAT)
        if member is not None:
            member.response(number, index, response, final, timings)

    def _reported(self, seat: int, body: memoryview) -> None:
        member = self._members.get(seat)
        if member is not None:
            # A request may have reached the engine through another model in this worker: then its batch is that
            # model's.
            member.reported(messages.read_report(body, self._batch_of))

    def _batch_of(self, number: int) -> Batch | None:
        member = self._members.get(number & messages.SEAT)
        return None if member is None else member.batch_of(number)

    def _control_call(self, question: dict[str, Any], reply: Callable[[bytes], None]) -> None:
        if question["what"] == "contexts":
            for each in self.members:
                self.running.channel.send_contexts(each.batches())
            reply(messages.json_frame(messages.REPLY, {"number": question["number"], "value": None}))
            return
        seat = question["seat"]
        member = self._members.get(seat)
        if member is not None:
            self._server_context.control_calls.take(
                question, reply, member.plan.control_caller(loading=seat in self._loading)
            )

    # Start

    async def _load(self, seat: int, member: HostedInstance) -> None:
        """Open the model of an instance, and start the process if there is none. Raises ``NeriteError``."""
        with stage("start of workers"):
            await self._ensure_process()
        opened = self._loading[seat] = self._loop.create_future()

        def answered(value: Any, error: NeriteError | None) -> None:
            if opened.done():
                return
            if error is None:
                member.checks_readiness, member.can_sleep = value["checks_readiness"], value["can_sleep"]
                opened.set_result(None)
            else:
                opened.set_exception(error)

        self.running.channel.request(messages.LOAD, member.plan.order(seat), answered)
        try:
            with stage("initialize"):
                await opened
        finally:
            del self._loading[seat]

    async def _ensure_process(self) -> None:
        """Start the process unless it is up. Concurrent callers share one start. Raises ``NeriteError``."""
        if self._running is None:
            if self._starting is None:
                self._starting = self._loop.create_task(self._start())
            await asyncio.shield(self._starting)
            if self._running is None:
                raise Unavailable(f"'{self.name}' was unloaded during its start")

    async def _start(self) -> None:
        start = partial(self._plan.start, self.name, self._arena, self._control_call)
        try:
            process, channel = await self._server_context.blocking(start)
        finally:
            self._starting = None
        context = self._server_context
        tenants = context.tenant_admission.identifies
        bls_server = BlsServer(context.server, channel.answer, self._batch_of, tenants=tenants, devices=context.devices)
        fused_paths = FusedPaths(context.server, self._seat_of, channel.introduce)
        self._running = RunningWorker(process, channel, bls_server, fused_paths)
        channel.metrics = self.metrics
        channel.attach(self._loop, self._result, self._response, self._reported, self._ended, bls_server)
        if not self._members:  # all members that waited for it have left
            self._end()

    async def _restore(self) -> None:
        """Load the members that lost their process again, with backoff, until all have one."""
        while self._lost():
            await asyncio.sleep(self._pause)
            try:
                await self._load_lost()
            except Exception as error:  # retry: otherwise the members would never get a process again
                report("loop", error, f"while worker '{self.name}' was restarted")
                self._pause = self._backoff.failed(self._loop.time())
        self._restoring = None

    async def _load_lost(self) -> None:
        """Load the members that lost their process again, once each."""
        lost = self._lost()
        failures = [(seat, each, why) for seat, each in lost if (why := await self._load_again(seat, each))]
        if failures:
            self._pause = self._backoff.failed(self._loop.time())
            if not self._loading and not any(each.usable for each in self._members.values()):
                self._drop_process()  # the next attempt gets a new process
        for seat, each, why in failures:
            if self._members.get(seat) is each:
                each.failed(why, self._pause)

    def _lost(self) -> list[tuple[int, HostedInstance]]:
        return [(seat, each) for seat, each in self._members.items() if not each.usable and seat not in self._loading]

    async def _load_again(self, seat: int, member: HostedInstance) -> NeriteError | None:
        """Load a model again; return the error if that failed."""
        if self._members.get(seat) is not member:
            return None
        try:
            await self._load(seat, member)
        except NeriteError as error:
            return error.without_frames()
        except Exception as error:
            return report("loop", error, f"while worker '{self.name}' was restarted")
        if self._members.get(seat) is member:
            member.restarted(self.running.process.pid)
            self._changed()
        elif not self._members:
            self._end()
        elif self._running is not None:
            self._running.channel.request(messages.CLOSE, {"seat": seat, "last": False}, _ignored)
        return None

    # End

    def _ended(self) -> None:
        """Handle the end of the channel: wait briefly for the exit status, then restart."""
        process = self.running.process
        self.running.bls_server.close()
        for member in self._members.values():
            member.usable = False
        if process.exit_status is not None:
            self._restart()
            return
        process.on_exit = self._restart
        self._exit_timer = self._loop.call_later(EXIT_PATIENCE, self._restart)

    def _restart(self) -> None:
        process = self.running.process
        self._drop_process()
        self.metrics.process_ended()
        for seat in tuple(self._leaving):
            self._left(seat)
        lost = [each for seat, each in self._members.items() if seat not in self._loading]
        for opened in self._loading.values():
            if not opened.done():
                opened.set_exception(Unavailable(f"the worker process of '{process.name}' ended while loading"))
        if not self._members:
            self._end()
        if not lost:
            return
        self._pause = self._backoff.failed(self._loop.time())
        for member in lost:
            try:
                member.died(process.pid, process.ending)
            except Exception as error:  # the other members, and the next process, do not depend on it
                report("loop", error, f"while instance '{member.name}' was told that its worker is gone")
        if self._members and self._restoring is None:
            self._restoring = self._loop.create_task(self._restore())

    def _left(self, seat: int) -> None:
        del self._members[seat]
        self._changed()
        self._leaving.pop(seat)()

    def _changed(self) -> None:
        if self._running is not None:
            self._running.fused_paths.forget()

    def _seat_of(self, version: VersionHandle) -> int | None:
        """Return the seat of a usable instance of a version in this worker; None if it has none."""
        return next((seat for seat, each in self._members.items() if each in version.instances and each.usable), None)

    def _end(self) -> None:
        """Release everything: the last member has left."""
        self._drop_process()
        if self._restoring is not None:
            self._restoring.cancel()
        self.on_end()
        self.on_end = _nothing

    def _drop_process(self) -> None:
        """Kill the process, if there is one, and release what belongs to it."""
        running, self._running = self._running, None
        if self._exit_timer is not None:
            self._exit_timer.cancel()
            self._exit_timer = None
        if running is not None:
            running.process.on_exit = None
            running.process.kill()
            running.channel.close()


def _ignored(_value: object, _error: NeriteError | None) -> None:
    """Ignore a reply."""


def _nothing() -> None:
    """Do nothing."""


# Assignment of instances to workers: to one of its own, or to the worker that the model names.
#
# Models with the same ``WORKER`` parameter share processes: the first instances of all are in the first process, the
# second ones in the second. So tensors that pass from one model to the next can stay where they are. The models also
# share their fate: one that crashes takes the others with it, and all wait while one of them computes.

_PARAMETER: Final = "WORKER"
_log = logging.getLogger("nerite.execution")


def sharing_models(context: ModelContext) -> str:
    """Return the name of the worker that a model shares with others; empty if it has its own."""
    return context.parameter(_PARAMETER)


class WorkerPool:
    """The shared workers of a server. For the loop's thread only."""

    def __init__(self) -> None:
        self._shared: dict[tuple[object, ...], list[WorkerProcess]] = {}

    def home(self, plan: WorkerPlan, family: object) -> WorkerProcess:
        """Return the worker for an instance. No two instances of one ``family`` share a worker."""
        if not plan.shared:
            return WorkerProcess(plan, plan.instance.name, plan.arena)
        workers = self._shared.setdefault(plan.process, [])
        for worker in workers:
            if not worker.over and all(member.family is not family for member in worker.members):
                _log.info(
                    "'%s' shares the worker '%s' with %s",
                    plan.instance.name,
                    worker.name,
                    ", ".join(f"'{member.plan.instance.name}'" for member in worker.members),
                )
                return worker
        return self._new(plan, workers)

    def _new(self, plan: WorkerPlan, workers: list[WorkerProcess]) -> WorkerProcess:
        taken = {worker.name for worker in workers}
        name = next(name for number in range(len(taken) + 1) if (name := f"{plan.shared}_{number}") not in taken)
        arena = Arena()
        plan.server_context.foreign_segments.host(arena)
        worker = WorkerProcess(plan, name, arena)

        def ended() -> None:
            arena.close()
            workers.remove(worker)

        worker.on_end = ended
        workers.append(worker)
        return worker
