"""Closed and open loops: they decide when each slot of a generator sends its next request, and when it cancels one."""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import os
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

from nerite.tools.bench.http_generator import Recorder, RequestSlot

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
            if self._timer is not None:
                self._timer.cancel()
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


class Agenda:
    """Calls functions at set times, by one timer."""

    def __init__(self) -> None:
        self._timer = ExactTimer(self._ring)
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Call a function at a time of ``perf_counter``."""
        entry = (moment, next(self._numbers), act)
        heapq.heappush(self._entries, entry)
        if self._entries[0] is entry:
            self._timer.set(moment)

    def close(self) -> None:
        """Call nothing more."""
        self._entries.clear()
        self._timer.close()

    def _ring(self) -> None:
        now = perf_counter()
        while self._entries and self._entries[0][0] <= now:
            heapq.heappop(self._entries)[2]()
        if self._entries:
            self._timer.set(self._entries[0][0])


class LoadLoop(ABC):
    """What closed and open loops have in common: outcomes, pauses of conversations, and cancellations.

    A slot is engaged from the first request of a conversation until its last answer. Requests outside of
    conversations are conversations of one request.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._running = True
        self._engaged = 0
        """Number of engaged slots."""
        self._agenda: Agenda | None = None

    @property
    @abstractmethod
    def done(self) -> bool:
        """True if the load has an end, and that is reached."""

    @abstractmethod
    def begin(self, slots: list[RequestSlot]) -> None:
        """Start sending."""

    @abstractmethod
    def _freed(self, slot: RequestSlot, now: float) -> None:
        """Give a slot whose conversation is over another one, or none."""

    def answered(self, slot: RequestSlot) -> None:
        """Record the answer, and proceed."""
        now = perf_counter()
        if slot.dialogue is not None:
            self.recorder.planned(slot.dialogue)
        self.recorder.answered(slot.due, slot.sent, now)
        self._proceed(slot, now)

    def failed(self, slot: RequestSlot, reason: str) -> None:
        """Record the failure, and proceed with another conversation."""
        self.recorder.refused(reason)
        if slot.dialogue is not None:
            slot.dialogue.broken()
        self._proceed(slot, perf_counter())

    def cancelled(self, slot: RequestSlot) -> None:
        """Record the cancellation, and proceed with another conversation."""
        self.recorder.gave_up()
        if slot.dialogue is not None:
            slot.dialogue.broken()
        self._proceed(slot, perf_counter())

    def end(self) -> None:
        """Send no more requests, and no longer cancel any."""
        self._running = False
        if self._agenda is not None:
            self._agenda.close()

    def _proceed(self, slot: RequestSlot, now: float) -> None:
        if not self._running:
            self._engaged -= 1
            slot.rest()
            return
        pause = slot.dialogue.pause() if slot.dialogue is not None else None
        if pause is None:
            self._freed(slot, now)
        elif pause:
            slot.sent = 0.0
            self._later(now + pause, partial(self._send, slot, now + pause))
        else:
            self._send(slot, now)

    def _send(self, slot: RequestSlot, due: float, sent: float = 0.0) -> None:
        now = perf_counter()
        slot.due = due
        slot.sent = sent = sent or now
        slot.ask()
        if slot.dialogue is not None and slot.dialogue.cancel_after is not None:
            self._later(now + slot.dialogue.cancel_after, partial(self._cancel, slot, sent))

    def _cancel(self, slot: RequestSlot, sent: float) -> None:
        # Unless the answer has come, and perhaps another request was sent.
        if slot.sent == sent:
            slot.cancel()

    def _later(self, moment: float, act: Callable[[], None]) -> None:
        if self._agenda is None:
            self._agenda = Agenda()
        self._agenda.at(moment, act)


class ClosedLoop(LoadLoop):
    """Keeps a fixed number of requests or conversations in progress: when one is over, the next begins."""

    def __init__(self, recorder: Recorder, budget: int | None = None, delays: Iterator[float] | None = None) -> None:
        """``budget``: number of conversations to begin. ``delays``: seconds after which each slot begins its first."""
        super().__init__(recorder)
        self._left = -1 if budget is None else budget
        self._delays = delays

    @property
    def done(self) -> bool:
        """True if all conversations of the budget are over."""
        return not self._left and not self._engaged

    def begin(self, slots: list[RequestSlot]) -> None:
        """Send the first request on each slot."""
        began = perf_counter()
        self._engaged = len(slots)
        for slot in slots:
            delay = next(self._delays) if self._delays is not None else 0.0
            if delay:
                self._later(began + delay, partial(self._begin, slot))
            else:
                self._begin(slot)

    def _begin(self, slot: RequestSlot) -> None:
        self._freed(slot, perf_counter())

    def _freed(self, slot: RequestSlot, now: float) -> None:
        if not self._left:
            self._engaged -= 1
            slot.rest()
            return
        self._left -= 1
        if slot.dialogue is None:
            slot.due = slot.sent = now
            slot.ask()
        else:
            self._send(slot, now)


class OpenLoop(LoadLoop):
    """Begins requests or conversations on a schedule, regardless of answers.

    One for which no slot is free waits for one; its latency counts from its scheduled time.
    """

    def __init__(
        self, recorder: Recorder, arrivals: Iterator[float], began: float, another: Callable[[], RequestSlot | None]
    ) -> None:
        """``arrivals`` may end, and so does the load then."""
        super().__init__(recorder)
        self._arrivals = arrivals
        self._began = began
        self._another = another
        """Makes one more slot, or returns None if the maximum number is reached."""
        self._next: float | None = None
        """Scheduled time of the next request; None if there is none."""
        self._idle: list[RequestSlot] = []
        self._waiting: deque[tuple[float, float]] = deque()
        """Scheduled time of each waiting request, and the time at which it would have been sent on a free slot."""
        self._alarm = ExactTimer(self._ring)

    @property
    def done(self) -> bool:
        """True if the schedule has ended, and all conversations are over."""
        return self._next is None and not self._engaged and not self._waiting

    def begin(self, slots: list[RequestSlot]) -> None:
        """Start sending on schedule."""
        self._idle.extend(slots)
        self._advance()

    def end(self) -> None:
        """Send no more requests. Those that wait for a slot are dropped."""
        super().end()
        self._waiting.clear()
        self._alarm.close()
        idle, self._idle = self._idle, []
        for slot in idle:
            slot.rest()

    def _advance(self) -> None:
        """Determine the time of the next request, and set the alarm to it."""
        self._next = self._due()
        if self._next is not None:
            self._alarm.set(self._next)

    def _due(self) -> float | None:
        arrival = next(self._arrivals, None)
        return None if arrival is None else self._began + arrival

    def _ring(self) -> None:
        now = perf_counter()
        while self._next is not None and self._next <= now:
            self._arrive(self._next)
            self._next = self._due()
        if self._next is not None:
            self._alarm.set(self._next)

    def _arrive(self, due: float) -> None:
        slot = self._idle.pop() if self._idle else self._another()
        if slot is None:
            self._waiting.append((due, perf_counter()))
            return
        self._engaged += 1
        self._send(slot, due)

    def _freed(self, slot: RequestSlot, now: float) -> None:
        slot.sent = 0.0
        if self._waiting:
            # It counts as sent when it would have been: the wait is the server's, not lateness of this program.
            self._send(slot, *self._waiting.popleft())
        else:
            self._engaged -= 1
            self._idle.append(slot)
