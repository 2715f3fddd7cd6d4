"""A token bucket: a rate with a burst. Pure; the owner passes the time."""

from __future__ import annotations

from typing import Final

MINUTE: Final = 60_000_000_000
"""Nanoseconds in a minute, and fractional parts per token, so that the refill per nanosecond is an integer."""


class TokenBucket:
    """Token bucket that holds up to ``burst`` tokens and gains ``per_minute`` of them. Initially full.

    Counts in integers, so it never accumulates rounding errors. The level may become negative: use beyond an estimate
    is taken even if the tokens are not there.
    """

    __slots__ = ("_at", "_parts", "burst", "per_minute")

    def __init__(self, per_minute: int, burst: int, now: int) -> None:
        self.per_minute = per_minute
        self.burst = burst
        self._parts = burst * MINUTE
        self._at = now

    def level(self, now: int) -> int:
        """Return the number of whole tokens; negative if the bucket is in debt."""
        self._fill(now)
        return self._parts // MINUTE

    def pending(self, _count: int, _now: int) -> bool:
        """Return False: a request for tokens need not wait to know whether they are there."""
        return False

    def take(self, count: int, now: int) -> None:
        """Remove tokens, even if that makes the level negative."""
        self._fill(now)
        self._parts -= count * MINUTE

    def give_back(self, count: int, now: int) -> None:
        """Return unused tokens. The level is capped at ``burst``."""
        self._fill(now)
        self._parts = min(self._parts + count * MINUTE, self.burst * MINUTE)

    def until(self, count: int, now: int) -> int | None:
        """Return the nanoseconds until ``count`` tokens are available: 0 if they are, None if they never will be."""
        self._fill(now)
        missing = count * MINUTE - self._parts
        if missing <= 0:
            return 0
        if count > self.burst or not self.per_minute:
            return None
        return -(-missing // self.per_minute)

    def change(self, per_minute: int, burst: int, now: int) -> None:
        """Change rate and burst. Tokens already used stay used."""
        self._fill(now)
        self._parts = min(self._parts + (burst - self.burst) * MINUTE, burst * MINUTE)
        self.per_minute = per_minute
        self.burst = burst

    def _fill(self, now: int) -> None:
        if now > self._at:
            self._parts = min(self._parts + (now - self._at) * self.per_minute, self.burst * MINUTE)
            self._at = now
