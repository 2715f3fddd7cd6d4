"""How much work arrives at a pool: now, and when a member that is started now will be ready."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

_SHORT: Final = 10
"""Seconds in which a change of the rate is noticed."""
_LONG: Final = 60
"""Seconds over which a rate that has not changed is averaged."""
_TREND: Final = 120
_RECENT: Final = 40
"""Seconds over which the trend must go on: a step that is over is no trend."""
_BUCKET: Final = 10
_FEWEST: Final = 6
"""Buckets without which there is no trend."""
_SIGNIFICANT: Final = 3.0
"""Standard errors from which a change counts."""
_MOST: Final = 2.0
"""A trend is believed up to this multiple of the rate now."""


class DemandForecast:
    """Estimates a rate from its amounts in each second. Chance alone does not move the estimate upwards."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_TREND)
        self.rate = 0.0
        """A second, now."""

    def add(self, amount: float, seconds: float) -> None:
        """Add what arrived in an interval of about a second."""
        rates = self._rates
        rates.append(amount / seconds)
        recent = _last(rates, _SHORT)
        short = sum(recent) / len(recent)
        before = list(islice(reversed(rates), _SHORT, _LONG))
        if not before:
            self.rate = short
            return
        mean, error = _mean_and_deviation(before)
        changed = short - mean > _SIGNIFICANT * error / math.sqrt(len(recent))
        self.rate = short if changed else (short * len(recent) + mean * len(before)) / (len(recent) + len(before))

    def ahead(self, seconds: float) -> float:
        """Return the rate that is expected in so many seconds: more than now if it rises, never less."""
        slope = min(self._slope(_TREND, significant=True), self._slope(_RECENT, significant=False))
        return min(self.rate + max(slope, 0.0) * seconds, _MOST * self.rate)

    def _slope(self, seconds: int, *, significant: bool) -> float:
        """Return by how much the rate grows in a second, from a line of least squares; 0 if that may be chance."""
        rates = _last(self._rates, seconds)
        if not significant:
            return _line(rates)[0] if len(rates) == seconds else 0.0
        whole = len(rates) // _BUCKET
        if whole < _FEWEST:
            return 0.0
        rates = rates[-whole * _BUCKET :]
        means = [sum(rates[at : at + _BUCKET]) / _BUCKET for at in range(0, len(rates), _BUCKET)]
        slope, error = _line(means)
        return slope / _BUCKET if slope > _SIGNIFICANT * error else 0.0


def _last(rates: deque[float], count: int) -> list[float]:
    return list(islice(rates, max(len(rates) - count, 0), None))


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def _line(values: Sequence[float]) -> tuple[float, float]:
    """Return the slope of the line of least squares, and its standard error."""
    count = len(values)
    middle = (count - 1) / 2
    mean = sum(values) / count
    spread = sum((at - middle) ** 2 for at in range(count))
    slope = sum((at - middle) * (value - mean) for at, value in enumerate(values)) / spread
    rest = sum((value - mean - slope * (at - middle)) ** 2 for at, value in enumerate(values))
    return slope, math.sqrt(rest / max(count - 2, 1) / spread)
