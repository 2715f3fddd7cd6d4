"""When an event loop stands still: a decider without a clock.

Whoever asks the loop again and again whether it is there tells each answer (``answered``), and asks what follows
(``look``). A stall is told once it is longer than it may be, and once more when it is over. If whoever asks could not
run themselves, it is not the loop that stood still but all of the process. After news others of the kind are counted
for a while; a stall that still goes on then is told.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

_LOOKS: Final = 4
"""Within the time that the loop may stand still."""
_SHORTEST: Final = 10_000_000
"""Nanoseconds between two looks at the least, however little is allowed."""
_QUIET: Final = 60_000_000_000
"""Nanoseconds after news in which others of the kind are counted only."""


class What(Enum):
    """What has happened."""

    STANDS = "stands"
    """The loop, now."""
    WENT_ON = "went on"
    """The loop, after a stall that was told."""
    STOOD_STILL = "stood still"
    """The process, until now."""


class News(NamedTuple):
    """What is to be told."""

    what: What
    nanoseconds: int
    """How long it lasted, or has lasted so far."""
    untold: int = 0
    """Such moments before it that were not told."""


class StallWatch:
    """Over one loop."""

    def __init__(self, limit: int, now: int) -> None:
        """``limit``: nanoseconds that the loop may stand still."""
        self.period = max(limit // _LOOKS, _SHORTEST)
        """When to look again."""
        self._limit = limit
        self._looked = now
        self._there = now
        self._stalled_since: int | None = None
        self._told = False
        """The stall that goes on was."""
        self._quiet_until: dict[What, int] = {}
        self._untold = dict.fromkeys(What, 0)

    def answered(self, now: int) -> None:
        """Note that the loop is there."""
        self._there = now

    def look(self, now: int) -> News | None:
        """Return what is to be told now."""
        slept, self._looked = now - self._looked, now
        if slept > self.period + self._limit:
            self._there = now
            self._stalled_since = None
            return self._news(What.STOOD_STILL, slept, now)
        since = self._stalled_since
        if since is not None and self._there > since:
            self._stalled_since = None
            return News(What.WENT_ON, self._there - since) if self._told else None
        if since is not None:
            return None if self._told or self._quiet(What.STANDS, now) else self._stands(since, now, before=1)
        if now - self._there > self._limit:
            self._stalled_since = self._there
            return self._stands(self._there, now)
        return None

    def _stands(self, since: int, now: int, before: int = 0) -> News | None:
        """Return the news of a stall that goes on; ``before``: how often it was counted, and not told."""
        self._untold[What.STANDS] -= before
        news = self._news(What.STANDS, now - since, now)
        self._told = news is not None
        return news

    def _quiet(self, what: What, now: int) -> bool:
        return now < self._quiet_until.get(what, now)

    def _news(self, what: What, nanoseconds: int, now: int) -> News | None:
        if self._quiet(what, now):
            self._untold[what] += 1
            return None
        self._quiet_until[what] = now + _QUIET
        untold, self._untold[what] = self._untold[what], 0
        return News(what, nanoseconds, untold)
