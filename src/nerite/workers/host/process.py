"""A worker process, and the instances that live in it: one, or one of each of several models that share it.

A death takes all that live there. Then there is a new process, at once after the first death and after a growing pause
later on, and everybody moves in again. One whose model cannot be loaded is tried again in the same way; the others do
not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.engine_report import EngineReport
from nerite.core.errors import NeriteError, Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.failures import report
from nerite.core.response import InferenceResponse
from nerite.dispatch.interface import VersionHandle
from nerite.instances.instance import Batch, ModelInstance
from nerite.observability.custom_metrics import ReportedMetrics
from nerite.observability.load_times import stage
from nerite.scheduling.stall_detectors import ExponentialBackoff
from nerite.workers.child.worker import write_context
from nerite.workers.host.bls import BlsServer, ControlCaller
from nerite.workers.host.channel import Ask, WorkerChannel
from nerite.workers.host.fork_server import ForkedProcess
from nerite.workers.host.fused import FusedPaths
from nerite.workers.host.server_context import ServerContext
from nerite.workers.ipc import messages
from nerite.workers.ipc.messages import FusedBatch
from nerite.workers.ipc.shared_memory import Arena

# What it takes to make the worker of an instance.


@dataclass(frozen=True)
class WorkerPlan:
    """Everything it takes to make the worker of one instance, again and again."""

    backend: str
    context: ModelContext
    instance: InstanceContext
    interpreter: Path | None
    environment: Mapping[str, str]
    arena: Arena
    server_context: ServerContext
    shared: str = ""
    """The name of a worker in which models live together; empty for one of the instance's own."""

    @property
    def process(self) -> tuple[object, ...]:
        """What has to be equal of those who live in one process."""
        instance = self.instance
        return self.shared, self.interpreter, instance.cores, instance.memory_node

    def start(self, name: str, arena: Arena, ask: Ask) -> tuple[ForkedProcess, WorkerChannel]:
        """Make a worker, without a model yet. Blocks; not for the loop's thread. Raises ``NeriteError``."""
        instance = replace(self.instance, name=name)
        process = self.server_context.fork_server.spawn(instance, self.interpreter, self.environment)
        return process, WorkerChannel(
            process, arena, self.server_context.foreign_segments, self.server_context.log, ask
        )

    def order(self, seat: int) -> dict[str, Any]:
        """Return what a worker is told to open the model, and to make the instance, at this seat."""
        # The worker has a reporter of its own.
        instance = {name: value for name, value in asdict(self.instance).items() if name != "reporter"}
        stay_awake = self.server_context.stay_awake
        return write_context(self.backend, self.context, instance=instance, stay_awake=stay_awake, seat=seat)

    def control_caller(self, *, loading: bool) -> ControlCaller:
        """Return who asks, where the instance does."""
        return ControlCaller(self.context.name, self.context.version, self.instance.name, loading)


CLOSE_PATIENCE = 10.0
"""Seconds that a model has for ``finalize`` before its worker is killed."""
EXIT_PATIENCE = 1.0
"""Seconds to wait for the news of how a worker ended, after its channel closed."""


class HostedInstance(ModelInstance, Protocol):
    """An instance, as its household sees it."""

    plan: WorkerPlan
    family: object
    """What the instances of one model version have in common: no two of them live together."""

    checks_readiness: bool
    """The model has a check of its own of whether it can serve."""

    def result(
        self,
        number: int,
        responses: Sequence[InferenceResponse | None],
        timings: ExecutionTimes,
        along: FusedBatch | None,
    ) -> None:
        """Take what a batch returned, and what became of it where others could follow."""

    def response(
        self, number: int, index: int, response: InferenceResponse, final: bool, timings: ExecutionTimes
    ) -> None:
        """Take one of several responses to a request of a batch."""

    def reported(self, report: EngineReport) -> None:
        """Take what the engine says that the instance has."""

    def batches(self) -> Sequence[tuple[int, Batch]]:
        """Return the batches that the worker has, with their numbers."""

    def batch_of(self, number: int) -> Batch | None:
        """Return the requests of a batch that the worker has."""

    def died(self, pid: int, ending: str) -> None:
        """Take note that the process is gone, and how it ended. It is not usable already."""

    def moved_in(self, pid: int) -> None:
        """Take note that the model is loaded again, in a new process."""

    def failed(self, why: NeriteError, pause: float) -> None:
        """Take note that it could not be loaded again, and when the next attempt will be."""


class WorkerProcess:
    """For the loop's thread only."""

    def __init__(self, plan: WorkerPlan, name: str, arena: Arena) -> None:
        """``plan`` is that of the first who will live here: what it says of the process holds for all.

        ``arena`` is where tensors are put that are in no memory yet which the process could map.
        """
        self.name = name
        self.on_end: Callable[[], None] = _nothing
        """Called when the last one has left."""
        self._plan = plan
        self._arena = arena
        self._server_context = plan.server_context
        self._loop = plan.server_context.loop
        self._members: dict[int, HostedInstance] = {}
        """By seat."""
        self._loading: dict[int, asyncio.Future[None]] = {}
        """By seat, those whose model is being opened; some may have left meanwhile."""
        self._leaving: dict[int, Callable[[], None]] = {}
        self._process: ForkedProcess | None = None
        self._channel: WorkerChannel | None = None
        self._bls_server: BlsServer | None = None
        self._ways: FusedPaths | None = None
        self.ways: FusedPaths | None = None
        """What batches may go on to here; None where there is nothing."""
        self.metrics = ReportedMetrics()
        """What the models who live here count themselves."""
        self._starting: asyncio.Task[None] | None = None
        self._backoff = ExponentialBackoff()
        self._pause = 0.0
        """Seconds until the next attempt to bring back who has lost the process."""
        self._restoring: asyncio.Task[None] | None = None
        self._burial: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """Nobody lives here any more, or will soon: there is no moving in."""
        return self._leaving.keys() == self._members.keys()

    @property
    def members(self) -> Collection[HostedInstance]:
        """Those who live here."""
        return self._members.values()

    @property
    def channel(self) -> WorkerChannel:
        """The way to the process, while it is up."""
        assert self._channel is not None
        return self._channel

    @property
    def bls_server(self) -> BlsServer:
        """Where the calls of the models arrive, while the process is up."""
        assert self._bls_server is not None
        return self._bls_server

    @property
    def process(self) -> tuple[int, float] | None:
        """The number of the process, and when it began; None while there is none."""
        return None if self._process is None else (self._process.pid, self._process.since)

    @property
    def memory(self) -> int:
        """Bytes that the process has for itself now: the part of one of those that live there."""
        return 0 if self._process is None else self._process.memory // max(len(self._members), 1)

    async def admit(self, member: HostedInstance) -> int:
        """Have an instance live here, and return its seat: its model is open then. Raises ``NeriteError``."""
        seat = next(seat for seat in range(messages.SEATS) if seat not in self._members and seat not in self._loading)
        self._members[seat] = member
        try:
            await self._load(seat, member)
        except BaseException:  # whatever it was: nobody may be left behind
            self.evict(seat)
            raise
        self._changed()
        return seat

    def leave(self, seat: int, left: Callable[[], None]) -> None:
        """Have the model of an instance finalized, and call ``left``. With the last one the process ends.

        If that takes too long the process is killed, and with it all others that live there.
        """
        if self._channel is None or not self._members[seat].usable:
            self.evict(seat)
            left()
            return
        process = self._process
        assert process is not None
        self._leaving[seat] = left
        last = self.over
        patience = self._loop.call_later(CLOSE_PATIENCE, process.kill)

        def answered(_value: object, _error: NeriteError | None) -> None:
            # The last one has left when the process has: the end of the channel tells.
            if not last:
                patience.cancel()
                self._left(seat)

        self._channel.request(messages.CLOSE, {"seat": seat, "last": last}, answered)
        process.resume()

    def kill(self, reason: str) -> None:
        """End the process, which does not go on by itself. Everybody moves into a new one."""
        if self._process is not None:
            self._process.kill(reason)

    def write_stacks(self) -> None:
        """Have the process write the stacks of its threads to its standard error, whatever it is at."""
        if self._process is not None:
            self._process.write_stacks()

    def evict(self, seat: int) -> None:
        """Have an instance live here no more, at once. Nobody waits until its model is finalized, or is told of it."""
        member = self._members.pop(seat)
        self._changed()
        if not self._members:
            self._end()
        elif member.usable and self._channel is not None:
            self._channel.request(messages.CLOSE, {"seat": seat, "last": False}, _ignored)

    # What comes from the process

    def _result(
        self,
        number: int,
        responses: Sequence[InferenceResponse | None],
        timings: ExecutionTimes,
        along: FusedBatch | None,
    ) -> None:
        member = self._members.get(number & messages.SEAT)
        if member is not None:
            member.result(number, responses, timings, along)

    def _response(
        self, number: int, index: int, response: InferenceResponse, final: bool, timings: ExecutionTimes
    ) -> None:
        member = self._members.get(number & messages.SEAT)
        if member is not None:
            member.response(number, index, response, final, timings)

    def _reported(self, seat: int, body: memoryview) -> None:
        member = self._members.get(seat)
        if member is not None:
            # A request may have come to the engine from another model here: its batch is that one's.
            member.reported(messages.read_report(body, self._batch_of))

    def _batch_of(self, number: int) -> Batch | None:
        member = self._members.get(number & messages.SEAT)
        return None if member is None else member.batch_of(number)

    def _asked(self, question: dict[str, Any], reply: Callable[[bytes], None]) -> None:
        if question["what"] == "contexts":
            for each in self.members:
                self.channel.tell_contexts(each.batches())
            reply(messages.json_frame(messages.TOLD, {"number": question["number"], "value": None}))
            return
        seat = question["seat"]
        member = self._members.get(seat)
        if member is not None:
            self._server_context.control_calls.take(
                question, reply, member.plan.control_caller(loading=seat in self._loading)
            )

    # Coming up

    async def _load(self, seat: int, member: HostedInstance) -> None:
        """Open the model of an instance, in a process that is made if there is none. Raises ``NeriteError``."""
        with stage("start of workers"):
            await self._up()
        assert self._channel is not None
        opened = self._loading[seat] = self._loop.create_future()

        def answered(value: Any, error: NeriteError | None) -> None:
            if opened.done():
                return
            if error is None:
                member.checks_readiness = value["checks_readiness"]
                opened.set_result(None)
            else:
                opened.set_exception(error)

        self._channel.request(messages.LOAD, member.plan.order(seat), answered)
        try:
            with stage("initialize"):
                await opened
        finally:
            del self._loading[seat]

    async def _up(self) -> None:
        """Have a process. All who want one at the same time get the same. Raises ``NeriteError``."""
        if self._channel is None:
            if self._starting is None:
                self._starting = self._loop.create_task(self._start())
            await asyncio.shield(self._starting)
            if self._channel is None:
                raise Unavailable(f"'{self.name}' is not wanted any more")

    async def _start(self) -> None:
        start = partial(self._plan.start, self.name, self._arena, self._asked)
        try:
            process, channel = await self._server_context.blocking(start)
        finally:
            self._starting = None
        bls_server = BlsServer(
            self._server_context.server, channel, self._batch_of, tenants=self._server_context.tenant_admission.in_force
        )
        self._process, self._channel, self._bls_server = process, channel, bls_server
        self._ways = FusedPaths(self._server_context.server, channel, self._seat_of)
        channel.metrics = self.metrics
        channel.attach(self._loop, self._result, self._response, self._reported, self._ended, bls_server)
        if not self._members:  # all who waited for it have left
            self._end()

    async def _restore(self) -> None:
        """Bring back those who lost their process, again and again, until nobody is left to be brought back."""
        while self._lost():
            await asyncio.sleep(self._pause)
            lost = self._lost()
            failures = [(seat, each, why) for seat, each in lost if (why := await self._brought_back(seat, each))]
            if failures:
                self._pause = self._backoff.failed(self._loop.time())
                if not self._loading and not any(each.usable for each in self._members.values()):
                    self._drop()  # the next attempt has a fresh one
            for seat, each, why in failures:
                if self._members.get(seat) is each:
                    each.failed(why, self._pause)
        self._restoring = None

    def _lost(self) -> list[tuple[int, HostedInstance]]:
        return [(seat, each) for seat, each in self._members.items() if not each.usable and seat not in self._loading]

    async def _brought_back(self, seat: int, member: HostedInstance) -> NeriteError | None:
        """Load a model again; return why that failed, if it did."""
        if self._members.get(seat) is not member:
            return None
        try:
            await self._load(seat, member)
        except NeriteError as error:
            return error.without_frames()
        except Exception as error:
            return report("loop", error, f"when worker '{self.name}' was to be made again")
        if self._members.get(seat) is member:
            assert self._process is not None
            member.moved_in(self._process.pid)
            self._changed()
        elif not self._members:
            self._end()
        elif self._channel is not None:
            self._channel.request(messages.CLOSE, {"seat": seat, "last": False}, _ignored)
        return None

    # Going down

    def _ended(self) -> None:
        """The channel is closed. Wait a moment for the news of how the process ended, then draw the conclusions."""
        process = self._process
        assert process is not None
        self.bls_server.close()
        for member in self._members.values():
            member.usable = False
        if process.exit_status is not None:
            self._bury()
            return
        process.on_exit = self._bury
        self._burial = self._loop.call_later(EXIT_PATIENCE, self._bury)

    def _bury(self) -> None:
        process = self._process
        assert process is not None
        self._drop()
        self.metrics.process_ended()
        for seat in tuple(self._leaving):
            self._left(seat)
        mourners = [each for seat, each in self._members.items() if seat not in self._loading]
        for opened in self._loading.values():
            if not opened.done():
                opened.set_exception(Unavailable(f"the worker process of '{process.name}' ended while loading"))
        if not self._members:
            self._end()
        if not mourners:
            return
        self._pause = self._backoff.failed(self._loop.time())
        for member in mourners:
            member.died(process.pid, process.ending)
        if self._members and self._restoring is None:
            self._restoring = self._loop.create_task(self._restore())

    def _left(self, seat: int) -> None:
        del self._members[seat]
        self._changed()
        self._leaving.pop(seat)()

    def _changed(self) -> None:
        if self._ways is not None:
            self._ways.forget()
        self.ways = self._ways if len(self._members) > 1 else None

    def _seat_of(self, version: VersionHandle) -> int | None:
        """Return where an instance of a version lives here, if one does and can be used."""
        return next((seat for seat, each in self._members.items() if each in version.instances and each.usable), None)

    def _end(self) -> None:
        """Give everything back: nobody lives here any more."""
        self._drop()
        if self._restoring is not None:
            self._restoring.cancel()
        self.on_end()
        self.on_end = _nothing

    def _drop(self) -> None:
        """Let go of the process, if there is one."""
        process, channel = self._process, self._channel
        self._process = self._channel = self._bls_server = self._ways = self.ways = None
        if self._burial is not None:
            self._burial.cancel()
            self._burial = None
        if process is not None and channel is not None:
            process.on_exit = None
            process.kill()
            channel.close()


def _ignored(_value: object, _error: NeriteError | None) -> None:
    """Take no note of an answer."""


def _nothing() -> None:
    """Do nothing."""


# Which worker process an instance lives in: one of its own, or that of the worker which its model names.
#
# Models with the same ``WORKER`` parameter share a process: the first instance of each is in the first one, the
# second in the second. So what goes from one of them to the next can stay where it is. They also share their fate:
# one that crashes takes the others along, and all wait while one of them computes.

_PARAMETER: Final = "WORKER"
_log = logging.getLogger("nerite.execution")


def sharing_models(context: ModelContext) -> str:
    """Return the name of the worker that a model shares with others; nothing for one that does not."""
    return context.parameter(_PARAMETER)


class WorkerPool:
    """Those of the server. For the loop's thread only."""

    def __init__(self) -> None:
        self._shared: dict[tuple[object, ...], list[WorkerProcess]] = {}

    def home(self, plan: WorkerPlan, family: object) -> WorkerProcess:
        """Return where an instance is to live. No two of one ``family`` live together."""
        if not plan.shared:
            return WorkerProcess(plan, plan.instance.name, plan.arena)
        homes = self._shared.setdefault(plan.process, [])
        for home in homes:
            if not home.over and all(member.family is not family for member in home.members):
                _log.info(
                    "'%s' lives in the worker '%s', with %s",
                    plan.instance.name,
                    home.name,
                    ", ".join(f"'{member.plan.instance.name}'" for member in home.members),
                )
                return home
        return self._new(plan, homes)

    def _new(self, plan: WorkerPlan, homes: list[WorkerProcess]) -> WorkerProcess:
        taken = {home.name for home in homes}
        name = next(name for number in range(len(taken) + 1) if (name := f"{plan.shared}_{number}") not in taken)
        arena = Arena()
        plan.server_context.foreign_segments.host(arena)
        home = WorkerProcess(plan, name, arena)

        def ended() -> None:
            arena.close()
            homes.remove(home)

        home.on_end = ended
        homes.append(home)
        return home
