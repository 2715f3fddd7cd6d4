"""Measurement of a server: controls the generator processes, measures levels of load, and searches for a limit."""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.shared_memory import SharedMemory
from time import perf_counter
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf.json_format import MessageToDict

from nerite.client import Client, ClientError, ModelDescription, ModelStatistics, ModelVersion
from nerite.client.connection import Unreachable
from nerite.tools.bench.forms import BenchOutput, BenchTensor, RegionPlace, framed
from nerite.tools.bench.generator import Begin, End, Report, Take, run
from nerite.tools.bench.grpc_generator import GrpcClientCall, GrpcLine, header_block
from nerite.tools.bench.http_generator import Totals
from nerite.tools.bench.measurement import (
    AGREEING,
    BenchPlan,
    BenchTarget,
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

_PATIENCE = 10.0


class SessionReport(NamedTuple):
    """Combined report of all generators."""

    records: Records
    spent: tuple[float, ...]
    """Seconds of processor time that each generator has used so far."""
    done: bool
    """True if the load has an end, and all generators have reached it."""


class Fleet:
    """The generator processes. A context manager that starts and ends them."""

    def __init__(self, plan: BenchPlan, size: int = 1) -> None:
        self.plan = plan
        self._size = size
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Fleet:
        context = multiprocessing.get_context("spawn")
        for share in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run, args=(self.plan, share, self._size, theirs), name=f"bench {share}", daemon=True
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
        """Start a load."""
        self._command(Begin(level))

    def take(self) -> SessionReport:
        """Return the records since the last call."""
        reports: list[Report] = self._command(Take())
        records = Records.joined([report.records for report in reports])
        return SessionReport(records, tuple(each.spent for each in reports), all(each.done for each in reports))

    def end(self) -> Totals:
        """Stop the load; return the counts of all its requests."""
        totals: list[Totals] = self._command(End())
        return Totals(*map(sum, zip(*totals, strict=True)))

    def _command(self, command: object) -> list[Any]:
        """Send a command to all generators; return their replies."""
        try:
            for pipe in self._pipes:
                pipe.send(command)
            return [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError) as error:
            raise ClientError("a load generator process ended unexpectedly") from error


_POLL_SECONDS: Final = 0.1
BUSY: Final = 0.9
"""CPU utilisation above which a generator counts as saturated."""
LATE_SECONDS: Final = 0.001
"""99th percentile of the sending delay above which the client counts as behind its schedule."""

Count = Callable[[], ModelStatistics | None]
CountCancelled = Callable[[], float | None]
"""Returns how many requests the server has seen given up by clients, or None if it does not tell."""
_COUNTING_SECONDS: Final = 3.0
"""How long to wait until the server has counted the cancellations."""


class ServerReading(NamedTuple):
    """Progress of the measurement of a level."""

    level: LoadLevel
    warming_up: bool
    part: float
    """Completed fraction of the shortest possible measurement, from 0 to 1."""
    windows: int
    rate: float
    """Answers per second in the last window; 0 before the first window has ended."""


_NO_TOTALS: Final = Totals()


@dataclass(frozen=True, slots=True)
class LevelOutcome:
    """Result of a level of load."""

    level: LoadLevel
    figures: Figures
    windows: tuple[Window, ...]
    """All windows; the figures are computed over the last few."""
    stable: bool
    server: ModelStatistics | None
    """Statistics of the server over the same time."""
    busy: float
    """CPU utilisation of the busiest generator, from 0 to 1."""
    spent: float
    """Processor time of the generators per answer, in seconds."""
    objectives: tuple[Objective, ...] = ()
    counted: int = AGREEING
    """Number of windows, the last ones, that the figures are computed over."""
    conversations: bool = False
    """Requests have several turns."""
    models: tuple[str, ...] = ()
    """Names of the models and adapters that ``figures.parts`` counts."""
    whole: bool = False
    """The load had an end, and all of it was measured."""
    totals: Totals = _NO_TOTALS
    """Counts of all requests of the level, whether measured or not."""
    server_cancelled: float | None = None
    """Cancellations that the server has counted meanwhile; None if it does not tell."""

    @property
    def kept_up(self) -> bool:
        """True unless requests arrive faster than they are answered.

        A load that had an end was answered. Of conversations it is not known: their later turns come after a while.
        """
        if not self.level.open or self.whole or self.conversations:
            return True
        figures = self.figures
        return figures.rate + figures.cancelled / figures.seconds >= KEPT_UP * self.level.rate

    @property
    def client_is_the_limit(self) -> bool:
        """True if the client may have been the bottleneck."""
        return self.busy >= BUSY or (self.level.open and self.figures.lag["p99"] > LATE_SECONDS * 1e3)


class _Mark(NamedTuple):
    """Counters at the end of a window."""

    moment: float
    spent: tuple[float, ...]
    server: ModelStatistics | None


class Session:
    """Measures levels of load with a fleet of generators."""

    def __init__(
        self,
        fleet: Fleet,
        rule: Rule,
        warm_up: float,
        objectives: Sequence[Objective] = (),
        count: Count = lambda: None,
        count_cancelled: CountCancelled = lambda: None,
    ) -> None:
        self.fleet = fleet
        # A load that has an end is measured from its first request.
        self.rule = replace(rule, whole=True) if fleet.plan.finite else rule
        self.warm_up = 0.0 if fleet.plan.finite else warm_up + fleet.plan.ramp
        self.objectives = tuple(objectives)
        self.count = count
        self.count_cancelled = count_cancelled

    def measure(self, level: LoadLevel, tell: Callable[[ServerReading], None]) -> LevelOutcome:
        """Return the outcome of a level. Raises ``ClientError`` if no request was answered."""
        return together([self], level, tell)[0]


def together(
    sessions: Sequence[Session], level: LoadLevel, tell: Callable[[ServerReading], None]
) -> list[LevelOutcome]:
    """Run the load of all sessions concurrently until each has measured; return their outcomes.

    Raises what ``measure`` raises.
    """
    begun: list[Session] = []
    cancelled = [session.count_cancelled() for session in sessions]
    # Loads that have an end are measured from their first request, so before they begin.
    observers = {id(session): _LevelObserver(session, level) for session in sessions if session.rule.whole}
    try:
        for session in sessions:
            session.fleet.begin(level)
            begun.append(session)
        _warm_up(max(session.warm_up for session in sessions), level, tell)
        observers |= {id(session): _LevelObserver(session, level) for session in sessions if not session.rule.whole}
        # Finished sessions keep up their load, because it is part of the conditions of the others.
        while unfinished := [observer for observer in observers.values() if not observer.over]:
            time.sleep(_POLL_SECONDS)
            tell(min((observer.poll() for observer in unfinished), key=lambda reading: reading.part))
    except BaseException:
        for session in begun:
            session.fleet.end()
        raise
    totals = [session.fleet.end() for session in begun]
    outcomes = [observers[id(session)].outcome() for session in sessions]
    return [
        replace(outcome, totals=total, server_cancelled=_cancelled_since(before, session, total))
        for outcome, total, session, before in zip(outcomes, totals, sessions, cancelled, strict=True)
    ]


def _cancelled_since(before: float | None, session: Session, totals: Totals) -> float | None:
    """Return the cancellations that the server has counted, once it has counted all or some time has passed."""
    until = perf_counter() + _COUNTING_SECONDS
    while before is not None and (now := session.count_cancelled()) is not None:
        if now - before >= totals.cancelled + totals.unfinished or perf_counter() > until:
            return now - before
        time.sleep(_POLL_SECONDS)
    return None


def _warm_up(seconds: float, level: LoadLevel, tell: Callable[[ServerReading], None]) -> None:
    began = perf_counter()
    while (passed := perf_counter() - began) < seconds:
        tell(ServerReading(level, True, passed / seconds, 0, 0.0))
        time.sleep(min(_POLL_SECONDS, seconds - passed))


class _LevelObserver:
    """Collects the records of one session at one level."""

    def __init__(self, session: Session, level: LoadLevel) -> None:
        self._session = session
        self._level = level
        taken = session.fleet.take()
        now = perf_counter()
        self._measurement = Measurement(session.rule, now)
        # Requests that ended after ``now`` belong to the first window.
        self._measurement.add(taken.records.split(now)[1], now)
        self._marks = [_Mark(now, taken.spent, session.count())]
        self._ended = 0

    @property
    def over(self) -> bool:
        """True if the measurement is complete."""
        return self._measurement.over

    def poll(self) -> ServerReading:
        """Collect new records; return the progress."""
        now = perf_counter()
        taken = self._session.fleet.take()
        measurement = self._measurement
        if taken.done and measurement.whole:
            measurement.finish(taken.records, now)
            self._marks.append(_Mark(now, taken.spent, self._session.count()))
        elif measurement.add(taken.records, now):
            self._marks.append(_Mark(now, taken.spent, self._session.count()))
        self._ended += sum(map(len, (taken.records.ended, taken.records.failed, taken.records.cancelled)))
        expected = self._session.fleet.plan.expected
        part = min(1.0, self._ended / expected) if expected else measurement.progress(now)
        rate = measurement.windows[-1].rate if measurement.windows else 0.0
        return ServerReading(self._level, False, part, len(measurement.windows), rate)

    def outcome(self) -> LevelOutcome:
        """Return the result. Raises ``ClientError`` if no request was answered."""
        measurement = self._measurement
        found = figures(measurement.last, self._session.objectives)
        if found is None:
            reasons = [f"{count} x {text}" for text, count in measurement.failures.most_common(3)]
            if cancelled := sum(len(window.records.cancelled) for window in measurement.windows):
                reasons.append(f"{cancelled} were cancelled: use a lower --cancel-rate, or a later --cancel-after")
            raise ClientError("\n    ".join([f"no request was answered at {self._level}", *reasons]))
        counted = len(measurement.last)
        first, last = self._marks[0 if measurement.whole else -counted - 1], self._marks[-1]
        plan = self._session.fleet.plan
        spent = [after - before for before, after in zip(first.spent, last.spent, strict=True)]
        return LevelOutcome(
            level=self._level,
            figures=found,
            windows=tuple(measurement.windows),
            stable=measurement.stable,
            server=last.server.since(first.server) if last.server is not None else None,
            busy=max(spent) / (last.moment - first.moment),
            spent=sum(spent) / found.answered,
            objectives=self._session.objectives,
            counted=counted,
            conversations=plan.per_arrival > 1,
            models=plan.models,
            whole=measurement.whole,
        )


# Search for the highest load within a latency limit.

KEPT_UP: Final = 0.95
"""Fraction of the requested rate that a server must answer to keep up with the load."""
_PRECISION: Final = 1.05
"""The search ends when the loads on both sides of the limit differ by at most this factor."""


@dataclass(frozen=True, slots=True)
class LatencyLimit:
    """Upper bound of a latency measure."""

    measure: str
    """Name of a quantile, or ``mean``."""
    milliseconds: float

    def met_by(self, outcome: LevelOutcome) -> bool:
        """Return whether a load was within the limit, without failures, and the server kept up with the rate."""
        figures = outcome.figures
        latency = figures.latency.mean if self.measure == "mean" else figures.latency[self.measure]
        return latency <= self.milliseconds and outcome.kept_up and not figures.failed

    def __str__(self) -> str:
        return f"{self.measure} of at most {self.milliseconds:g} ms"


class Search:
    """Bisection for the highest load within a limit: measures the lowest, the highest, then loads in between."""

    def __init__(self, limit: LatencyLimit, lowest: LoadLevel, highest: LoadLevel) -> None:
        self.limit = limit
        self.best: LevelOutcome | None = None
        """Outcome of the highest load so far that was within the limit."""
        self.next: LoadLevel | None = lowest
        """Load to measure next; None when the search is over."""
        self._highest = highest
        self._beyond: LoadLevel | None = None

    def add(self, outcome: LevelOutcome) -> None:
        """Continue the search with the outcome of the load ``next``."""
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
        # Geometric mean, because the effect of loads on a server scales by factors rather than by steps.
        middle = math.sqrt(within.value * beyond.value)
        if beyond.value <= within.value * _PRECISION:
            return None
        if within.open:
            return replace(within, rate=float(f"{middle:.3g}"))
        count = min(max(round(middle), within.concurrency + 1), beyond.concurrency - 1)
        return LoadLevel(concurrency=count) if count > within.concurrency else None


# Queries to the server besides the load: models, statistics and shared memory.

_PREFIX: Final = 5


class GrpcServer:
    """The server under test, queried over gRPC. Every method raises ``ClientError`` if it fails."""

    def __init__(self, target: BenchTarget) -> None:
        self._target = target

    def model(self, name: str, version: str = "") -> ModelDescription:
        """Return the metadata of a model."""
        return ModelDescription.read(self._call("ModelMetadata", name=name, version=version))

    def config(self, name: str, version: str = "") -> Mapping[str, Any]:
        """Return the configuration of a model."""
        config: Mapping[str, Any] = self._call("ModelConfig", name=name, version=version)["config"]
        return config

    def server_version(self) -> str:
        """Return name and version of the server."""
        found = self._call("ServerMetadata")
        return f"{found.get('name', '')} {found.get('version', '')}".strip()

    def models(self) -> list[ModelVersion]:
        """Return the repository index."""
        return [ModelVersion.read(entry) for entry in self._call("RepositoryIndex").get("models", ())]

    def statistics(self, model: str = "", version: str = "") -> list[ModelStatistics]:
        """Return the statistics of each version."""
        document = self._call("ModelStatistics", name=model, version=version)
        return [ModelStatistics.read(entry) for entry in document.get("model_stats", ())]

    def infer(self, request: bytes) -> None:
        """Send an encoded inference request, and drop the response."""
        asyncio.run(self._send("ModelInfer", request))

    def register_shared_memory(self, region: str, key: str, size: int) -> None:
        """Register a region of system shared memory."""
        self._call("SystemSharedMemoryRegister", name=region, key=key, offset=0, byte_size=size)

    def unregister_shared_memory(self, region: str) -> None:
        """Unregister a region of system shared memory."""
        self._call("SystemSharedMemoryUnregister", name=region)

    def _call(self, method: str, **fields: Any) -> dict[str, Any]:
        request = getattr(grpc_service, f"{method}Request")(**fields)
        response = getattr(grpc_service, f"{method}Response")
        received = asyncio.run(self._send(method, framed(request.SerializeToString())))
        # 64-bit integers become strings here, which the readers of the client accept.
        return MessageToDict(response.FromString(received[_PREFIX:]), preserving_proto_field_name=True)

    async def _send(self, method: str, message: bytes) -> bytes:
        target = self._target
        line = GrpcLine(target.address, target.context(), header_block(target.address, method, target.headers))
        call = _Answer()
        line.open(call, message, last=True)
        try:
            async with asyncio.timeout(target.timeout):
                return await call.whole
        except TimeoutError:
            raise ClientError(f"no response from {target.address} within {target.timeout:g} seconds") from None
        finally:
            line.close()


class _Answer(GrpcClientCall):
    """A call whose complete response can be awaited as ``whole``."""

    def __init__(self) -> None:
        super().__init__(reads=True)
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._received = bytearray()

    def received(self, data: bytes) -> None:
        """Collect a piece of the response."""
        self._received += data

    def ended(self, reason: str) -> None:
        """Complete ``whole`` with the response or an error."""
        if self.whole.done():
            return
        if reason:
            unreachable = reason.startswith("cannot reach")
            self.whole.set_exception(Unreachable(reason) if unreachable else ClientError(reason))
        else:
            self.whole.set_result(bytes(self._received))


BenchedServer: TypeAlias = Client | GrpcServer
"""The server under test, queried over the protocol of the load."""

_ALIGNMENT: Final = 64
_numbers = itertools.count()


class BenchRegions:
    """System shared memory for a measurement: inputs, which are written once, and room for outputs.

    A context manager that unregisters and deletes the regions on exit.
    """

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
        # A server that is gone has nothing to unregister.
        with suppress(Unreachable):
            for region in self._registered:
                self._server.unregister_shared_memory(region)

    def inputs(self, tensors: Sequence[BenchTensor]) -> tuple[BenchTensor, ...]:
        """Copy the data of tensors into a new region; return tensors that refer to it."""
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
        """Return outputs with room for ``size`` bytes each. All requests share them, because they are never read."""
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
