"""Measures a server at one level of load after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final, NamedTuple

from nerite.bench.figures import Figures, figures
from nerite.bench.fleet import Fleet
from nerite.bench.measurement import Measurement, Rule, Window
from nerite.bench.objectives import Objective
from nerite.bench.plan import Level
from nerite.client import ClientError, ModelStatistics

_LOOK_SECONDS: Final = 0.1
BUSY: Final = 0.9
"""From this share of a processor on, a generator has no time to spare."""
LATE_SECONDS: Final = 0.001
"""A client that sends this much too late, at the 99th percentile, has not kept to its schedule."""

Count = Callable[[], ModelStatistics | None]


class Look(NamedTuple):
    """What there is to tell while a level is measured."""

    level: Level
    warming_up: bool
    part: float
    """How much of the shortest possible measurement is done, from 0 to 1."""
    windows: int
    rate: float
    """Answers a second in the last window; 0 if there was none yet."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a level of load showed."""

    level: Level
    figures: Figures
    windows: tuple[Window, ...]
    """All of them; the figures are of the last few."""
    stable: bool
    server: ModelStatistics | None
    """What the server counted meanwhile."""
    busy: float
    """The share of a processor that the busiest generator used."""
    spent: float
    """Seconds of processor time that generators used for an answer."""

    @property
    def client_is_the_limit(self) -> bool:
        """Whether a faster client might have shown other figures."""
        return self.busy >= BUSY or (self.level.open and self.figures.lag["p99"] > LATE_SECONDS * 1e3)


class _Mark(NamedTuple):
    """What was counted at the end of a window."""

    moment: float
    spent: tuple[float, ...]
    server: ModelStatistics | None


class Session:
    """Has a fleet put on loads, and looks at what comes of them."""

    def __init__(
        self,
        fleet: Fleet,
        rule: Rule,
        warm_up: float,
        objectives: Sequence[Objective] = (),
        count: Count = lambda: None,
    ) -> None:
        self._fleet = fleet
        self._rule = rule
        self._warm_up = warm_up
        self._objectives = tuple(objectives)
        self._count = count

    def run(self, levels: Sequence[Level], tell: Callable[[Look], None]) -> Iterator[Outcome]:
        """Yield what each level showed. Raises ``ClientError`` for one at which no request was answered."""
        for level in levels:
            self._fleet.begin(level)
            try:
                yield self._measured(level, tell)
            finally:
                self._fleet.end()

    def _measured(self, level: Level, tell: Callable[[Look], None]) -> Outcome:
        began = perf_counter()
        while (passed := perf_counter() - began) < self._warm_up:
            tell(Look(level, True, passed / self._warm_up, 0, 0.0))
            time.sleep(min(_LOOK_SECONDS, self._warm_up - passed))
        taken = self._fleet.take()
        now = perf_counter()
        measurement = Measurement(self._rule, now)
        # What ended between the two belongs to the first window.
        measurement.add(taken.records.split(now)[1], now)
        marks = [_Mark(now, taken.spent, self._count())]
        while not measurement.over:
            time.sleep(_LOOK_SECONDS)
            now = perf_counter()
            taken = self._fleet.take()
            if measurement.add(taken.records, now):
                marks.append(_Mark(now, taken.spent, self._count()))
            rate = measurement.windows[-1].rate if measurement.windows else 0.0
            tell(Look(level, False, measurement.progress(now), len(measurement.windows), rate))
        return self._outcome(level, measurement, marks)

    def _outcome(self, level: Level, measurement: Measurement, marks: Sequence[_Mark]) -> Outcome:
        found = figures(measurement.last, self._objectives)
        if found is None:
            reasons = [f"{count} x {text}" for text, count in measurement.failures.most_common(3)]
            raise ClientError("\n    ".join([f"no request was answered at {level}", *reasons]))
        first, last = marks[-len(measurement.last) - 1], marks[-1]
        spent = [after - before for before, after in zip(first.spent, last.spent, strict=True)]
        return Outcome(
            level=level,
            figures=found,
            windows=tuple(measurement.windows),
            stable=measurement.stable,
            server=last.server.since(first.server) if last.server is not None else None,
            busy=max(spent) / (last.moment - first.moment),
            spent=sum(spent) / found.answered,
        )
