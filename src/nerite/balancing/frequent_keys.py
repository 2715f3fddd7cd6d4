"""Which keys many of the latest requests have, in bounded memory: the algorithm of Misra and Gries, with halving."""

from __future__ import annotations

from typing import Final

_MOST: Final = 128
"""Counters. A share is underestimated by at most 1 / 128."""
_WINDOW: Final = 512
"""Requests after which what was counted counts half."""
_PRIOR: Final = 32
"""Requests without any of the keys that are taken as seen before the first, so that a few do not decide."""


class FrequentKeys:
    """Counts one key for each request.

    A key that finds no free counter takes one from all the others, so what is rare never displaces what is frequent.
    Counts are halved after each window, so old requests lose their weight.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._requests = 0

    def add(self, key: int) -> float:
        """Count a request with this key, and return the key's share of the latest requests."""
        counts = self._counts
        self._requests += 1
        if key in counts or len(counts) < _MOST:
            counts[key] = counts.get(key, 0) + 1
        else:
            self._counts = {each: count - 1 for each, count in counts.items() if count > 1}
        if self._requests >= _WINDOW:
            self._halve()
        return self._counts.get(key, 0) / (self._requests + _PRIOR)

    def _halve(self) -> None:
        self._requests //= 2
        self._counts = {each: count // 2 for each, count in self._counts.items() if count > 1}
