"""Load generator process: obeys commands from a pipe, runs a closed or open loop, and reports its records."""

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


class ClosedLoop:
    """Keeps a fixed number of requests in flight: each answer is followed by the next request."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._running = True

    def begin(self, slots: list[RequestSlot]) -> None:
        """Send the first request on each slot."""
        for slot in slots:
            slot.due = slot.sent = perf_counter()
            slot.ask()

    def answered(self, slot: RequestSlot) -> None:
        """Record the answer, and send the next request."""
        now = perf_counter()
        self.recorder.answered(slot.due, slot.sent, now)
        if self._running:
            slot.due = slot.sent = now
            slot.ask()
        else:
            slot.rest()

    def failed(self, slot: RequestSlot, reason: str) -> None:
        """Record the failure, and send the next request."""
        self.recorder.refused(reason)
        if self._running:
            slot.due = slot.sent = perf_counter()
            slot.ask()
        else:
            slot.rest()

    def end(self) -> None:
        """Send no more requests."""
        self._running = False


_MONOTONIC = 1
_ABSOLUTE = 1
_NONBLOCK = 0o4000


class ExactTimer:
    """Timer with higher resolution than that of event loops, which is milliseconds. Calls ``ring`` at the set time.

    Uses a timerfd on Linux; elsewhere it is accurate to a millisecond.
    """

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
        """Set the time to ``moment``, in seconds of ``perf_counter``; ring immediately if that has passed."""
        if self._descriptor < 0:
            self._timer = self._loop.call_later(max(0.0, moment - perf_counter()), self._ring)
            return
        whole, part = divmod(max(int(moment * 1e9), 1), 1_000_000_000)
        # struct itimerspec: no interval, and an absolute expiration time.
        setting = (ctypes.c_long * 4)(0, 0, whole, part)
        self._libc.timerfd_settime(self._descriptor, _ABSOLUTE, ctypes.byref(setting), None)

    def close(self) -> None:
        """Stop the timer."""
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
            # The timer was set again in the meantime.
            return
        self._ring()


class OpenLoop:
    """Sends requests on a schedule, regardless of answers.

    A request for which no slot is free waits for one; its latency counts from its scheduled time.
    """

    def __init__(
        self, recorder: Recorder, arrivals: Iterator[float], began: float, another: Callable[[], RequestSlot | None]
    ) -> None:
        self.recorder = recorder
        self._arrivals = arrivals
        self._began = began
        self._another = another
        """Makes one more slot, or returns None if the maximum number is reached."""
        self._next = began + next(arrivals)
        self._idle: list[RequestSlot] = []
        self._waiting: deque[tuple[float, float]] = deque()
        """Scheduled time of each waiting request, and the time at which it would have been sent on a free slot."""
        self._alarm = ExactTimer(self._ring)
        self._running = True

    def begin(self, slots: list[RequestSlot]) -> None:
        """Start sending on schedule."""
        self._idle.extend(slots)
        self._alarm.set(self._next)

    def answered(self, slot: RequestSlot) -> None:
        """Record the answer, and free the slot."""
        self.recorder.answered(slot.due, slot.sent, perf_counter())
        self._free(slot)

    def failed(self, slot: RequestSlot, reason: str) -> None:
        """Record the failure, and free the slot."""
        self.recorder.refused(reason)
        self._free(slot)

    def end(self) -> None:
        """Send no more requests."""
        # Waiting requests are dropped.
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


# Schedules of open loops.

_BLOCK_SIZE = 1_024


def constant(rate: float, share: int = 0, shares: int = 1) -> Iterator[float]:
    """Yield the times at which requests are due at a constant ``rate``, in seconds after the start.

    Each of several generators takes every ``shares``-th request, starting with number ``share``.
    """
    return (number / rate for number in itertools.count(share, shares))


def poisson(rate: float, share: int = 0, shares: int = 1, seed: int = 0) -> Iterator[float]:
    """Yield due times of a Poisson process. The rates of all generators add up to ``rate``."""
    generator = np.random.default_rng([seed, share])
    due = 0.0
    while True:
        for gap in generator.exponential(shares / rate, _BLOCK_SIZE).tolist():
            due += gap
            yield due


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
    """Command: send no more requests, and let those in flight finish. The reply is None."""


class Report(NamedTuple):
    """Records and processor time of a generator."""

    records: Records
    spent: float
    """Seconds of processor time used so far."""


def run(plan: BenchPlan, share: int, shares: int, pipe: Connection) -> None:
    """Run a generator that executes commands from the pipe until it is closed."""
    # Ctrl-C is handled by the parent process, which then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
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
        self._loop: ClosedLoop | OpenLoop | None = None
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
                pipe.send(Report(self._recorder.take(), time.process_time()))
            case End():
                await self._end()
                pipe.send(None)

    def _begin(self, level: LoadLevel) -> None:
        self._recorder.take()
        make = self._slot_factory()
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
            if len(slots) >= MAX_SLOTS:
                return None
            slots.append(make(paced))
            return slots[-1]

        paced = self._loop = OpenLoop(self._recorder, due, perf_counter(), another)
        slots.extend(make(paced) for _ in range(_FIRST_SLOTS))
        paced.begin(slots)

    def _slot_factory(self) -> Callable[[ClosedLoop | OpenLoop], RequestSlot]:
        plan, target = self._plan, self._plan.target
        script = plan.scripts.begin(self._share, self._shares)
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

    async def _end(self) -> None:
        if self._loop is None:
            return
        self._loop.end()
        # An open sequence would keep its slot on the server, which the next level of load would lack.
        patience = self._plan.target.timeout if isinstance(self._plan.scripts, Sequences) else _DRAIN_SECONDS
        for _ in range(int(patience / _POLL_SECONDS)):
            if not any(slot.sent for slot in self._slots):
                break
            await asyncio.sleep(_POLL_SECONDS)
        for slot in self._slots:
            slot.close()
        self._slots = []
