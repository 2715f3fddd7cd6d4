"""Wakes the loop at a moment, exactly. The timers of event loops know milliseconds only."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from time import perf_counter

_MONOTONIC = 1
_ABSOLUTE = 1
_NONBLOCK = 0o4000


class Alarm:
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
