"""Measures a server at one level of load after the other."""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.shared_memory import SharedMemory
from time import perf_counter
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol

from google.protobuf.json_format import MessageToDict

from nerite.client import ClientError, ModelDescription, ModelStatistics, ModelVersion
from nerite.client.connection import Unreachable
from nerite.tools.bench.forms import BenchOutput, BenchTensor, RegionPlace, framed
from nerite.tools.bench.generator import Begin, End, Report, Take, run
from nerite.tools.bench.grpc_generator import GrpcClientCall, GrpcLine, header_block
from nerite.tools.bench.measurement import (
    BenchPlan,
    Figures,
    LoadLevel,
    Measurement,
    Objective,
    Records,
    Rule,
    Window,
    figures,
)
from nerite.wire import grpc_service

# The generators, each a process: they are told the same, and what they report is put together.

_PATIENCE = 10.0


class Taken(NamedTuple):
    """What all generators report."""

    records: Records
    spent: tuple[float, ...]
    """Seconds of processor time that each has used so far."""


class Fleet:
    """A context manager; the processes end with it."""

    def __init__(self, plan: BenchPlan, size: int = 1) -> None:
        self._plan = plan
        self._size = size
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Fleet:
        context = multiprocessing.get_context("spawn")
        for share in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run, args=(self._plan, share, self._size, theirs), name=f"bench {share}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()

    def begin(self, level: LoadLevel) -> None:
        """Put on a load."""
        self._tell(Begin(level))

    def take(self) -> Taken:
        """Return what has happened since the last time."""
        reports: list[Report] = self._tell(Take())
        return Taken(Records.joined([report.records for report in reports]), tuple(each.spent for each in reports))

    def end(self) -> None:
        """Take the load off."""
        self._tell(End())

    def _tell(self, command: object) -> list[Any]:
        """Send a command to all; return their answers."""
        try:
            for pipe in self._pipes:
                pipe.send(command)
            return [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError) as error:
            raise ClientError("a process that puts on the load has died") from error


_LOOK_SECONDS: Final = 0.1
BUSY: Final = 0.9
"""From this share of a processor on, a generator has no time to spare."""
LATE_SECONDS: Final = 0.001
"""A client that sends this much too late, at the 99th percentile, has not kept to its schedule."""

Count = Callable[[], ModelStatistics | None]


class ServerReading(NamedTuple):
    """What there is to tell while a level is measured."""

    level: LoadLevel
    warming_up: bool
    part: float
    """How much of the shortest possible measurement is done, from 0 to 1."""
    windows: int
    rate: float
    """Answers a second in the last window; 0 if there was none yet."""


@dataclass(frozen=True, slots=True)
class LevelOutcome:
    """What a level of load showed."""

    level: LoadLevel
    figures: Figures
    windows: tuple[Window, ...]
    """All of them; the figures are of the last few."""
    stable: bool
    server: ModelStatistics | None
    """What the server counted meanwhile."""
    busy: float
    """The share of a processor that the busiest generator used."""
    spent: float
    """Seconds of processor time that generators used for an answer."""

    @property
    def client_is_the_limit(self) -> bool:
        """Whether a faster client might have shown other figures."""
        return self.busy >= BUSY or (self.level.open and self.figures.lag["p99"] > LATE_SECONDS * 1e3)


class _Mark(NamedTuple):
    """What was counted at the end of a window."""

    moment: float
    spent: tuple[float, ...]
    server: ModelStatistics | None


class Session:
    """Has a fleet put on loads, and looks at what comes of them."""

    def __init__(
        self,
        fleet: Fleet,
        rule: Rule,
        warm_up: float,
        objectives: Sequence[Objective] = (),
        count: Count = lambda: None,
    ) -> None:
        self.fleet = fleet
        self.rule = rule
        self.warm_up = warm_up
        self.objectives = tuple(objectives)
        self.count = count

    def run(self, levels: Sequence[LoadLevel], tell: Callable[[ServerReading], None]) -> Iterator[LevelOutcome]:
        """Yield what each level showed. Raises ``ClientError`` for one at which no request was answered."""
        for level in levels:
            yield self.measure(level, tell)

    def measure(self, level: LoadLevel, tell: Callable[[ServerReading], None]) -> LevelOutcome:
        """Return what a level showed. Raises ``ClientError`` if no request was answered."""
        return together([self], level, tell)[0]


def together(
    sessions: Sequence[Session], level: LoadLevel, tell: Callable[[ServerReading], None]
) -> list[LevelOutcome]:
    """Put a load on by all sessions at once until each has measured; return what they saw. Raises as ``measure``."""
    begun: list[Session] = []
    try:
        for session in sessions:
            session.fleet.begin(level)
            begun.append(session)
        _warm_up(max(session.warm_up for session in sessions), level, tell)
        watches = [_Watch(session, level) for session in sessions]
        # Who is done keeps up its load, which the others are measured beside.
        while under_way := [watch for watch in watches if not watch.over]:
            time.sleep(_LOOK_SECONDS)
            tell(min((watch.look() for watch in under_way), key=lambda look: look.part))
        return [watch.outcome() for watch in watches]
    finally:
        for session in begun:
            session.fleet.end()


def _warm_up(seconds: float, level: LoadLevel, tell: Callable[[ServerReading], None]) -> None:
    began = perf_counter()
    while (passed := perf_counter() - began) < seconds:
        tell(ServerReading(level, True, passed / seconds, 0, 0.0))
        time.sleep(min(_LOOK_SECONDS, seconds - passed))


class _Watch:
    """What a session sees of a level."""

    def __init__(self, session: Session, level: LoadLevel) -> None:
        self._session = session
        self._level = level
        taken = session.fleet.take()
        now = perf_counter()
        self._measurement = Measurement(session.rule, now)
        # What ended between the two belongs to the first window.
        self._measurement.add(taken.records.split(now)[1], now)
        self._timings = [_Mark(now, taken.spent, session.count())]

    @property
    def over(self) -> bool:
        """Whether it has seen enough."""
        return self._measurement.over

    def look(self) -> ServerReading:
        """Take what there is; say how far it has come."""
        now = perf_counter()
        taken = self._session.fleet.take()
        measurement = self._measurement
        if measurement.add(taken.records, now):
            self._timings.append(_Mark(now, taken.spent, self._session.count()))
        rate = measurement.windows[-1].rate if measurement.windows else 0.0
        return ServerReading(self._level, False, measurement.progress(now), len(measurement.windows), rate)

    def outcome(self) -> LevelOutcome:
        """Return what it showed. Raises ``ClientError`` if no request was answered."""
        measurement = self._measurement
        found = figures(measurement.last, self._session.objectives)
        if found is None:
            reasons = [f"{count} x {text}" for text, count in measurement.failures.most_common(3)]
            raise ClientError("\n    ".join([f"no request was answered at {self._level}", *reasons]))
        first, last = self._timings[-len(measurement.last) - 1], self._timings[-1]
        spent = [after - before for before, after in zip(first.spent, last.spent, strict=True)]
        return LevelOutcome(
            level=self._level,
            figures=found,
            windows=tuple(measurement.windows),
            stable=measurement.stable,
            server=last.server.since(first.server) if last.server is not None else None,
            busy=max(spent) / (last.moment - first.moment),
            spent=sum(spent) / found.answered,
        )


# The highest load within a limit of the latency: what to measure next, and what has been found.

KEPT_UP: Final = 0.95
"""A server that answers less than this share of what it is asked has not kept up."""
_PRECISE: Final = 1.05
"""The search ends when the loads on both sides of the limit are no further apart than by this factor."""


@dataclass(frozen=True, slots=True)
class LatencyLimit:
    """How long answers may take."""

    measure: str
    """A quantile, as figures name it, or ``mean``."""
    milliseconds: float

    def met_by(self, outcome: LevelOutcome) -> bool:
        """Say whether a load was within it: answered in time, without failures, and as fast as it came."""
        figures, level = outcome.figures, outcome.level
        latency = figures.latency.mean if self.measure == "mean" else figures.latency[self.measure]
        kept_up = not level.open or figures.rate >= KEPT_UP * level.rate
        return latency <= self.milliseconds and kept_up and not figures.failed

    def __str__(self) -> str:
        return f"{self.measure} of at most {self.milliseconds:g} ms"


class Search:
    """Measures the lowest and the highest load, and then between the two sides of the limit. It is told what came."""

    def __init__(self, limit: LatencyLimit, lowest: LoadLevel, highest: LoadLevel) -> None:
        self.limit = limit
        self.best: LevelOutcome | None = None
        """Of the highest load so far that was within the limit."""
        self.next: LoadLevel | None = lowest
        """What to measure; None when it is over."""
        self._highest = highest
        self._beyond: LoadLevel | None = None

    def add(self, outcome: LevelOutcome) -> None:
        """Go on from what the load ``next`` showed."""
        level = outcome.level
        if self.limit.met_by(outcome):
            self.best = outcome
        else:
            self._beyond = level
        if self.best is None or self.best.level.value >= self._highest.value:
            self.next = None
        elif self._beyond is None:
            self.next = self._highest
        else:
            self.next = self._between(self.best.level, self._beyond)

    @staticmethod
    def _between(within: LoadLevel, beyond: LoadLevel) -> LoadLevel | None:
        # Loads differ by factors, and not by steps, in what they do to a server.
        middle = math.sqrt(within.value * beyond.value)
        if beyond.value <= within.value * _PRECISE:
            return None
        if within.open:
            return LoadLevel(rate=float(f"{middle:.3g}"), arrivals=within.arrivals)
        count = min(max(round(middle), within.concurrency + 1), beyond.concurrency - 1)
        return LoadLevel(concurrency=count) if count > within.concurrency else None


# The server that is measured, as one asks it before and after: its models, its counts, its view of shared memory.

_PREFIX: Final = 5


class BenchedServer(Protocol):
    """What a ``Client`` does over HTTP. Every method raises ``ClientError`` where the server does not do as asked."""

    def model(self, name: str, version: str = "") -> ModelDescription:
        """Return the metadata of a model."""

    def config(self, name: str, version: str = "") -> Mapping[str, Any]:
        """Return the configuration of a model."""

    def models(self) -> list[ModelVersion]:
        """Return what there is."""

    def statistics(self, model: str = "", version: str = "") -> list[ModelStatistics]:
        """Return what the server has counted of each version."""

    def register_shared_memory(self, region: str, key: str, size: int) -> None:
        """Have the server know a region of shared memory."""

    def unregister_shared_memory(self, region: str) -> None:
        """Have the server forget it."""


class GrpcServer:
    """The same over gRPC."""

    def __init__(self, plan: BenchPlan) -> None:
        self._plan = plan

    def model(self, name: str, version: str = "") -> ModelDescription:
        """Return the metadata of a model."""
        return ModelDescription.read(self._ask("ModelMetadata", name=name, version=version))

    def config(self, name: str, version: str = "") -> Mapping[str, Any]:
        """Return the configuration of a model."""
        config: Mapping[str, Any] = self._ask("ModelConfig", name=name, version=version)["config"]
        return config

    def models(self) -> list[ModelVersion]:
        """Return what there is."""
        return [ModelVersion.read(entry) for entry in self._ask("RepositoryIndex").get("models", ())]

    def statistics(self, model: str = "", version: str = "") -> list[ModelStatistics]:
        """Return what the server has counted of each version."""
        document = self._ask("ModelStatistics", name=model, version=version)
        return [ModelStatistics.read(entry) for entry in document.get("model_stats", ())]

    def register_shared_memory(self, region: str, key: str, size: int) -> None:
        """Have the server know a region of shared memory."""
        self._ask("SystemSharedMemoryRegister", name=region, key=key, offset=0, byte_size=size)

    def unregister_shared_memory(self, region: str) -> None:
        """Have the server forget it."""
        self._ask("SystemSharedMemoryUnregister", name=region)

    def _ask(self, method: str, **fields: Any) -> dict[str, Any]:
        request = getattr(grpc_service, f"{method}Request")(**fields)
        response = getattr(grpc_service, f"{method}Response")
        received = asyncio.run(self._call(method, framed(request.SerializeToString())))
        # Numbers of 64 bits become texts here, which those who read them know.
        return MessageToDict(response.FromString(received[_PREFIX:]), preserving_proto_field_name=True)

    async def _call(self, method: str, message: bytes) -> bytes:
        plan = self._plan
        line = GrpcLine(plan.address, plan.context(), header_block(plan.address, method, plan.headers))
        call = _Answer()
        line.open(call, message, last=True)
        try:
            return await asyncio.wait_for(call.whole, plan.timeout)
        except TimeoutError:
            raise ClientError(f"no answer from {plan.address} in {plan.timeout:g} seconds") from None
        finally:
            line.close()


class _Answer(GrpcClientCall):
    """A call whose answer is awaited."""

    def __init__(self) -> None:
        super().__init__(reads=True)
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._received = bytearray()

    def received(self, data: bytes) -> None:
        """Keep it."""
        self._received += data

    def ended(self, reason: str) -> None:
        """Hand it over, or raise what is wrong where it is awaited."""
        if self.whole.done():
            return
        if reason:
            unreachable = reason.startswith("cannot reach")
            self.whole.set_exception(Unreachable(reason) if unreachable else ClientError(reason))
        else:
            self.whole.set_result(bytes(self._received))


# Tensors in system shared memory: inputs that are written once, and room for outputs.

_ALIGNMENT: Final = 64
_numbers = itertools.count()


class BenchRegions:
    """The regions of a measurement. A context manager: the server forgets them, and they are gone, at its end."""

    def __init__(self, server: BenchedServer) -> None:
        self._server = server
        self._held: list[SharedMemory] = []
        self._registered: list[str] = []

    def __enter__(self) -> BenchRegions:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for memory in self._held:
            memory.close()
            memory.unlink()
        # Where the server has gone, there is nothing to forget.
        with suppress(Unreachable):
            for region in self._registered:
                self._server.unregister_shared_memory(region)

    def inputs(self, tensors: Sequence[BenchTensor]) -> tuple[BenchTensor, ...]:
        """Put the data of tensors into a region of their own; return the tensors that say where they are."""
        sizes = [len(tensor.data) for tensor in tensors if not isinstance(tensor.data, RegionPlace)]
        memory = self._new(sum(map(_aligned, sizes)))
        placed, at = [], 0
        for tensor in tensors:
            if isinstance(tensor.data, RegionPlace):
                placed.append(tensor)
                continue
            size = len(tensor.data)
            assert memory.buf is not None
            memory.buf[at : at + size] = tensor.data
            placed.append(BenchTensor(tensor.name, tensor.datatype, tensor.shape, RegionPlace(memory.name, size, at)))
            at += _aligned(size)
        return tuple(placed)

    def outputs(self, names: Sequence[str], size: int) -> tuple[BenchOutput, ...]:
        """Return outputs with room for ``size`` bytes each. Nobody reads them, so all requests may share them."""
        memory = self._new(len(names) * _aligned(size))
        return tuple(
            BenchOutput(name, RegionPlace(memory.name, size, at * _aligned(size))) for at, name in enumerate(names)
        )

    def _new(self, size: int) -> SharedMemory:
        memory = SharedMemory(f"nerite-bench-{os.getpid()}-{next(_numbers)}", create=True, size=max(size, 1))
        self._held.append(memory)
        self._server.register_shared_memory(memory.name, f"/{memory.name}", memory.size)
        self._registered.append(memory.name)
        return memory


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
