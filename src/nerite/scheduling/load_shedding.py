"""Load shedding: decides whether another request may wait for a model, and distinguishes bursts from overload.

A long queue alone is no reason to reject requests. A client may have sent everything at once, or may send a request as
soon as it has an answer: such a queue drains or stays constant. A queue that keeps growing does neither: every answer
comes too late, and memory runs out in the end.

A queue is *short* if its last request is expected to start within ``max_seconds`` at the measured departure rate, or if
fewer than ``FEW`` requests wait. A request that finds a short queue may wait. Once the queue is not short:

1. For ``burst_seconds``, all requests may wait: this is a burst.
2. After that, the queue may stay as long as it was plus one eighth. If it has become an eighth shorter in between, new
   growth counts as another burst.
3. If it grows for longer than a burst, or exceeds ``max_requests`` at any time, the arrival rate exceeds the capacity.
   The queue is then *overloaded* and limited to a short length until a request finds it empty (hysteresis). Requests
   that already wait are not dropped.

Hence no request is rejected before a burst is over, clients with a constant number of concurrent requests are never
rejected, and in a lasting overload an accepted request waits ``max_seconds`` once the burst has been worked off.

A queue grows by one request at a time, so the shedder need not be called for each: it grants a number of requests.
"""

from __future__ import annotations

import math
import sys
from typing import Final

from nerite.config.options import QueueOptions
from nerite.core.errors import Unavailable

_LEAST_NS: Final = 50_000_000
_SPAN_NS: Final = 1_000_000_000


class DepartureRate:
    """Rate at which requests leave a non-empty queue, over the last one to two seconds, or longer if none left."""

    __slots__ = ("_earlier", "_later", "per_second")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the measurement: the queue was empty, so the departures do not show the capacity."""
        self._earlier: tuple[int, int] | None = None
        self._later = (0, 0)
        self.per_second: float | None = None
        """Requests per second; None while unknown."""

    def note(self, begun: int, now: int) -> None:
        """Record the total number of requests that have left so far."""
        if self._earlier is None:
            self._earlier = self._later = (begun, now)
        elif now - self._later[1] >= _SPAN_NS and begun > self._later[0]:
            self._earlier, self._later = self._later, (begun, now)
        passed = now - self._earlier[1]
        if passed >= _LEAST_NS:
            self.per_second = (begun - self._earlier[0]) / passed * 1e9


FEW: Final = 100
"""Requests that may always wait. At 90 % utilization, only one request in 40,000 finds a longer queue by chance."""
_MEASURE_NS: Final = 50_000_000
_MAX_GRANT: Final = 16
"""Maximum number granted at once when the queue is not short, so that its growth is observed."""
LONGEST_PAUSE: Final = 60
"""Maximum Retry-After in seconds: the departure rate may have changed by then."""


class LoadShedder:
    """Load shedding for the queue of one model version. Counts requests, not rows."""

    __slots__ = (
        "_burst",
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
        "_was_short",
        "model",
    )

    def __init__(self, bounds: QueueOptions, model: str) -> None:
        self.model = model
        self._most = bounds.max_requests or sys.maxsize
        self._seconds = bounds.max_seconds
        self._burst = int(bounds.burst_seconds * 1e9)
        self._few = min(FEW, self._most) if self._seconds else self._most
        self._pace = DepartureRate()
        self._reset()

    def _reset(self) -> None:
        """Reset all state, because the queue is empty or short."""
        self._was_short = True
        self._waiting = 0
        self._short = self._most
        self._long_since = self._highest = self._lowest = 0
        self._overloaded = False
        self._measured_at = -_MEASURE_NS
        self._refusal: Unavailable | None = None
        self._pace.forget()

    def grant(self, waiting: int, begun: int, now: int) -> int:
        """Return how many requests may be accepted before the next call, given that ``waiting`` requests wait now.

        ``begun`` is the total number of requests that have left the queue so far.
        """
        if waiting < self._few and (self._was_short or not waiting):
            self._reset()
            return self._few - waiting
        self._was_short = False
        if now >= self._measured_at + _MEASURE_NS:
            self._measure(begun, now)
        if self._overloaded:
            limit = min(self._short, self._most)
        else:
            limit = min(self._allowed(waiting, now), self._most)
            self._overloaded = self._seconds > 0 and waiting >= limit
        if waiting < limit:
            return min(limit - waiting, _MAX_GRANT)
        self._waiting = waiting
        return 0

    def refusal(self) -> Unavailable:
        """Return the error for requests rejected by the last call of ``grant``."""
        if self._refusal is None:
            self._refusal = self._explain(self._waiting)
        return self._refusal

    def _measure(self, begun: int, now: int) -> None:
        """Update the departure rate and the maximum length of a short queue."""
        self._measured_at = now
        self._refusal = None
        self._pace.note(begun, now)
        pace = self._pace.per_second
        self._short = self._most if pace is None else max(FEW, int(self._seconds * pace))

    def _allowed(self, waiting: int, now: int) -> int:
        """Return the maximum queue length while not overloaded, and track bursts."""
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
            f"Try again in {pause} s. The limits are set by --max-queue-seconds and --max-queued-requests.",
            retry_after=pause,
        )
