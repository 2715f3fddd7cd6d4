"""A call on the event loop at an exact time, which may change until then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_now = time.monotonic_ns


class Alarm:
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
            self._wait(at - _now())

    def _wait(self, ns: int) -> None:
        # The loop counts milliseconds. Rounded down, and asked again until it is due, the timer is exact.
        self._timer = self._loop.call_later(max(0, ns) // 1_000_000 / 1000, self._ring)

    def _ring(self) -> None:
        left = self._at - _now()
        if left > 0:
            self._wait(left)
        else:
            self._timer = None
            self._call()
