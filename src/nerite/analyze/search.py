"""What to measure next. A search is a generator: it yields a point, and is sent how good that is.

It never asks for a point twice, and asks the same again if it is told the same: a run that was stopped goes on by
answering from what is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Final, Literal, TypeAlias

from nerite.analyze.space import Point, Space

Score: TypeAlias = tuple[int, float]
"""The larger, the better."""
Search: TypeAlias = Generator[Point, Score, None]
Method = Literal["quick", "guided", "brute"]
_PART: Final = 4
"""The guided search measures at most this part of all points."""


def search(method: Method, space: Space) -> Search:
    """Return a search of this kind."""
    if method == "brute":
        return _brute(space)
    return _Climber(space, budget(method, space)).climbs(several=method == "guided")


def budget(method: Method, space: Space) -> int:
    """Return how many points it measures at most."""
    if method == "brute":
        return space.size
    # In a small space at least each setting is tried in both directions.
    fewest = 2 * len(space.axes) + 1
    return min(space.size, max(fewest, space.size // _PART))


def _brute(space: Space) -> Search:
    yield from space.points


class _Spent(Exception):
    """Nothing more may be measured."""


class _Climber:
    """Goes uphill, a setting at a time, and two at a time where that leads nowhere."""

    def __init__(self, space: Space, most: int) -> None:
        self._space = space
        self._most = most
        self._known: dict[Point, Score] = {}

    def climbs(self, *, several: bool) -> Search:
        """Climb from the present configuration; ``several``: with trades, and from other starts, too."""
        try:
            for start in self._space.starts if several else (self._space.present,):
                yield from self._climb(start, trades=several)
        except _Spent:
            return

    def _climb(self, point: Point, *, trades: bool) -> Generator[Point, Score, None]:
        while True:
            before = point
            for axis in range(len(point)):
                point = yield from self._along(point, {axis: 1}, {axis: -1})
            if trades and point == before:
                # Instances and threads share the cores: one more of these may pay with one less of those.
                for one, other in itertools.combinations(range(len(point)), 2):
                    point = yield from self._along(point, {one: 1, other: -1}, {one: -1, other: 1})
            if point == before:
                return

    def _along(self, point: Point, *ways: dict[int, int]) -> Generator[Point, Score, Point]:
        """Go one of the ways for as long as it gets better."""
        for way in ways:
            found = point
            while (further := self._space.step(found, way)) is not None:
                here = yield from self._score(found)
                there = yield from self._score(further)
                if there <= here:
                    break
                found = further
            if found != point:
                return found
        return point

    def _score(self, point: Point) -> Generator[Point, Score, Score]:
        if point not in self._known:
            if len(self._known) >= self._most:
                raise _Spent
            self._known[point] = yield point
        return self._known[point]
