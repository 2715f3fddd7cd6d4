"""The life of a generator: it is told what to begin, to hand over its records, and to end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
import uvloop

from nerite.tools.bench.forms import Sequences
from nerite.tools.bench.grpc_generator import GrpcPort
from nerite.tools.bench.http_generator import ChatEvents, Events, HttpPort, Recorder, RequestSlot
from nerite.tools.bench.measurement import BenchPlan, LoadLevel, Records

# A closed loop: so many requests under way at any time, each followed by the next.


class ClosedLoop:
    """Keeps its slots busy from ``begin`` on."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._running = True

    def begin(self, slots: list[RequestSlot]) -> None:
        """Have each slot ask."""
        for slot in slots:
            slot.due = slot.sent = perf_counter()
            slot.ask()

    def answered(self, slot: RequestSlot) -> None:
        """Note the answer, and ask again."""
        now = perf_counter()
        self.recorder.answered(slot.due, slot.sent, now)
        if self._running:
            slot.due = slot.sent = now
            slot.ask()
        else:
            slot.rest()

    def failed(self, slot: RequestSlot, reason: str) -> None:
        """Note the failure, and ask again."""
        self.recorder.refused(reason)
        if self._running:
            slot.due = slot.sent = perf_counter()
            slot.ask()
        else:
            slot.rest()

    def end(self) -> None:
        """Ask nothing more."""
        self._running = False


# Wakes the loop at a moment, exactly. The timers of event loops know milliseconds only.

_MONOTONIC = 1
_ABSOLUTE = 1
_NONBLOCK = 0o4000


class ExactTimer:
    """Calls ``ring`` at the moment that was set last. Within a millisecond where there is no timerfd (Linux has it)."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._descriptor = self._libc.timerfd_create(_MONOTONIC, _NONBLOCK)
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._expired)

    def set(self, moment: float) -> None:
        """Ring at ``moment``, in seconds of ``perf_counter``, or at once if that has passed."""
        if self._descriptor < 0:
            self._timer = self._loop.call_later(max(0.0, moment - perf_counter()), self._ring)
            return
        whole, part = divmod(max(int(moment * 1e9), 1), 1_000_000_000)
        # No interval; the time when it ends.
        setting = (ctypes.c_long * 4)(0, 0, whole, part)
        self._libc.timerfd_settime(self._descriptor, _ABSOLUTE, ctypes.byref(setting), None)

    def close(self) -> None:
        """Do not ring any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _expired(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            # It was set anew in between.
            return
        self._ring()


# An open loop: requests are sent when they are due, whatever has become of those before.


class OpenLoop:
    """Sends by a schedule. A request for which no slot is free waits for one, and its latency counts from its time."""

    def __init__(
        self, recorder: Recorder, arrivals: Iterator[float], began: float, another: Callable[[], RequestSlot | None]
    ) -> None:
        self.recorder = recorder
        self._arrivals = arrivals
        self._began = began
        self._another = another
        """Makes one more slot, or returns None where there are enough."""
        self._next = began + next(arrivals)
        self._idle: list[RequestSlot] = []
        self._waiting: deque[tuple[float, float]] = deque()
        """When each was due, and when it would have been sent if there had been a slot."""
        self._alarm = ExactTimer(self._ring)
        self._running = True

    def begin(self, slots: list[RequestSlot]) -> None:
        """Follow the schedule from now on."""
        self._idle.extend(slots)
        self._alarm.set(self._next)

    def answered(self, slot: RequestSlot) -> None:
        """Note the answer; the slot is free."""
        self.recorder.answered(slot.due, slot.sent, perf_counter())
        self._free(slot)

    def failed(self, slot: RequestSlot, reason: str) -> None:
        """Note the failure; the slot is free."""
        self.recorder.refused(reason)
        self._free(slot)

    def end(self) -> None:
        """Send nothing more of the load."""
        self._running = False
        self._waiting.clear()
        self._alarm.close()
        idle, self._idle = self._idle, []
        for slot in idle:
            slot.rest()

    def _ring(self) -> None:
        now = perf_counter()
        while self._next <= now:
            self._send(self._next)
            self._next = self._began + next(self._arrivals)
        self._alarm.set(self._next)

    def _send(self, due: float) -> None:
        slot = self._idle.pop() if self._idle else self._another()
        if slot is None:
            self._waiting.append((due, perf_counter()))
            return
        slot.due = due
        slot.sent = perf_counter()
        slot.ask()

    def _free(self, slot: RequestSlot) -> None:
        if not self._running:
            slot.rest()
            return
        slot.sent = 0.0
        if self._waiting:
            slot.due, slot.sent = self._waiting.popleft()
            slot.ask()
        else:
            self._idle.append(slot)


# When requests are due in an open loop: at a steady pace, or at random as independent callers come.

_DRAWN_AT_ONCE = 1_024


def constant(rate: float, share: int = 0, shares: int = 1) -> Iterator[float]:
    """Yield the seconds after the beginning at which requests are due, ``rate`` of them in a second.

    Of several generators each takes its share: the first, and every ``shares``-th after it.
    """
    return (number / rate for number in itertools.count(share, shares))


def poisson(rate: float, share: int = 0, shares: int = 1, seed: int = 0) -> Iterator[float]:
    """Yield the same for arrivals that know nothing of each other. What several generators send adds up to ``rate``."""
    generator = np.random.default_rng([seed, share])
    due = 0.0
    while True:
        for gap in generator.exponential(shares / rate, _DRAWN_AT_ONCE).tolist():
            due += gap
            yield due


MOST_SLOTS: Final = 1_000
"""Requests that may be under way in an open loop, of each generator; more wait in the client."""
_FIRST_SLOTS: Final = 16
_DRAIN_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.01


class Begin(NamedTuple):
    """Command: put on this load. The answer is None."""

    level: LoadLevel


class Take(NamedTuple):
    """Command: hand over the records there are. The answer is a ``Report``."""


class End(NamedTuple):
    """Command: let the requests under way come to their end, and send nothing more. The answer is None."""


class Report(NamedTuple):
    """What a generator hands over."""

    records: Records
    spent: float
    """Seconds of processor time that it has used so far."""


def run(plan: BenchPlan, share: int, shares: int, pipe: Connection) -> None:
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

    def __init__(self, plan: BenchPlan, share: int, shares: int) -> None:
        self._plan = plan
        self._share = share
        self._shares = shares
        self._recorder = Recorder()
        self._slots: list[RequestSlot] = []
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

    def _begin(self, level: LoadLevel) -> None:
        self._recorder.take()
        make = self._factory()
        if not level.open:
            work = ClosedLoop(self._recorder)
            count = level.concurrency // self._shares + (self._share < level.concurrency % self._shares)
            self._slots = [make(work) for _ in range(count)]
            self._loop = work
            work.begin(self._slots)
            return
        schedule = poisson if level.arrivals == "poisson" else constant
        due = schedule(level.rate, self._share, self._shares)
        slots = self._slots = []

        def another() -> RequestSlot | None:
            if len(slots) >= MOST_SLOTS:
                return None
            slots.append(make(paced))
            return slots[-1]

        paced = self._loop = OpenLoop(self._recorder, due, perf_counter(), another)
        slots.extend(make(paced) for _ in range(_FIRST_SLOTS))
        paced.begin(slots)

    def _factory(self) -> Callable[[ClosedLoop | OpenLoop], RequestSlot]:
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
