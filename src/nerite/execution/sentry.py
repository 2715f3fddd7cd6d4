"""Keeps the event loop awake for a moment after something happened, when more is likely to follow at once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from nerite.execution.vigil import Vigil

_now = time.monotonic


class Sentry:
    """One for the loop, told by all who start and finish work on it."""

    __slots__ = ("_awake", "_loop", "_vigil", "_work")

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: float) -> None:
        self._loop = loop
        self._vigil = Vigil(limit)
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
        vigil = self._vigil
        vigil.stir(now)
        vigil.rest(now, working)
        if not self._awake and vigil.awake(now):
            self._awake = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Have the loop look for events once more, without sleeping."""
        if self._vigil.awake(_now()):
            if self._work:
                self._work = False
            else:
                os.sched_yield()
            self._loop.call_soon(self._look)
        else:
            self._awake = False
