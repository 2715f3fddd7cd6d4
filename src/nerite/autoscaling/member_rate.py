"""Learns how much work a member does in a second while it keeps the promises."""

from __future__ import annotations

import math
from typing import Final

from nerite.autoscaling.figures import PoolFigures

_WINDOW: Final = 10.0
"""Seconds of a window at least."""
_ENOUGH: Final = 20
"""Answers that a window needs."""
_LONGEST: Final = 60.0
"""Seconds after which a window with fewer answers is given up."""
_MARGIN: Final = 0.9
"""Share of a rate at which the promise was broken that is tried next."""
_WEIGHT: Final = 0.3
"""Of the newest window in a rate that rises."""
_SPARE: Final = 0.5
"""Share of the late answers that are allowed up to which members could do more."""
_CROWDED: Final = 1.0
"""Requests of a member at the same time up to which it is not the load that breaks a promise."""
_CATCHING_UP: Final = 1.05
"""Ratio of the work that is done to the work that arrives from which members catch up."""
_FORGET: Final = 900.0
"""Seconds after which a rate that was seen to be the largest is doubted."""
_DOUBT: Final = 1.1
"""Factor by which more is tried then."""


class MemberRate:
    """The largest rate at which the promises are kept, learned in windows of time in which they are nearly broken.

    A window with few late answers says little: the rate is at least what was seen then. A promise that is
    broken by a member with one request is not broken by the load: it teaches nothing, and more members would not help
    (``unreachable``).
    """

    def __init__(self, share: float) -> None:
        """``share`` of the answers has to keep the promises."""
        self._allowed = 1 - share
        self.rate = 0.0
        """Work a second of one member; 0: not known yet."""
        self.broken = False
        """In the last window the promises were broken by the load."""
        self.unreachable = False
        """In the last window the promises were broken without much load."""
        self.late_share = 0.0
        """Of the answers in the last window."""
        self.spare_since = math.inf
        """Since when fewer answers were late than are allowed to be."""
        self._learned = -math.inf
        """When the rate was last seen to be the largest."""
        self._seen = 0.0
        """The largest rate that is not only supposed."""
        self._late_before = False
        self._ready = 0
        self._clear()

    def _clear(self) -> None:
        self._seconds = self._arrived = self._done = self._load = 0.0
        self._answers = self._late = 0

    def observe(self, figures: PoolFigures, now: float) -> None:
        """Take an interval. One with another number of members than the one before begins a new window."""
        if figures.ready != self._ready:
            self._ready = figures.ready
            self.broken = self.unreachable = False
            self._clear()
        if not figures.ready:
            return
        self._seconds += figures.seconds
        self._arrived += figures.arrived
        self._done += figures.done
        self._load += (figures.under_way + figures.held) * figures.seconds
        self._answers += figures.answers
        self._late += figures.late
        if self._seconds >= _WINDOW and self._answers >= _ENOUGH:
            self._close(now)
        elif self._seconds >= _LONGEST:
            self.broken = self.unreachable = False
            self.spare_since = min(self.spare_since, now) if not self._late else math.inf
            self._clear()

    def _close(self, now: float) -> None:
        answers, seen = self._answers, self._done / self._seconds / self._ready
        expected = self._allowed * answers
        late = self._late > expected + 2 * math.sqrt(max(expected, 1.0))
        crowded = self._load / self._seconds / self._ready > _CROWDED
        self.late_share = self._late / answers
        # What piled up before is being worked off: its answers are late however many members there are.
        catching_up = late and self._done > _CATCHING_UP * self._arrived
        after_late, self._late_before = self._late_before, late
        self.broken, self.unreachable = late and crowded and not catching_up, late and not crowded
        spare = self._late <= _SPARE * expected
        self.spare_since = min(self.spare_since, now) if spare else math.inf
        if self.broken:
            self._learn(min(self.rate or math.inf, _MARGIN * seen), 1.0, now)
        elif not (spare or late or after_late) and crowded:
            self._learn(seen, _WEIGHT, now)
        elif not late and self._seen:
            self._seen = max(self._seen, seen)
            self.rate = max(self.rate, seen)
        self._clear()

    def _learn(self, rate: float, weight: float, now: float) -> None:
        self.rate += (weight if self.rate else 1.0) * (rate - self.rate)
        self._seen = self.rate
        self._learned = now

    def suppose(self, rate: float) -> None:
        """Suppose that members can do more than was learned, until the next window shows whether they do."""
        self.rate = max(self.rate, rate)
        self.spare_since = math.inf

    def is_doubtful(self, needed: float, now: float) -> bool:
        """Whether members may be able to do so much, although less was learned, a long time ago."""
        return now - self._learned > _FORGET and (not self._seen or needed <= _DOUBT * self._seen)
