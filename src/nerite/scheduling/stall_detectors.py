"""When an event loop stands still: a decider without a clock.

Whoever asks the loop again and again whether it is there tells each answer (``answered``), and asks what follows
(``look``). A stall is told once it is longer than it may be, and once more when it is over. If whoever asks could not
run themselves, it is not the loop that stood still but all of the process. After news others of the kind are counted
for a while; a stall that still goes on then is told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final, NamedTuple

from nerite.core.engine_report import EngineReport
from nerite.core.request import InferenceRequest

_LOOKS: Final = 4
"""Within the time that the loop may stand still."""
_SHORTEST: Final = 10_000_000
"""Nanoseconds between two looks at the least, however little is allowed."""
_QUIET: Final = 60_000_000_000
"""Nanoseconds after news in which others of the kind are counted only."""


class What(Enum):
    """What has happened."""

    STANDS = "stands"
    """The loop, now."""
    WENT_ON = "went on"
    """The loop, after a stall that was told."""
    STOOD_STILL = "stood still"
    """The process, until now."""


class News(NamedTuple):
    """What is to be told."""

    what: What
    nanoseconds: int
    """How long it lasted, or has lasted so far."""
    untold: int = 0
    """Such moments before it that were not told."""


class LoopStallDetector:
    """Over one loop."""

    def __init__(self, limit: int, now: int) -> None:
        """``limit``: nanoseconds that the loop may stand still."""
        self.period = max(limit // _LOOKS, _SHORTEST)
        """When to look again."""
        self._limit = limit
        self._looked = now
        self._there = now
        self._stalled_since: int | None = None
        self._told = False
        """The stall that goes on was."""
        self._quiet_until: dict[What, int] = {}
        self._untold = dict.fromkeys(What, 0)

    def answered(self, now: int) -> None:
        """Note that the loop is there."""
        self._there = now

    def look(self, now: int) -> News | None:
        """Return what is to be told now."""
        slept, self._looked = now - self._looked, now
        if slept > self.period + self._limit:
            self._there = now
            self._stalled_since = None
            return self._news(What.STOOD_STILL, slept, now)
        since = self._stalled_since
        if since is not None and self._there > since:
            self._stalled_since = None
            return News(What.WENT_ON, self._there - since) if self._told else None
        if since is not None:
            return None if self._told or self._quiet(What.STANDS, now) else self._stands(since, now, before=1)
        if now - self._there > self._limit:
            self._stalled_since = self._there
            return self._stands(self._there, now)
        return None

    def _stands(self, since: int, now: int, before: int = 0) -> News | None:
        """Return the news of a stall that goes on; ``before``: how often it was counted, and not told."""
        self._untold[What.STANDS] -= before
        news = self._news(What.STANDS, now - since, now)
        self._told = news is not None
        return news

    def _quiet(self, what: What, now: int) -> bool:
        return now < self._quiet_until.get(what, now)

    def _news(self, what: What, nanoseconds: int, now: int) -> News | None:
        if self._quiet(what, now):
            self._untold[what] += 1
            return None
        self._quiet_until[what] = now + _QUIET
        untold, self._untold[what] = self._untold[what], 0
        return News(what, nanoseconds, untold)


# Whether an engine still takes steps. A decider without a clock: it is told the time, in seconds.
#
# An engine that owes somebody an answer says something after each step. One that says nothing for too long hangs.

_LATE: Final = 1.0


class EngineStallDetector:
    """On one engine."""

    __slots__ = ("_owed", "_patience", "_sign")

    def __init__(self) -> None:
        self._owed: set[InferenceRequest] = set()
        """Requests that the engine has, and has not said that it is done with."""
        self._patience = 0
        self._sign = 0.0
        """When it last showed that it lives, or had nothing to do."""

    def handed(self, requests: Collection[InferenceRequest], now: float) -> None:
        """Note that the engine is given requests."""
        if not self._owed:
            self._sign = now
        self._owed.update(requests)

    def reported(self, report: EngineReport, now: float) -> None:
        """Note that the engine says something."""
        self._sign = now
        self._patience = report.patience
        for progress in report.progress:
            if progress.ended is not None:
                self._owed.discard(progress.request)

    def answered(self, requests: Iterable[InferenceRequest]) -> None:
        """Note that requests have had their last response."""
        self._owed.difference_update(requests)

    def gone(self) -> None:
        """Note that there is no engine any more."""
        self._owed.clear()
        self._patience = 0

    @property
    def hangs_at(self) -> float | None:
        """When it hangs, if it says nothing until then; None: it may be silent for ever."""
        return self._sign + self._patience if self._patience and self._owed else None

    def hangs(self, now: float) -> bool:
        """Return whether it hangs. For whoever looks at ``hangs_at``.

        Whoever looks much later has stood still as well, and what the engine has said may be unread: it gets its time
        again.
        """
        at = self.hangs_at
        if at is None or now < at:
            return False
        if now - at > _LATE:
            self._sign = now
            return False
        return True

    @property
    def patience(self) -> int:
        """Seconds that it may be silent."""
        return self._patience


# When an execution lasts so long that somebody may ask what it is at: a decider without a clock.
#
# Some models compute for minutes, and that is no news. So what counts as long is learned: an execution is told once
# it has taken longer than ``limit``, and more than twice as long as the longest that came to an end before it.

_LONGER = 2


class SlowBatchDetector:
    """Over the executions of one instance, looked at from time to time. Times are seconds."""

    __slots__ = ("_begun", "_last", "_limit", "_longest", "_number", "_told")

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._number: int | None = None
        """Of the execution that was under way when somebody last looked."""
        self._begun = self._last = 0.0
        """When that was seen for the first time, and for the last."""
        self._longest = 0.0
        self._told = False

    def look(self, number: int | None, now: float) -> float | None:
        """Return how long the execution ``number`` has lasted at least, if that is to be told now: once for each.

        ``number`` is None while nothing is executed; no two executions in a row have the same.
        """
        if number != self._number:
            if self._number is not None:
                self._longest = max(self._longest, self._last - self._begun)
            self._number, self._begun, self._told = number, now, False
        self._last = now
        lasted = now - self._begun
        if number is None or self._told or lasted < max(self._limit, _LONGER * self._longest):
            return None
        self._told = True
        return lasted


# How long to wait before something that failed is tried again. A pure decider: it is told the time.


class ExponentialBackoff:
    """Doubles the wait with each failure; begins again after a while without one. Times in seconds."""

    __slots__ = ("_failures", "_last", "first", "limit", "quiet")

    def __init__(self, first: float = 0.1, limit: float = 30.0, quiet: float = 60.0) -> None:
        self.first = first
        self.limit = limit
        self.quiet = quiet
        self._failures = 0
        self._last = 0.0

    def failed(self, now: float) -> float:
        """Note a failure; return how long to wait. The first one in a while is worth a try at once."""
        if self._failures and now - self._last > self.quiet:
            self._failures = 0
        self._last = now
        self._failures += 1
        if self._failures == 1:
            return 0.0
        # 2 to the thousandth is beyond a float; a limit is reached long before 2 to the hundredth.
        return min(self.limit, self.first * 2.0 ** min(self._failures - 2, 100))
