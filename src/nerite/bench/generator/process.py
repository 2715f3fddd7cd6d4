"""The life of a generator: it is told what to begin, to hand over its records, and to end."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Final, NamedTuple

import uvloop

from nerite.bench import arrivals
from nerite.bench.generator.closed_loop import ClosedLoop
from nerite.bench.generator.events import ChatEvents, Events
from nerite.bench.generator.grpc_slot import GrpcPort
from nerite.bench.generator.http_slot import HttpPort
from nerite.bench.generator.open_loop import OpenLoop
from nerite.bench.generator.recorder import Recorder
from nerite.bench.generator.slot import Slot
from nerite.bench.plan import Level, Plan
from nerite.bench.records import Records
from nerite.bench.scripts import Sequences

MOST_SLOTS: Final = 1_000
"""Requests that may be under way in an open loop, of each generator; more wait in the client."""
_FIRST_SLOTS: Final = 16
_DRAIN_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.01


class Begin(NamedTuple):
    """Command: put on this load. The answer is None."""

    level: Level


class Take(NamedTuple):
    """Command: hand over the records there are. The answer is a ``Report``."""


class End(NamedTuple):
    """Command: let the requests under way come to their end, and send nothing more. The answer is None."""


class Report(NamedTuple):
    """What a generator hands over."""

    records: Records
    spent: float
    """Seconds of processor time that it has used so far."""


def run(plan: Plan, share: int, shares: int, pipe: Connection) -> None:
    """Obey what comes through the pipe until it is closed."""
    # Ctrl-C is for the process that reads the records; when that ends, the pipe is closed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # There is next to nothing to collect, and a collection would be a pause that the server is blamed for.
    gc.freeze()
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Generator(plan, share, shares).obey(pipe))


class Generator:
    """One of ``shares`` that together put on a load."""

    def __init__(self, plan: Plan, share: int, shares: int) -> None:
        self._plan = plan
        self._share = share
        self._shares = shares
        self._recorder = Recorder()
        self._slots: list[Slot] = []
        self._loop: ClosedLoop | OpenLoop | None = None
        self._context = plan.context()

    async def obey(self, pipe: Connection) -> None:
        """Do what is commanded."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(pipe.fileno(), arrived.set)
        # The loop has made it one that does not wait, and a report may be larger than what it takes at once.
        os.set_blocking(pipe.fileno(), True)
        # A pipe that is closed means that nobody wants anything any more.
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
                self._give_up_late_ones()
                pipe.send(Report(self._recorder.take(), time.process_time()))
            case End():
                await self._end()
                pipe.send(None)

    def _begin(self, level: Level) -> None:
        self._recorder.take()
        make = self._factory()
        if not level.open:
            work = ClosedLoop(self._recorder)
            count = level.concurrency // self._shares + (self._share < level.concurrency % self._shares)
            self._slots = [make(work) for _ in range(count)]
            self._loop = work
            work.begin(self._slots)
            return
        schedule = arrivals.poisson if level.arrivals == "poisson" else arrivals.constant
        due = schedule(level.rate, self._share, self._shares)
        slots = self._slots = []

        def another() -> Slot | None:
            if len(slots) >= MOST_SLOTS:
                return None
            slots.append(make(paced))
            return slots[-1]

        paced = self._loop = OpenLoop(self._recorder, due, perf_counter(), another)
        slots.extend(make(paced) for _ in range(_FIRST_SLOTS))
        paced.begin(slots)

    def _factory(self) -> Callable[[ClosedLoop | OpenLoop], Slot]:
        plan = self._plan
        script = plan.scripts.begin(self._share, self._shares)
        port: GrpcPort | HttpPort
        if plan.protocol == "grpc":
            port = GrpcPort(
                plan.address, self._context, plan.headers, streaming=plan.streaming, decoupled=plan.decoupled
            )
        else:
            events = ChatEvents if plan.protocol == "openai" else Events
            port = HttpPort(plan.address, self._context, events if plan.streaming else None)
        return lambda work: port.slot(work, script())

    def _give_up_late_ones(self) -> None:
        longest = perf_counter() - self._plan.timeout
        for slot in list(self._slots):
            if 0 < slot.sent < longest:
                slot.abandon(f"no answer in {self._plan.timeout:g} seconds")

    async def _end(self) -> None:
        if self._loop is None:
            return
        self._loop.end()
        # A sequence that were left open would keep its place on the server, and the next level out of it.
        patience = self._plan.timeout if isinstance(self._plan.scripts, Sequences) else _DRAIN_SECONDS
        for _ in range(int(patience / _LOOK_SECONDS)):
            if not any(slot.sent for slot in self._slots):
                break
            await asyncio.sleep(_LOOK_SECONDS)
        for slot in self._slots:
            slot.close()
        self._slots = []
