"""The highest load within a limit of the latency: what to measure next, and what has been found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from nerite.bench.plan import Level
from nerite.bench.session import Outcome

KEPT_UP: Final = 0.95
"""A server that answers less than this share of what it is asked has not kept up."""
_PRECISE: Final = 1.05
"""The search ends when the loads on both sides of the limit are no further apart than by this factor."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How long answers may take."""

    measure: str
    """A quantile, as figures name it, or ``mean``."""
    milliseconds: float

    def met_by(self, outcome: Outcome) -> bool:
        """Say whether a load was within it: answered in time, without failures, and as fast as it came."""
        figures, level = outcome.figures, outcome.level
        latency = figures.latency.mean if self.measure == "mean" else figures.latency[self.measure]
        kept_up = not level.open or figures.rate >= KEPT_UP * level.rate
        return latency <= self.milliseconds and kept_up and not figures.failed

    def __str__(self) -> str:
        return f"{self.measure} of at most {self.milliseconds:g} ms"


class Search:
    """Measures the lowest and the highest load, and then between the two sides of the limit. It is told what came."""

    def __init__(self, limit: Limit, lowest: Level, highest: Level) -> None:
        self.limit = limit
        self.best: Outcome | None = None
        """Of the highest load so far that was within the limit."""
        self.next: Level | None = lowest
        """What to measure; None when it is over."""
        self._highest = highest
        self._beyond: Level | None = None

    def add(self, outcome: Outcome) -> None:
        """Go on from what the load ``next`` showed."""
        level = outcome.level
        if self.limit.met_by(outcome):
            self.best = outcome
        else:
            self._beyond = level
        if self.best is None or self.best.level.value >= self._highest.value:
            self.next = None
        elif self._beyond is None:
            self.next = self._highest
        else:
            self.next = self._between(self.best.level, self._beyond)

    @staticmethod
    def _between(within: Level, beyond: Level) -> Level | None:
        # Loads differ by factors, and not by steps, in what they do to a server.
        middle = math.sqrt(within.value * beyond.value)
        if beyond.value <= within.value * _PRECISE:
            return None
        if within.open:
            return Level(rate=float(f"{middle:.3g}"), arrivals=within.arrivals)
        count = min(max(round(middle), within.concurrency + 1), beyond.concurrency - 1)
        return Level(concurrency=count) if count > within.concurrency else None
