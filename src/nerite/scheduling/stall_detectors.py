"""Detectors of stalls of event loops, engines, batches and queues. Pure deciders without a clock."""

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


class StallKind(Enum):
    """What a report of a stall says."""

    BLOCKED = "blocked"
    """The loop is blocked now."""
    ENDED = "ended"
    """The loop runs again after a reported stall."""
    PROCESS_STALLED = "process stalled"
    """The whole process was stalled until now."""


class StallReport(NamedTuple):
    """Report of a stall."""

    kind: StallKind
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
        self._quiet_until: dict[StallKind, int] = {}
        self._untold = dict.fromkeys(StallKind, 0)

    def answered(self, now: int) -> None:
        """Record a heartbeat of the loop."""
        self._last_heartbeat = now

    def check(self, now: int) -> StallReport | None:
        """Return the report that is due now, if any."""
        slept, self._looked = now - self._looked, now
        if slept > self.period + self._limit:
            self._last_heartbeat = now
            self._stalled_since = None
            return self._report(StallKind.PROCESS_STALLED, slept, now)
        since = self._stalled_since
        if since is not None and self._last_heartbeat > since:
            self._stalled_since = None
            return StallReport(StallKind.ENDED, self._last_heartbeat - since) if self._reported else None
        if since is not None:
            if self._reported or self._quiet(StallKind.BLOCKED, now):
                return None
            return self._report_blocked(since, now, before=1)
        if now - self._last_heartbeat > self._limit:
            self._stalled_since = self._last_heartbeat
            return self._report_blocked(self._last_heartbeat, now)
        return None

    def _report_blocked(self, since: int, now: int, before: int = 0) -> StallReport | None:
        """Return the report of the current stall; ``before``: how often it was counted as unreported."""
        self._untold[StallKind.BLOCKED] -= before
        report = self._report(StallKind.BLOCKED, now - since, now)
        self._reported = report is not None
        return report

    def _quiet(self, kind: StallKind, now: int) -> bool:
        return now < self._quiet_until.get(kind, now)

    def _report(self, kind: StallKind, nanoseconds: int, now: int) -> StallReport | None:
        if self._quiet(kind, now):
            self._untold[kind] += 1
            return None
        self._quiet_until[kind] = now + _QUIET
        untold, self._untold[kind] = self._untold[kind], 0
        return StallReport(kind, nanoseconds, untold)


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


_OVERDUE: Final = 500_000_000
"""Nanoseconds beyond which a delay is a fault, and not scheduling jitter."""


class QueueStallDetector:
    """Detects that requests wait beside an idle instance. Polled from time to time; times are in nanoseconds."""

    __slots__ = ("_begun", "_since")

    def __init__(self) -> None:
        self._begun = -1
        """Number of batches begun when requests were first found beside an idle instance; -1: none were found."""
        self._since = 0

    def check(self, waits: bool, due: int | None, begun: int, now: int) -> bool:
        """Return whether requests that could run have waited for too long, during which no batch began.

        ``waits``: there are requests, and an idle instance. ``due``: when one of them may run at the latest; None: now.
        """
        if not waits or (due is not None and due > now - _OVERDUE):
            self._begun = -1
            return False
        if begun != self._begun:
            self._begun, self._since = begun, now
            return False
        return now - self._since >= _OVERDUE
