"""Search strategies that decide which configuration to measure next.

A search is a generator that yields a point and is sent its score. It never yields a point twice, and it is
deterministic: equal scores give equal points, so that an interrupted run resumes by replaying known scores.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Sequence
from statistics import NormalDist
from typing import Final, Literal, TypeAlias

import numpy as np

from nerite.core.tensor import Array
from nerite.tools.analyze.space import Point, Space

# Prediction of unmeasured points by a Gaussian process.
#
# Similar configurations perform similarly, so each measurement is evidence about all points, and several close to each
# other outweigh one inaccurate measurement. The process models ranks, not rates, so that it does not matter by how
# much bad configurations are worse, or how one that exceeds the limits compares with one within them.

_LENGTH_SCALE: Final = 1.0
"""Length scale of the kernel. Each axis has length 1, regardless of its number of values."""
_NOISE: Final = 0.15
"""Measurement noise, in standard deviations of all measurements."""
_STANDARD: Final = NormalDist()


def promise(places: Array, known: Sequence[int], order: Sequence[int]) -> Array:
    """Return the expected improvement of each row of coordinates in ``places`` over all measured points.

    ``known`` are the indices of the measured points, and ``order`` the number of measured points worse than each.
    """
    measured = places[list(known)]
    values = np.array([_STANDARD.inv_cdf((rank + 0.5) / len(known)) for rank in order])
    own = _similarity(measured, measured) + _NOISE**2 * np.eye(len(known))
    others = _similarity(places, measured)
    solved = np.linalg.solve(own, np.column_stack([values, others.T]))
    expected = others @ solved[:, 0]
    deviation = np.sqrt(np.maximum(1e-9, 1 - np.einsum("ij,ji->i", others, solved[:, 1:])))
    ahead = (expected - expected[list(known)].max()) / deviation
    probability = np.array([_STANDARD.cdf(each) for each in ahead.tolist()])
    density = np.array([_STANDARD.pdf(each) for each in ahead.tolist()])
    improvement: Array = deviation * (ahead * probability + density)
    improvement[list(known)] = 0.0
    return improvement


def _similarity(some: Array, others: Array) -> Array:
    """Return the similarity of each pair of points, from 0 to 1: a Matérn 3/2 kernel per axis, multiplied."""
    distance = np.sqrt(3) / _LENGTH_SCALE * np.abs(some[:, None] - others[None])
    similarity: Array = np.prod((1 + distance) * np.exp(-distance), axis=2)
    return similarity


Score: TypeAlias = tuple[int, float]
"""Larger is better."""
Search: TypeAlias = Generator[Point, Score, None]
Method = Literal["quick", "guided", "brute"]
_PART: Final = 4
"""The guided search and the repeated measurements after it use at most one in this many points."""
_FOR_AN_AXIS: Final = 20
"""Maximum number of points per axis, regardless of the size of the space."""
_CANDIDATES: Final = 3_000
"""Maximum number of points considered by the guided search."""


def search(method: Method, space: Space, points: int) -> Search:
    """Return a search by ``method`` that yields at most ``points`` points."""
    if method == "brute":
        return _brute(space, points)
    return _guided(space, points) if method == "guided" else _Climber(space, points).climb()


def budget(method: Method, space: Space, again: int, most: int | None = None) -> int:
    """Return the maximum number of points to measure. ``again`` is the cost of repeated measurements, in points."""
    points = space.size
    if method != "brute":
        # In a small space, each setting is tried at least once in both directions.
        fewest = 2 * len(space.axes) + 1
        points = min(points, max(fewest, min(points // _PART - again, _FOR_AN_AXIS * len(space.axes))))
    return points if most is None else min(points, most)


def _brute(space: Space, points: int) -> Search:
    for point in itertools.islice(space.points, points):
        _ = yield point


def _guided(space: Space, points: int) -> Search:
    """Start with points that are far apart, then always take the one with the largest expected improvement."""
    candidates = _candidates(space)
    number = {point: at for at, point in enumerate(candidates)}
    places = np.array([space.place(point) for point in candidates])
    known: dict[int, Score] = {}
    for start in dict.fromkeys(space.starts):
        if len(known) < points:
            known[number[start]] = yield start
    while len(known) < min(points, len(candidates)):
        worse = [sum(other < score for other in known.values()) for score in known.values()]
        # With a single known point there is nothing to compare.
        following = int(promise(places, list(known), worse).argmax()) if len(known) > 1 else 1
        known[following] = yield candidates[following]


def _candidates(space: Space) -> Sequence[Point]:
    """Return all points, or in a large space the starting points and a fixed random sample."""
    if space.size <= _CANDIDATES:
        return list(space.points)
    choose = random.Random(0)
    some = [tuple(map(choose.choice, space.axes.values())) for _ in range(_CANDIDATES)]
    return list(dict.fromkeys([*space.starts, *some]))


class _BudgetSpent(Exception):
    """The maximum number of points has been measured."""


class _Climber:
    """Hill climbing, one setting at a time."""

    def __init__(self, space: Space, most: int) -> None:
        self._space = space
        self._most = most
        self._known: dict[Point, Score] = {}

    def climb(self) -> Search:
        """Climb from the current configuration."""
        point, before = self._space.present, None
        try:
            while point != before:
                before = point
                for axis in range(len(point)):
                    point = yield from self._along(point, axis)
        except _BudgetSpent:
            return

    def _along(self, point: Point, axis: int) -> Generator[Point, Score, Point]:
        """Move up or down an axis while the score improves; return the best point."""
        for direction in (1, -1):
            found = point
            while (further := self._space.step(found, axis, direction)) is not None:
                score = yield from self._score(found)
                further_score = yield from self._score(further)
                if further_score <= score:
                    break
                found = further
            if found != point:
                return found
        return point

    def _score(self, point: Point) -> Generator[Point, Score, Score]:
        if point not in self._known:
            if len(self._known) >= self._most:
                raise _BudgetSpent
            self._known[point] = yield point
        return self._known[point]
