"""Whether to wait asleep or awake: a decider without a clock.

To fall asleep and to be woken again costs tens of microseconds, more than a small model needs, and leaves cold caches.
So where the last wait was short, the next one is spent awake, up to a limit, by looking again and again and giving way
to everybody else in between. Where things are further apart one sleeps as ever: each of the loop and the workers spends
one core awake at most, and only while it is busy thousands of times a second.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from nerite.backends import machine

_DEFAULT_MICROSECONDS = 400


class BusyPollPolicy:
    """One that waits. Waits of two kinds are told apart, because the one says little about the other.

    Told when a wait begins (``rest``) and when it is over (``stir``), asked in between (``awake``). Times in seconds.
    """

    __slots__ = ("_began", "_kind", "_limit", "_short")

    def __init__(self, limit: float) -> None:
        """``limit``: how long to stay awake; 0 is never."""
        self._limit = limit
        self._began = 0.0
        self._kind = False
        self._short = {False: False, True: False}

    def rest(self, now: float, kind: bool = False) -> None:
        """Note that a wait begins."""
        self._began = now
        self._kind = kind

    def stir(self, now: float) -> None:
        """Note that what was waited for is here."""
        self._short[self._kind] = now - self._began < self._limit

    def awake(self, now: float) -> bool:
        """Return whether to look again, instead of going to sleep."""
        return self._short[self._kind] and now - self._began < self._limit


def limit_of(microseconds: int) -> float:
    """Return the limit in seconds that an option means; below 0 the machine decides.

    Then it is never where it would take from somebody: on one core, and under a quota of processor time, which it would
    use up.
    """
    if microseconds < 0:
        microseconds = _DEFAULT_MICROSECONDS if machine.usable_cores() > 1 and not machine.core_quota() else 0
    return microseconds / 1e6


# Keeps the event loop awake for a moment after something happened, when more is likely to follow at once.

_now = time.monotonic


class BusyPoll:
    """One for the loop, told by all who start and finish work on it."""

    __slots__ = ("_awake", "_loop", "_poll_policy", "_work")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float) -> None:
        self._loop = loop
        self._poll_policy = BusyPollPolicy(limit)
        self._awake = False
        self._work = False
        """Something is to be done in this turn of the loop, and nobody else comes first."""

    def soon(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when this turn of the loop has read all there was to read."""
        self._work = True
        self._loop.call_soon(call)

    def stir(self, working: bool) -> None:
        """Note that something happened; ``working``: an answer of a model is what is waited for next."""
        now = _now()
        poll_policy = self._poll_policy
        poll_policy.stir(now)
        poll_policy.rest(now, working)
        if not self._awake and poll_policy.awake(now):
            self._awake = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Have the loop look for events once more, without sleeping."""
        if self._poll_policy.awake(_now()):
            if self._work:
                self._work = False
            else:
                os.sched_yield()
            self._loop.call_soon(self._look)
        else:
            self._awake = False


# A call on the event loop at an exact time, which may change until then.

_now_ns = time.monotonic_ns


class LoopTimer:
    """Set by whoever has a decider that wants to be asked again. For the loop's thread only."""

    __slots__ = ("_at", "_call", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0

    def set(self, at: int | None) -> None:
        """Call once when ``time.monotonic_ns`` is ``at``, and not when it was set for before; None: not at all."""
        if self._timer is not None:
            if at == self._at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._at = at
            self._wait(at - _now_ns())

    def _wait(self, ns: int) -> None:
        # The loop counts milliseconds. Rounded down, and asked again until it is due, the timer is exact.
        self._timer = self._loop.call_later(max(0, ns) // 1_000_000 / 1000, self._ring)

    def _ring(self) -> None:
        left = self._at - _now_ns()
        if left > 0:
            self._wait(left)
        else:
            self._timer = None
            self._call()
