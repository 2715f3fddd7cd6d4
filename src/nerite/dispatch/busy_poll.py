"""Busy polling: decides whether to wait by polling instead of sleeping, and applies that to the event loop.

Falling asleep and waking up costs tens of microseconds, more than a small model needs, and leaves cold caches. So after
a short wait the next wait is spent polling, up to a limit, and yielding to all other processes between the polls. When
events are further apart, waits sleep as usual: the loop and the workers keep one core busy each at most, and only while
there are thousands of events a second.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from time import monotonic, monotonic_ns

from nerite.backends import machine

_DEFAULT_MICROSECONDS = 400


class BusyPollPolicy:
    """Decides for one waiter whether to poll. Waits of two kinds are tracked separately, because they are unrelated.

    Notified when a wait begins (``began``) and ends (``ended``), queried in between (``polls``). Times in seconds.
    """

    __slots__ = ("_began", "_kind", "_limit", "_short")

    def __init__(self, limit: float) -> None:
        """``limit``: how long to poll; 0 disables polling."""
        self._limit = limit
        self._began = 0.0
        self._kind = False
        self._short = {False: False, True: False}

    def began(self, now: float, kind: bool = False) -> None:
        """Record that a wait begins."""
        self._began = now
        self._kind = kind

    def ended(self, now: float) -> None:
        """Record that the wait has ended."""
        self._short[self._kind] = now - self._began < self._limit

    def polls(self, now: float) -> bool:
        """Return whether to poll again instead of sleeping."""
        return self._short[self._kind] and now - self._began < self._limit


def limit_of(microseconds: int, processes: int = 1) -> float:
    """Return the limit in seconds for an option in microseconds; a negative one means the default for this machine.

    The default is no polling where it would take processor time from others: if the server's own ``processes`` use all
    cores, and under a quota of processor time, which polling would use up.
    """
    if microseconds < 0:
        spare = machine.usable_cores() > processes and not machine.core_quota()
        microseconds = _DEFAULT_MICROSECONDS if spare else 0
    return microseconds / 1e6


class BusyPoll:
    """Keeps the event loop polling for a moment after an event, when more is likely to follow at once. One per loop."""

    __slots__ = ("_loop", "_poll_policy", "_polling", "_work")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float) -> None:
        self._loop = loop
        self._poll_policy = BusyPollPolicy(limit)
        self._polling = False
        self._work = False
        """Work is scheduled for this turn of the loop, so that no other process should run first."""

    def soon(self, call: Callable[[], None]) -> None:
        """Call ``call`` when this turn of the loop has read everything that was readable."""
        self._work = True
        self._loop.call_soon(call)

    def event(self, working: bool) -> None:
        """Record an event; ``working``: the next expected event is a model's result."""
        now = monotonic()
        poll_policy = self._poll_policy
        poll_policy.ended(now)
        poll_policy.began(now, working)
        if not self._polling and poll_policy.polls(now):
            self._polling = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Make the loop poll for events again instead of sleeping."""
        if self._poll_policy.polls(monotonic()):
            if self._work:
                self._work = False
            else:
                os.sched_yield()
            self._loop.call_soon(self._poll)
        else:
            self._polling = False


class LoopTimer:
    """A call on the event loop at an exact time, which may change until then. For the loop's thread only."""

    __slots__ = ("_at", "_call", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0

    def set(self, at: int | None) -> None:
        """Call once when ``time.monotonic_ns`` reaches ``at``, replacing an earlier setting; None cancels it."""
        if self._timer is not None:
            if at == self._at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None:
            self._at = at
            self._wait(at - monotonic_ns())

    def _wait(self, ns: int) -> None:
        # The loop has a resolution of milliseconds. Rounding down and rechecking until it is due makes the timer exact.
        self._timer = self._loop.call_later(max(0, ns) // 1_000_000 / 1000, self._fire)

    def _fire(self) -> None:
        left = self._at - monotonic_ns()
        if left > 0:
            self._wait(left)
        else:
            self._timer = None
            self._call()
