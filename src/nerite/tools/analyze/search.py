"""What to measure next. A search is a generator: it yields a point, and is sent how good that is.

It never asks for a point twice, and asks the same again if it is told the same: a run that was stopped goes on by
answering from what is known.
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

# What measurements of some points let expect of the others: a Gaussian process. Pure.
#
# Points that differ little answer much alike, so each measurement says something about all of them, and several near
# each other say more than one that is not exact. What is expected are ranks, not rates: it does not matter then by
# how much the bad ones are worse, or how one that exceeds the limits compares with one that keeps to them.

_REACH: Final = 1.0
"""How far a measurement is heard of. An axis is as long as 1, however many values it has."""
_NOISE: Final = 0.15
"""How far, in standard deviations of all of them, a measurement may be from the truth."""
_STANDARD: Final = NormalDist()


def promise(places: Array, known: Sequence[int], order: Sequence[int]) -> Array:
    """Return for each of ``places``, which are rows of coordinates, how much better it may be than all that are known.

    ``known`` are those that were measured, and ``order`` how many of them are worse than each.
    """
    measured = places[list(known)]
    values = np.array([_STANDARD.inv_cdf((rank + 0.5) / len(known)) for rank in order])
    own = _likeness(measured, measured) + _NOISE**2 * np.eye(len(known))
    others = _likeness(places, measured)
    solved = np.linalg.solve(own, np.column_stack([values, others.T]))
    expected = others @ solved[:, 0]
    deviation = np.sqrt(np.maximum(1e-9, 1 - np.einsum("ij,ji->i", others, solved[:, 1:])))
    ahead = (expected - expected[list(known)].max()) / deviation
    above = np.array([_STANDARD.cdf(each) for each in ahead.tolist()])
    there = np.array([_STANDARD.pdf(each) for each in ahead.tolist()])
    improvement: Array = deviation * (ahead * above + there)
    improvement[list(known)] = 0.0
    return improvement


def _likeness(some: Array, others: Array) -> Array:
    """Return how much each is like each of the others, from 0 to 1 (Matérn 3/2, axis by axis)."""
    away = np.sqrt(3) / _REACH * np.abs(some[:, None] - others[None])
    likeness: Array = np.prod((1 + away) * np.exp(-away), axis=2)
    return likeness


Score: TypeAlias = tuple[int, float]
"""The larger, the better."""
Search: TypeAlias = Generator[Point, Score, None]
Method = Literal["quick", "guided", "brute"]
_PART: Final = 4
"""The guided search, and those that are measured again after it, are at most this part of all points."""
_FOR_AN_AXIS: Final = 20
"""More points than that for each axis are not needed, however many there are."""
_CANDIDATES: Final = 3_000
"""How many points are thought about at once."""


def search(method: Method, space: Space, points: int) -> Search:
    """Return a search of this kind, of so many points at most."""
    if method == "brute":
        return _brute(space, points)
    return _guided(space, points) if method == "guided" else _Climber(space, points).climb()


def budget(method: Method, space: Space, again: int, most: int | None = None) -> int:
    """Return how many points to measure at most; ``again`` are those whose measuring again takes as long."""
    points = space.size
    if method != "brute":
        # In a small space at least each setting is tried in both directions.
        fewest = 2 * len(space.axes) + 1
        points = min(points, max(fewest, min(points // _PART - again, _FOR_AN_AXIS * len(space.axes))))
    return points if most is None else min(points, most)


def _brute(space: Space, points: int) -> Search:
    for point in itertools.islice(space.points, points):
        _ = yield point


def _guided(space: Space, points: int) -> Search:
    """Begin with points that are far from each other, then always take the one that promises most."""
    candidates = _candidates(space)
    number = {point: at for at, point in enumerate(candidates)}
    places = np.array([space.place(point) for point in candidates])
    known: dict[int, Score] = {}
    for start in dict.fromkeys(space.starts):
        if len(known) < points:
            known[number[start]] = yield start
    while len(known) < min(points, len(candidates)):
        worse = [sum(other < score for other in known.values()) for score in known.values()]
        # The first point was not better than nothing.
        following = int(promise(places, list(known), worse).argmax()) if len(known) > 1 else 1
        known[following] = yield candidates[following]


def _candidates(space: Space) -> Sequence[Point]:
    """Return all points, or the starts and some, always the same, of very many."""
    if space.size <= _CANDIDATES:
        return list(space.points)
    choose = random.Random(0)
    some = [tuple(map(choose.choice, space.axes.values())) for _ in range(_CANDIDATES)]
    return list(dict.fromkeys([*space.starts, *some]))


class _Spent(Exception):
    """Nothing more may be measured."""


class _Climber:
    """Goes uphill, a setting at a time."""

    def __init__(self, space: Space, most: int) -> None:
        self._space = space
        self._most = most
        self._known: dict[Point, Score] = {}

    def climb(self) -> Search:
        """Climb from the present configuration."""
        point, before = self._space.present, None
        try:
            while point != before:
                before = point
                for axis in range(len(point)):
                    point = yield from self._along(point, axis)
        except _Spent:
            return

    def _along(self, point: Point, axis: int) -> Generator[Point, Score, Point]:
        """Go up or down an axis for as long as it gets better."""
        for way in (1, -1):
            found = point
            while (further := self._space.step(found, axis, way)) is not None:
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
