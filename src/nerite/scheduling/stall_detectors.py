"""Detectors of stalls of event loops, engines and batches, and exponential backoff. Pure deciders without a clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final, NamedTuple

from nerite.core.engine_report import EngineReport
from nerite.core.request import InferenceRequest

_CHECKS: Final = 4
"""Number of checks within the limit."""
_SHORTEST: Final = 10_000_000
"""Minimum nanoseconds between two checks, however small the limit."""
_QUIET: Final = 60_000_000_000
"""Nanoseconds after a report during which further stalls of the same kind are only counted."""


class What(Enum):
    """Kind of a stall report."""

    STANDS = "stands"
    """The loop is blocked now."""
    WENT_ON = "went on"
    """The loop runs again after a reported stall."""
    STOOD_STILL = "stood still"
    """The whole process was stalled until now."""


class News(NamedTuple):
    """Report of a stall."""

    what: What
    nanoseconds: int
    """Duration of the stall so far."""
    untold: int = 0
    """Number of earlier stalls of the same kind that were not reported."""


class LoopStallDetector:
    """Detects stalls of one event loop.

    The owner sends heartbeats to the loop, reports each answer (``answered``), and calls ``check`` every ``period``. A
    stall is reported once when it exceeds the limit, and again when it is over. If the owner itself could not run, the
    whole process was stalled. After a report, further stalls of the same kind are only counted for a while; one that
    still lasts at the end of that time is reported.
    """

    def __init__(self, limit: int, now: int) -> None:
        """``limit``: nanoseconds that the loop may be blocked without a report."""
        self.period = max(limit // _CHECKS, _SHORTEST)
        """Nanoseconds between two calls of ``check``."""
        self._limit = limit
        self._looked = now
        self._last_heartbeat = now
        self._stalled_since: int | None = None
        self._reported = False
        """The current stall has been reported."""
        self._quiet_until: dict[What, int] = {}
        self._untold = dict.fromkeys(What, 0)

    def answered(self, now: int) -> None:
        """Record a heartbeat of the loop."""
        self._last_heartbeat = now

    def check(self, now: int) -> News | None:
        """Return the report that is due now, if any."""
        slept, self._looked = now - self._looked, now
        if slept > self.period + self._limit:
            self._last_heartbeat = now
            self._stalled_since = None
            return self._news(What.STOOD_STILL, slept, now)
        since = self._stalled_since
        if since is not None and self._last_heartbeat > since:
            self._stalled_since = None
            return News(What.WENT_ON, self._last_heartbeat - since) if self._reported else None
        if since is not None:
            return (
                None if self._reported or self._quiet(What.STANDS, now) else self._report_blocked(since, now, before=1)
            )
        if now - self._last_heartbeat > self._limit:
            self._stalled_since = self._last_heartbeat
            return self._report_blocked(self._last_heartbeat, now)
        return None

    def _report_blocked(self, since: int, now: int, before: int = 0) -> News | None:
        """Return the report of the current stall; ``before``: how often it was counted as unreported."""
        self._untold[What.STANDS] -= before
        news = self._news(What.STANDS, now - since, now)
        self._reported = news is not None
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


_LATE: Final = 1.0


class EngineStallDetector:
    """Detects that an LLM engine hangs. Times are in seconds.

    An engine with unfinished requests reports after each step; one that sends no report for too long hangs.
    """

    __slots__ = ("_last_sign", "_owed", "_patience")

    def __init__(self) -> None:
        self._owed: set[InferenceRequest] = set()
        """Requests passed to the engine that it has not reported as ended."""
        self._patience = 0
        self._last_sign = 0.0
        """When it last reported, or was last idle."""

    def handed(self, requests: Collection[InferenceRequest], now: float) -> None:
        """Record that requests are passed to the engine."""
        if not self._owed:
            self._last_sign = now
        self._owed.update(requests)

    def reported(self, report: EngineReport, now: float) -> None:
        """Process a report of the engine."""
        self._last_sign = now
        self._patience = report.patience
        for progress in report.progress:
            if progress.ended is not None:
                self._owed.discard(progress.request)

    def answered(self, requests: Iterable[InferenceRequest]) -> None:
        """Record that requests have had their last response."""
        self._owed.difference_update(requests)

    def gone(self) -> None:
        """Reset the detector, because the engine has gone."""
        self._owed.clear()
        self._patience = 0

    @property
    def hangs_at(self) -> float | None:
        """When the engine counts as hung unless it reports before; None for never."""
        return self._last_sign + self._patience if self._patience and self._owed else None

    def hangs(self, now: float) -> bool:
        """Return whether the engine hangs. Call at ``hangs_at``.

        A much later call means that the caller was stalled too, so reports of the engine may be unread: it gets its
        full time again.
        """
        at = self.hangs_at
        if at is None or now < at:
            return False
        if now - at > _LATE:
            self._last_sign = now
            return False
        return True

    @property
    def patience(self) -> int:
        """Maximum number of seconds between two reports; 0 for no limit."""
        return self._patience


_LONGER = 2


class SlowBatchDetector:
    """Detects unusually long executions of one instance, which is polled from time to time. Times are in seconds.

    Some models normally compute for minutes, so the threshold is learned: an execution is reported once it exceeds
    ``limit`` and twice the duration of the longest finished execution.
    """

    __slots__ = ("_begun", "_last", "_limit", "_longest", "_number", "_reported")

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._number: int | None = None
        """Number of the execution in progress at the last call of ``check``."""
        self._begun = self._last = 0.0
        """When that execution was first and last seen."""
        self._longest = 0.0
        self._reported = False

    def check(self, number: int | None, now: float) -> float | None:
        """Return the minimum duration of execution ``number`` if it must be reported now (once each); else None.

        ``number`` is None while idle; consecutive executions have different numbers.
        """
        if number != self._number:
            if self._number is not None:
                self._longest = max(self._longest, self._last - self._begun)
            self._number, self._begun, self._reported = number, now, False
        self._last = now
        lasted = now - self._begun
        if number is None or self._reported or lasted < max(self._limit, _LONGER * self._longest):
            return None
        self._reported = True
        return lasted


class ExponentialBackoff:
    """Computes retry delays that double with each failure and reset after a quiet period. Times are in seconds."""

    __slots__ = ("_failures", "_last", "first", "limit", "quiet")

    def __init__(self, first: float = 0.1, limit: float = 30.0, quiet: float = 60.0) -> None:
        self.first = first
        self.limit = limit
        self.quiet = quiet
        self._failures = 0
        self._last = 0.0

    def failed(self, now: float) -> float:
        """Record a failure; return how long to wait before a retry. The first failure is retried at once."""
        if self._failures and now - self._last > self.quiet:
            self._failures = 0
        self._last = now
        self._failures += 1
        if self._failures == 1:
            return 0.0
        # 2**1000 overflows a float; any limit is reached long before 2**100.
        return min(self.limit, self.first * 2.0 ** min(self._failures - 2, 100))
