"""Confidence sequences: intervals that contain the true value at all times at once. They are shown; they do not decide.

For a rate: Robbins' mixture of binomial likelihood ratios over a Beta(1/2, 1/2) prior. For a quantile: the number of
values below the true quantile is binomial with a known rate, so the same mixture bounds which order statistics may be
on either side of it (Howard and Ramdas 2022). References are in ``docs/decisions/0021-rollout-judge.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

_WIDTH: Final = math.log(1.02)
"""Width of a bucket of latencies, as a logarithm."""
_STEPS: Final = 28
"""Of a bisection."""


class Interval(NamedTuple):
    """An estimate and its bounds."""

    value: float
    low: float
    high: float


UNKNOWN: Final = Interval(math.nan, math.nan, math.nan)


def bucket_of(latency_us: float) -> int:
    """Return the number of the bucket that a latency is counted in."""
    return int(math.log(latency_us) / _WIDTH) if latency_us > 1.0 else 0


def upper_edge(bucket: int) -> float:
    """Return the greatest latency of a bucket, in microseconds."""
    return math.exp((bucket + 1) * _WIDTH)


def _log_mixture(hits: float, misses: float) -> float:
    """Return the logarithm of the mean likelihood of the counts over Beta(1/2, 1/2)."""
    return math.lgamma(hits + 0.5) + math.lgamma(misses + 0.5) - math.lgamma(hits + misses + 1) - math.log(math.pi)


def rate_interval(hits: float, requests: float, level: float) -> Interval:
    """Return the rate of ``hits`` in ``requests`` with bounds that hold at all times with probability ``1 - level``."""
    if requests <= 0:
        return Interval(math.nan, 0.0, 1.0)
    hits = min(hits, requests)
    misses = requests - hits
    least = _log_mixture(hits, misses) + math.log(level)
    """Of the log likelihood of a rate that is not rejected."""

    def bound(inside: float, outside: float) -> float:
        for _ in range(_STEPS):
            middle = (inside + outside) / 2
            if hits * math.log(middle) + misses * math.log1p(-middle) > least:
                inside = middle
            else:
                outside = middle
        return outside

    rate = hits / requests
    inside = min(max(rate, 1e-12), 1 - 1e-12)
    low = bound(inside, 1e-15) if hits else 0.0
    high = bound(inside, 1 - 1e-15) if misses else 1.0
    return Interval(rate, low, high)


def quantile_interval(counts: Mapping[int, float], quantile: float, level: float) -> Interval:
    """Return a quantile of latencies, counted by bucket, with bounds that hold at all times."""
    total = sum(counts.values())
    if not total:
        return UNKNOWN
    of_one, of_other, boundary = math.log(quantile), math.log1p(-quantile), -math.log(level)

    def rejected(below: float) -> bool:
        above = total - below
        return _log_mixture(below, above) - below * of_one - above * of_other >= boundary

    # Fewest and most values that may be at or below the true quantile.
    least, fewest = total * quantile, 0.0
    most, greatest = total * quantile, float(total)
    for _ in range(_STEPS):
        middle = (least + fewest) / 2
        least, fewest = (least, middle) if rejected(middle) else (middle, fewest)
        middle = (most + greatest) / 2
        most, greatest = (most, middle) if rejected(middle) else (middle, greatest)
    low, high = (0.0, math.inf)
    if rejected(0.0):
        low = upper_edge(bucket_at(counts, math.ceil(least)) - 1)
    if rejected(total):
        high = upper_edge(bucket_at(counts, min(math.floor(most) + 1, total)))
    return Interval(upper_edge(bucket_at(counts, math.ceil(total * quantile))), low, high)


def bucket_at(counts: Mapping[int, float], rank: float) -> int:
    """Return the bucket of the value with this rank, from 1."""
    seen, bucket = 0.0, 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            break
    return bucket
