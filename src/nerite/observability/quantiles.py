"""Quantiles of the last minute, as Triton's summaries have them.

A time is counted with its eight leading bits, so that what is kept does not grow with the requests: ranks are exact,
and values wrong by 0.4 % at most. That is within any error that ``summary_quantiles`` allows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

SLICE_NS: Final = 12_000_000_000
_SLICES: Final = 5
_BITS: Final = 8


class Summed(NamedTuple):
    """A summary, as a page has it."""

    events: int
    total: float
    quantiles: Sequence[tuple[float, float]]
    """Each with its value: not a number if there was nothing in the last minute."""


class Quantiles:
    """Of one quantity, in whole numbers."""

    __slots__ = ("_slices",)

    def __init__(self) -> None:
        self._slices: dict[int, Counter[int]] = {}
        """By when each began, in slices."""

    def note(self, value: int, now: int, count: int = 1) -> None:
        """Count a value that was there ``count`` times."""
        place = now // SLICE_NS
        counts = self._slices.get(place)
        if counts is None:
            counts = self._slices[place] = Counter()
            self._forget(now)
        lost = max(value.bit_length() - _BITS, 0)
        counts[(value >> lost << lost) + (1 << lost >> 1)] += count

    def read(self, wanted: Sequence[float], now: int) -> list[tuple[float, float]]:
        """Return the value of each quantile."""
        self._forget(now)
        counts: Counter[int] = Counter()
        for each in self._slices.values():
            counts.update(each)
        ranks = [(max(math.ceil(quantile * counts.total()), 1), quantile) for quantile in wanted]
        found = dict.fromkeys(wanted, math.nan)
        passed = 0
        for value, count in sorted(counts.items()):
            for rank, quantile in ranks:
                if passed < rank <= passed + count:
                    found[quantile] = value
            passed += count
        return list(found.items())

    def _forget(self, now: int) -> None:
        oldest = now // SLICE_NS - _SLICES + 1
        for place in [place for place in self._slices if place < oldest]:
            del self._slices[place]
