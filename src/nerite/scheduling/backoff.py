"""Exponential backoff: how long to wait before something that has failed is tried again. Without a clock."""

from __future__ import annotations

import random


class ExponentialBackoff:
    """Computes retry delays that double with each failure and reset after a quiet period. Times are in seconds."""

    __slots__ = ("_at_once", "_failures", "_last", "first", "limit", "quiet")

    def __init__(self, first: float = 0.1, limit: float = 30.0, quiet: float = 60.0, *, at_once: bool = True) -> None:
        """``first``: the shortest delay. ``quiet``: the time without a failure after which it begins again.

        ``at_once``: the first failure is retried without a delay.
        """
        self.first = first
        self.limit = limit
        self.quiet = quiet
        self._at_once = at_once
        self._failures = 0
        self._last = 0.0

    def failed(self, now: float) -> float:
        """Record a failure; return how long to wait before a retry."""
        if self._failures and now - self._last > self.quiet:
            self._failures = 0
        self._last = now
        self._failures += 1
        doublings = self._failures - 1 - self._at_once
        if doublings < 0:
            return 0.0
        # 2**1000 overflows a float; any limit is reached long before 2**100.
        return min(self.limit, self.first * 2.0 ** min(doublings, 100))

    def succeeded(self) -> None:
        """Begin again with the next failure."""
        self._failures = 0


def jittered(delay: float) -> float:
    """Return half of a delay or more at random, so that many clients that failed together do not retry together."""
    return delay * random.uniform(0.5, 1.0)
