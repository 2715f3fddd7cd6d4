"""How much may be sent twice: the budget of retries, and the delay after which a request is hedged."""

from __future__ import annotations

import math
from typing import Final

_BURST: Final = 10.0
"""Seconds of the floor that the budget can hold."""
_KEPT: Final = 100.0
"""Requests whose share it can hold."""
_STEPS: Final = 8
"""Buckets for each doubling of a latency: a quantile is right within 9 %."""
_BUCKETS: Final = 36 * _STEPS
"""Up to 2**36 us, 19 hours."""
_HALVED_AFTER: Final = 4096
"""Observations after which older ones count half."""
_ENOUGH: Final = 128
"""Observations before a quantile is told."""
_RENEWED_AFTER: Final = 64
"""Observations after which a quantile is computed anew."""


class PoolRetryBudget:
    """Allows retries up to a share of requests, beyond a floor for each second. What is not used is kept for a while.

    So a pool that fails as a whole gets little more than what clients send, and one that has few requests can retry.
    """

    def __init__(self, share: float, floor: float) -> None:
        """``floor`` is in retries a second."""
        self._share = share
        self._floor = floor
        self._most = max(1.0, floor * _BURST, share * _KEPT)
        self._left = self._most if share or floor else 0.0
        self._at_ns = 0
        self.refused = 0
        """Retries that were not allowed."""

    def add_request(self) -> None:
        """Note that a client's request was sent for the first time."""
        self._left = min(self._left + self._share, self._most)

    def take(self, now_ns: int) -> bool:
        """Spend one retry. Returns whether there was one."""
        if self._at_ns:
            elapsed = max(0, now_ns - self._at_ns) / 1e9
            self._left = min(self._left + self._floor * elapsed, self._most)
        self._at_ns = now_ns
        if self._left < 1.0:
            self.refused += 1
            return False
        self._left -= 1.0
        return True


class LatencyQuantile:
    """A quantile of latencies, of which older ones count less and less."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._counts = [0.0] * _BUCKETS
        self._seen = 0
        self._found: int | None = None
        self._found_at = 0

    def add(self, latency_ns: int) -> None:
        """Take a latency."""
        microseconds = max(1.0, latency_ns / 1e3)
        self._counts[min(int(_STEPS * math.log2(microseconds)), _BUCKETS - 1)] += 1.0
        self._seen += 1
        if self._seen % _HALVED_AFTER == 0:
            self._counts = [each / 2 for each in self._counts]

    @property
    def nanoseconds(self) -> int | None:
        """The quantile, from above; None: too few latencies are known."""
        if self._seen < _ENOUGH:
            return None
        if self._found is None or self._seen - self._found_at >= _RENEWED_AFTER:
            wanted = self._quantile * sum(self._counts)
            reached = 0.0
            bucket = 0
            for bucket, count in enumerate(self._counts):  # noqa: B007
                reached += count
                if reached > wanted:
                    break
            self._found = round(1e3 * 2 ** ((bucket + 1) / _STEPS))
            self._found_at = self._seen
        return self._found
