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
        self.fleet = fleet
        self.rule = rule
        self.warm_up = warm_up
        self.objectives = tuple(objectives)
        self.count = count

    def run(self, levels: Sequence[Level], tell: Callable[[Look], None]) -> Iterator[Outcome]:
        """Yield what each level showed. Raises ``ClientError`` for one at which no request was answered."""
        for level in levels:
            yield self.measure(level, tell)

    def measure(self, level: Level, tell: Callable[[Look], None]) -> Outcome:
        """Return what a level showed. Raises ``ClientError`` if no request was answered."""
        return together([self], level, tell)[0]


def together(sessions: Sequence[Session], level: Level, tell: Callable[[Look], None]) -> list[Outcome]:
    """Put a load on by all sessions at once until each has measured; return what they saw. Raises as ``measure``."""
    begun: list[Session] = []
    try:
        for session in sessions:
            session.fleet.begin(level)
            begun.append(session)
        _warm_up(max(session.warm_up for session in sessions), level, tell)
        watches = [_Watch(session, level) for session in sessions]
        # Who is done keeps up its load, which the others are measured beside.
        while under_way := [watch for watch in watches if not watch.over]:
            time.sleep(_LOOK_SECONDS)
            tell(min((watch.look() for watch in under_way), key=lambda look: look.part))
        return [watch.outcome() for watch in watches]
    finally:
        for session in begun:
            session.fleet.end()


def _warm_up(seconds: float, level: Level, tell: Callable[[Look], None]) -> None:
    began = perf_counter()
    while (passed := perf_counter() - began) < seconds:
        tell(Look(level, True, passed / seconds, 0, 0.0))
        time.sleep(min(_LOOK_SECONDS, seconds - passed))


class _Watch:
    """What a session sees of a level."""

    def __init__(self, session: Session, level: Level) -> None:
        self._session = session
        self._level = level
        taken = session.fleet.take()
        now = perf_counter()
        self._measurement = Measurement(session.rule, now)
        # What ended between the two belongs to the first window.
        self._measurement.add(taken.records.split(now)[1], now)
        self._marks = [_Mark(now, taken.spent, session.count())]

    @property
    def over(self) -> bool:
        """Whether it has seen enough."""
        return self._measurement.over

    def look(self) -> Look:
        """Take what there is; say how far it has come."""
        now = perf_counter()
        taken = self._session.fleet.take()
        measurement = self._measurement
        if measurement.add(taken.records, now):
            self._marks.append(_Mark(now, taken.spent, self._session.count()))
        rate = measurement.windows[-1].rate if measurement.windows else 0.0
        return Look(self._level, False, measurement.progress(now), len(measurement.windows), rate)

    def outcome(self) -> Outcome:
        """Return what it showed. Raises ``ClientError`` if no request was answered."""
        measurement = self._measurement
        found = figures(measurement.last, self._session.objectives)
        if found is None:
            reasons = [f"{count} x {text}" for text, count in measurement.failures.most_common(3)]
            raise ClientError("\n    ".join([f"no request was answered at {self._level}", *reasons]))
        first, last = self._marks[-len(measurement.last) - 1], self._marks[-1]
        spent = [after - before for before, after in zip(first.spent, last.spent, strict=True)]
        return Outcome(
            level=self._level,
            figures=found,
            windows=tuple(measurement.windows),
            stable=measurement.stable,
            server=last.server.since(first.server) if last.server is not None else None,
            busy=max(spent) / (last.moment - first.moment),
            spent=sum(spent) / found.answered,
        )
