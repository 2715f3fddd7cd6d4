"""Histograms: how many values lie up to each bound. Counting is a search in a short list; the sums are the reader's."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple


class Exemplar(NamedTuple):
    """One of the values, and where there is more about it."""

    trace_id: int
    value: float
    at: float
    """Seconds since the epoch."""


_NONE: Final[Mapping[int, Exemplar]] = MappingProxyType({})


class Distribution:
    """Of one quantity."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` ascend; what is above the last has a place of its own."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By the first bound that a value does not exceed."""
        self.total = 0.0
        self.exemplars = _NONE
        """By place."""

    @classmethod
    def of(
        cls, bounds: Sequence[float], counts: list[int], total: float, exemplars: Mapping[int, Exemplar] = _NONE
    ) -> Distribution:
        """Return what was counted elsewhere; ``counts`` stays the caller's."""
        made = cls.__new__(cls)
        made.bounds, made.counts, made.total, made.exemplars = bounds, counts, total, exemplars
        return made

    def note(self, value: float, count: int = 1) -> None:
        """Count a value that was there ``count`` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def coarser(self, bounds: Sequence[float]) -> Distribution:
        """Return the same with some of the bounds."""
        made = Distribution(bounds)
        made.total = self.total
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            made.counts[bisect_left(bounds, bound)] += count
        return made


def one_two_five(most: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50, and so on up to ``most``."""
    bounds: list[float] = []
    decade = 1
    while decade <= most:
        bounds += [step * decade for step in (1, 2, 5) if step * decade <= most]
        decade *= 10
    return bounds
