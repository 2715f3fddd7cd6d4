"""A token bucket, exact for ever: it counts in whole numbers, whatever the clock says."""

from __future__ import annotations

from typing import Final

_MINUTE: Final = 60_000_000_000
"""Nanoseconds; also the parts that a token has in here. What comes in a nanosecond is then a whole number of parts."""


class Bucket:
    """Holds up to ``burst`` tokens and gains ``per_minute`` of them. Full at the beginning.

    It may owe: what was used beyond an estimate is taken out though it is not there.
    """

    __slots__ = ("_at", "_parts", "burst", "per_minute")

    def __init__(self, per_minute: int, burst: int, now: int) -> None:
        self.per_minute = per_minute
        self.burst = burst
        self._parts = burst * _MINUTE
        self._at = now

    def level(self, now: int) -> int:
        """Return how many whole tokens it has; below 0: how many it owes."""
        self._fill(now)
        return self._parts // _MINUTE

    def take(self, count: int, now: int) -> None:
        """Take tokens out, whether they are there or not."""
        self._fill(now)
        self._parts -= count * _MINUTE

    def give_back(self, count: int, now: int) -> None:
        """Put in what was taken and not used. What is above ``burst`` runs over."""
        self._fill(now)
        self._parts = min(self._parts + count * _MINUTE, self.burst * _MINUTE)

    def until(self, count: int, now: int) -> int | None:
        """Return the nanoseconds until ``count`` tokens are there: 0 if they are, None if they never will be."""
        self._fill(now)
        missing = count * _MINUTE - self._parts
        if missing <= 0:
            return 0
        if count > self.burst or not self.per_minute:
            return None
        return -(-missing // self.per_minute)

    def change(self, per_minute: int, burst: int, now: int) -> None:
        """Go on by other figures. What was used stays used."""
        self._fill(now)
        self._parts = min(self._parts + (burst - self.burst) * _MINUTE, burst * _MINUTE)
        self.per_minute = per_minute
        self.burst = burst

    def _fill(self, now: int) -> None:
        if now > self._at:
            self._parts = min(self._parts + (now - self._at) * self.per_minute, self.burst * _MINUTE)
            self._at = now
