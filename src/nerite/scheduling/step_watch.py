"""Whether an engine still takes steps. A decider without a clock: it is told the time, in seconds.

An engine that owes somebody an answer says something after each step. One that says nothing for too long hangs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from nerite.core.engine_report import EngineReport
from nerite.core.request import InferenceRequest

_LATE: Final = 1.0


class StepWatch:
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
