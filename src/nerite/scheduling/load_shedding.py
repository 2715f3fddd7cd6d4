"""Whether one more request may wait for a model: load shedding.

A queue that is longer than the model can shorten in a moment is no reason yet to refuse anybody. A client may have sent
all it has at once, or ask again as soon as it has an answer: such a queue ends, or stays as long as it is. One that
goes on growing does neither: what waits there is answered too late for everybody, and in the end the memory is full.

Theory of operation. A queue is *short* if its last request is expected to run within ``max_seconds`` at the pace that
was measured, or if ``FEW`` wait. Whoever finds it short may wait. Once it is not:

1. For ``burst_seconds`` everybody may wait: that is a burst.
2. From then on it may stay as long as it was, and an eighth longer. If it has become an eighth shorter in between, what
   makes it longer again is another burst.
3. If it grows for longer than a burst, or beyond ``max_requests`` at any time, more come than the model can do. It is
   *overloaded*, and may only be short until somebody finds nobody waiting. Who was let in before stays.

So nobody is refused before a burst is over; those who keep a constant number of requests under way never are; and in an
overload that lasts, who is let in waits for ``max_seconds`` as soon as the burst is worked off.

A queue becomes longer by one request at a time, so it need not be asked for each: it grants a number.
"""

from __future__ import annotations

import math
import sys
from typing import Final

from nerite.config.options import QueueOptions
from nerite.core.errors import Unavailable

# How many requests a second leave a queue in which there is always somebody.

_LEAST_NS: Final = 50_000_000
_SPAN_NS: Final = 1_000_000_000


class DepartureRate:
    """Measured over the last one to two seconds; over more, if nobody left in that time."""

    __slots__ = ("_earlier", "_later", "per_second")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: the queue was empty, and what left it says nothing about how many could have."""
        self._earlier: tuple[int, int] | None = None
        self._later = (0, 0)
        self.per_second: float | None = None
        """None as long as nothing can be said."""

    def note(self, begun: int, now: int) -> None:
        """Note how many have left so far."""
        if self._earlier is None:
            self._earlier = self._later = (begun, now)
        elif now - self._later[1] >= _SPAN_NS and begun > self._later[0]:
            self._earlier, self._later = self._later, (begun, now)
        passed = now - self._earlier[1]
        if passed >= _LEAST_NS:
            self.per_second = (begun - self._earlier[0]) / passed * 1e9


FEW: Final = 100
"""As many may wait always. By chance alone, at nine tenths of what a model can do, one request in 40,000 finds more."""
_MEASURE_NS: Final = 50_000_000
_MANY: Final = 16
"""Are granted at once, at the most, where more than a few wait: it has to see how the queue grows."""
LONGEST_PAUSE: Final = 60
"""Seconds after which a client may try again, at the most. The pace may be another by then."""


class LoadShedder:
    """For the queue of one model version. Counts requests, not rows."""

    __slots__ = (
        "_burst",
        "_calm",
        "_few",
        "_highest",
        "_long_since",
        "_lowest",
        "_measured_at",
        "_most",
        "_overloaded",
        "_pace",
        "_refusal",
        "_seconds",
        "_short",
        "_waiting",
        "model",
    )

    def __init__(self, bounds: QueueOptions, model: str) -> None:
        self.model = model
        self._most = bounds.max_requests or sys.maxsize
        self._seconds = bounds.max_seconds
        self._burst = int(bounds.burst_seconds * 1e9)
        self._few = min(FEW, self._most) if self._seconds else self._most
        self._pace = DepartureRate()
        self._calm_down()

    def _calm_down(self) -> None:
        """Forget what was: nobody waits."""
        self._calm = True
        self._waiting = 0
        self._short = self._most
        self._long_since = self._highest = self._lowest = 0
        self._overloaded = False
        self._measured_at = -_MEASURE_NS
        self._refusal: Unavailable | None = None
        self._pace.forget()

    def grant(self, waiting: int, begun: int, now: int) -> int:
        """Return how many requests may be let in before this is asked again, if ``waiting`` others wait now.

        ``begun`` counts the requests that have left the queue so far, from wherever.
        """
        if waiting < self._few and (self._calm or not waiting):
            self._calm_down()
            return self._few - waiting
        self._calm = False
        if now >= self._measured_at + _MEASURE_NS:
            self._measure(begun, now)
        if self._overloaded:
            limit = min(self._short, self._most)
        else:
            limit = min(self._allowed(waiting, now), self._most)
            self._overloaded = self._seconds > 0 and waiting >= limit
        if waiting < limit:
            return min(limit - waiting, _MANY)
        self._waiting = waiting
        return 0

    def refusal(self) -> Unavailable:
        """Return why nothing was granted."""
        if self._refusal is None:
            self._refusal = self._explain(self._waiting)
        return self._refusal

    def _measure(self, begun: int, now: int) -> None:
        """Work out how long a queue is short."""
        self._measured_at = now
        self._refusal = None
        self._pace.note(begun, now)
        pace = self._pace.per_second
        self._short = self._most if pace is None else max(FEW, int(self._seconds * pace))

    def _allowed(self, waiting: int, now: int) -> int:
        """Return how long the queue may be, as long as it is not overloaded."""
        if not self._seconds:
            return self._most
        if waiting < self._short:
            self._long_since = 0
            return self._most
        if not self._long_since:
            self._long_since = now
            self._highest = waiting
        if now < self._long_since + self._burst:
            self._highest = self._lowest = max(self._highest, waiting)
            return self._most
        self._lowest = min(self._lowest, waiting)
        limit = self._highest + self._highest // 8
        if waiting >= limit and self._lowest < self._highest - self._highest // 8:
            self._long_since = now
            self._highest = self._lowest = waiting
            return self._most
        return limit

    def _explain(self, waiting: int) -> Unavailable:
        pace = self._pace.per_second
        wait = waiting / pace if pace else 0.0
        pause = min(max(math.ceil(wait), 1), LONGEST_PAUSE)
        work = f", {wait:.1f} s of work" if pace else ""
        return Unavailable(
            f"Exceeds maximum queue size: {waiting} requests wait for model '{self.model}'{work}. "
            f"Try again in {pause} s. How many may wait is up to --max-queue-seconds and --max-queued-requests.",
            retry_after=pause,
        )
