"""Ends of requests as columns: counted together, each costs a fraction of what it costs by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from operator import not_
from typing import Final

import numpy as np
import numpy.typing as npt

from nerite.judge.latency_counts import Buckets, Floats, buckets_of
from nerite.judge.outcome import Outcome, Stratum

Mask = npt.NDArray[np.bool_]

LATENCIES: Final = ("latency_us", "first_us", "token_us")
"""Fields of an ``Outcome``: the rows of ``OutcomeBatch.latencies``."""
_TIMEOUT: Final = "timeout"


class OutcomeBatch:
    """Some outcomes, of at least one request, in the order in which they were observed."""

    def __init__(self, outcomes: Sequence[Outcome], counted: Sequence[int]) -> None:
        """``counted`` has for each request what was counted of it while it was under way, as bits by gate."""
        size = self.size = len(outcomes)
        self.outcomes = outcomes
        candidate, probability, at_ns, *latencies, errors, strata, clusters = zip(*outcomes, strict=True)
        self.errors: tuple[str, ...] = errors
        self.clusters: tuple[int, ...] = clusters
        self.candidate: Mask = np.array(candidate, bool)
        self.at_ns: npt.NDArray[np.int64] = np.array(at_ns, np.int64)
        self.latencies: Floats = np.array(latencies, float)
        """By row, as ``LATENCIES`` has them, and request."""
        self.buckets: Buckets = buckets_of(self.latencies)
        self.positive: Mask = self.latencies > 0.0
        self._positive = [bool(row.all()) for row in self.positive]
        self.counted = np.array(counted, np.int64) if any(counted) else None
        """None: nothing of all."""
        numbers = _Numbers()
        keys = zip(strata, probability, candidate, strict=True)
        self.group: npt.NDArray[np.intp] = np.fromiter(map(numbers.__getitem__, keys), np.intp, size)
        """Of each request, the number of its class: its stratum, probability and arm."""
        self.groups: list[tuple[Stratum, float, bool]] = list(numbers)
        judged = [0.0 < probability < 1.0 for _, probability, _ in self.groups]
        self.judged: Mask = np.ones(size, bool) if all(judged) else np.array(judged)[self.group]
        """Requests that were not assigned for certain."""
        self.failed = [place for place, error in enumerate(errors) if error] if any(errors) else []
        """Places of requests that were not answered well."""
        self.answered: Mask = np.ones(size, bool)
        self.answered[self.failed] = False
        self.timed = self.answered
        """Requests whose latencies are known: those that were answered, and those that took too long to be."""
        if _TIMEOUT in errors:
            self.timed = self.answered.copy()
            self.timed[[place for place in self.failed if errors[place] == _TIMEOUT]] = True

    @cached_property
    def judged_without_key(self) -> Mask:
        """Requests that are ``judged`` and have no sticky key."""
        if not any(self.clusters):
            return self.judged
        without: Mask = np.fromiter(map(not_, self.clusters), bool, self.size)
        without &= self.judged
        return without

    def sizes(self, where: Mask) -> dict[int, int]:
        """Return how many requests there are of each class, in the order of their first requests."""
        return self._sizes if where is self.judged else Counter(self.group[where].tolist())

    @cached_property
    def _sizes(self) -> dict[int, int]:
        return Counter(self.group[self.judged].tolist())

    def buckets_where(self, row: int, where: Mask) -> Buckets:
        """Return the buckets of one kind of latency, of the requests that have it."""
        found: Buckets = self.buckets[row][where if self._positive[row] else where & self.positive[row]]
        return found


class _Numbers(dict[tuple[Stratum, float, bool], int]):
    """Numbers keys in their order."""

    def __missing__(self, key: tuple[Stratum, float, bool]) -> int:
        number = self[key] = len(self)
        return number
