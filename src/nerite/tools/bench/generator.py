"""Load generator process: obeys commands from a pipe, runs a closed or open loop, and reports its records."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Final, NamedTuple

import uvloop

from nerite.observability.machine import raise_open_file_limit
from nerite.tools.bench.forms import Sequences
from nerite.tools.bench.grpc_generator import GrpcPort
from nerite.tools.bench.http_generator import ChatEvents, Events, HttpPort, Recorder, RequestSlot, Totals
from nerite.tools.bench.loops import ClosedLoop, LoadLoop, OpenLoop
from nerite.tools.bench.measurement import BenchPlan, LoadLevel, Records
from nerite.tools.bench.planning import constant, gamma, ramped, scheduled

MAX_SLOTS: Final = 1_000
"""Maximum number of requests in flight per generator in an open loop; further ones wait in the client."""
_FIRST_SLOTS: Final = 16
_DRAIN_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.01


class Begin(NamedTuple):
    """Command: start this load. The reply is None."""

    level: LoadLevel


class Take(NamedTuple):
    """Command: hand over the new records. The reply is a ``Report``."""


class End(NamedTuple):
    """Command: send no more requests, and let those in flight finish. The reply is the ``Totals`` of the level."""


class Report(NamedTuple):
    """Records and processor time of a generator."""

    records: Records
    spent: float
    """Seconds of processor time used so far."""
    done: bool
    """True if the load has an end, and that is reached."""


def run(plan: BenchPlan, share: int, shares: int, pipe: Connection) -> None:
    """Run a generator that executes commands from the pipe until it is closed."""
    # Ctrl-C is handled by the parent process, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_open_file_limit()
    # There is almost no garbage, and a collection pause would count as latency of the server.
    gc.freeze()
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Generator(plan, share, shares).obey(pipe))


class Generator:
    """One of ``shares`` generators that together produce a load."""

    def __init__(self, plan: BenchPlan, share: int, shares: int) -> None:
        self._plan = plan
        self._share = share
        self._shares = shares
        self._recorder = Recorder()
        self._slots: list[RequestSlot] = []
        self._loop: LoadLoop | None = None
        self._runs = 0
        """Number of loads that were begun."""
        self._context = plan.target.context()

    async def obey(self, pipe: Connection) -> None:
        """Execute commands from the pipe until it is closed."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(pipe.fileno(), arrived.set)
        # add_reader made the pipe non-blocking, and a report may be larger than the pipe's buffer.
        os.set_blocking(pipe.fileno(), True)
        # A closed pipe means that the parent process has finished.
        with suppress(EOFError, BrokenPipeError):
            while True:
                await arrived.wait()
                arrived.clear()
                await self._do(pipe)

    async def _do(self, pipe: Connection) -> None:
        match pipe.recv():
            case Begin(level):
                self._begin(level)
                pipe.send(None)
            case Take():
                self._abandon_late_requests()
                # Before the records, which are then complete.
                done = self._loop is not None and self._loop.done
                pipe.send(Report(self._recorder.take(), time.process_time(), done))
            case End():
                pipe.send(await self._end())

    def _begin(self, level: LoadLevel) -> None:
        self._recorder.take()
        self._recorder.totals = Totals()
        # A generator without a slot has nothing to do with a closed loop.
        shares = self._shares if level.open else min(self._shares, level.concurrency)
        budget = None if self._plan.budget is None else self._part(self._plan.budget, shares)
        make = self._slot_factory(shares)
        self._runs += 1
        if not level.open:
            work = ClosedLoop(self._recorder, budget, self._delays(level, shares))
            count = self._part(level.concurrency, shares)
            self._slots = [make(work) for _ in range(count)]
            self._loop = work
            work.begin(self._slots)
            return
        slots = self._slots = []

        def another() -> RequestSlot | None:
            if len(slots) >= MAX_SLOTS:
                return None
            slots.append(make(paced))
            return slots[-1]

        arrivals = itertools.islice(self._arrivals(level), budget)
        paced = self._loop = OpenLoop(self._recorder, arrivals, perf_counter(), another)
        slots.extend(make(paced) for _ in range(_FIRST_SLOTS))
        paced.begin(slots)

    def _part(self, number: int, shares: int) -> int:
        """Return this generator's part of a number that is distributed evenly."""
        return 0 if self._share >= shares else number // shares + (self._share < number % shares)

    def _delays(self, level: LoadLevel, shares: int) -> Iterator[float] | None:
        """Yield the seconds after which each slot begins."""
        if not self._plan.ramp:
            return None
        step = self._plan.ramp / level.concurrency
        return (step * number for number in itertools.count(self._share, shares))

    def _arrivals(self, level: LoadLevel) -> Iterator[float]:
        plan, share, shares = self._plan, self._share, self._shares
        if level.arrivals == "replay":
            return scheduled(plan.schedule, plan.speed, share, shares)
        if level.arrivals == "constant":
            times = constant(level.rate, share, shares)
        else:
            times = gamma(level.rate, level.burstiness, share, shares, plan.seed)
        return ramped(times, plan.ramp)

    def _slot_factory(self, shares: int) -> Callable[[LoadLoop], RequestSlot]:
        plan, target = self._plan, self._plan.target
        script = plan.scripts.begin(self._share, shares, self._runs)
        port: GrpcPort | HttpPort
        if target.protocol == "grpc":
            port = GrpcPort(
                target.address, self._context, target.headers, streaming=plan.streaming, decoupled=plan.decoupled
            )
        else:
            events = ChatEvents if target.protocol == "openai" else Events
            port = HttpPort(target.address, self._context, events if plan.streaming else None)
        return lambda work: port.slot(work, script())

    def _abandon_late_requests(self) -> None:
        longest = perf_counter() - self._plan.target.timeout
        for slot in list(self._slots):
            if 0 < slot.sent < longest:
                slot.abandon(f"no answer in {self._plan.target.timeout:g} seconds")

    async def _end(self) -> Totals:
        if self._loop is None:
            return Totals()
        self._loop.end()
        # An open sequence would keep its slot on the server, which the next level of load would lack.
        patience = self._plan.target.timeout if isinstance(self._plan.scripts, Sequences) else _DRAIN_SECONDS
        for _ in range(int(patience / _POLL_SECONDS)):
            if not any(slot.sent for slot in self._slots):
                break
            await asyncio.sleep(_POLL_SECONDS)
        unfinished = sum(1 for slot in self._slots if slot.sent)
        for slot in self._slots:
            slot.close()
        self._slots = []
        self._recorder.take()
        return self._recorder.totals._replace(unfinished=unfinished)
