"""Numbers of latencies by size: what quantiles, thresholds and confidence sequences are computed from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Buckets = npt.NDArray[np.intp]

_WIDTH: Final = math.log(1.02)
"""Width of a bucket, as a logarithm."""
BUCKETS: Final = 1600
"""The last one begins with a year and a half in microseconds; longer latencies are counted there."""


def buckets_of(latencies_us: Floats) -> Buckets:
    """Return the numbers of the buckets that latencies are counted in."""
    numbers: Buckets = (np.log(np.maximum(latencies_us, 1.0)) * (1 / _WIDTH)).astype(np.intp)
    return np.minimum(numbers, BUCKETS - 1, out=numbers)


def upper_edge(bucket: int) -> float:
    """Return the greatest latency of a bucket, in microseconds."""
    return math.exp((bucket + 1) * _WIDTH)


class LatencyCounts:
    """Numbers of latencies by bucket. Quantiles are exact to 2 %."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Floats = np.zeros(BUCKETS)

    @property
    def total(self) -> float:
        """Number of latencies."""
        return float(self._counts.sum())

    def add(self, buckets: Buckets) -> None:
        """Count latencies of these buckets."""
        np.add.at(self._counts, buckets, 1.0)

    def merge(self, other: LatencyCounts) -> None:
        """Add the counts of another."""
        self._counts += other._counts

    def halve(self) -> None:
        """Let each latency count for half, and forget those that hardly count any more."""
        self._counts[self._counts < 0.25] = 0.0
        self._counts *= 0.5

    def copy(self) -> LatencyCounts:
        """Return the counts as they are now."""
        made = LatencyCounts()
        made._counts[:] = self._counts
        return made

    def at(self, rank: float) -> float:
        """Return the upper edge of the bucket of the latency with this rank, from 1, in microseconds."""
        return upper_edge(self._bucket(rank))

    def below(self, rank: float) -> float:
        """Return the lower edge of that bucket."""
        return upper_edge(self._bucket(rank) - 1)

    def _bucket(self, rank: float) -> int:
        up_to = self._counts.cumsum()
        return int(np.searchsorted(up_to, min(max(rank, 1.0), up_to[-1])))

    def quantile(self, quantile: float) -> float:
        """Return a quantile in microseconds; NaN if nothing was counted."""
        total = self.total
        return self.at(math.ceil(total * quantile)) if total else math.nan

    def to_json(self) -> list[tuple[int, float]]:
        """Return pairs of bucket and count; ``of_json`` restores them."""
        (buckets,) = self._counts.nonzero()
        return list(zip(buckets.tolist(), self._counts[buckets].tolist(), strict=True))

    @classmethod
    def of_json(cls, pairs: Iterable[Sequence[Any]]) -> LatencyCounts:
        """Restore counts. Raises an exception of Python for what has another form."""
        made = cls()
        for bucket, count in pairs:
            made._counts[int(bucket)] = float(count)
        return made
