"""Tries again what failed for a passing reason, after growing pauses, and says so in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Event
from typing import TypeVar

from nerite.core.errors import Internal, Unavailable
from nerite.scheduling.backoff import Backoff

_log = logging.getLogger("nerite.repository")
_T = TypeVar("_T")

TRIES = 6
"""In a row without any progress; about eight seconds in all."""


class PassingFailure(Exception):
    """Something failed that may work the next time."""

    def __init__(self, reason: str, *, progressed: bool = False) -> None:
        """``progressed``: a part was done, and is kept."""
        super().__init__(reason)
        self.progressed = progressed


def retried(what: str, attempt: Callable[[], _T], stopped: Event) -> _T:
    """Return what ``attempt`` returns in the end. ``what`` says in the log what is tried.

    Raises ``Internal`` when there is no progress any more, ``Unavailable`` once ``stopped`` is set, and what
    ``attempt`` raises.
    """
    backoff, failures = Backoff(first=0.5, limit=15.0), 0
    while True:
        if stopped.is_set():
            raise Unavailable(f"{what} was given up: the server is stopping")
        try:
            return attempt()
        except PassingFailure as failure:
            if failure.progressed:
                backoff, failures = Backoff(first=0.5, limit=15.0), 0
            failures += 1
            if failures >= TRIES:
                raise Internal(f"{what} failed {TRIES} times: {failure}") from None
            pause = backoff.failed(time.monotonic())
            _log.warning("%s failed, trying again%s: %s", what, f" in {pause:g} s" if pause else "", failure)
            stopped.wait(pause)
