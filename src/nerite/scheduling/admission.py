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

It is asked only while at least ``least`` wait, and thinks only every ``REVIEW_NS``: a request costs two comparisons.
"""

from __future__ import annotations

import math
import sys
from typing import Final

from nerite.config.options import QueueOptions
from nerite.core.errors import Unavailable
from nerite.scheduling.pace import Pace

FEW: Final = 100
"""As many may wait always. By chance alone, at nine tenths of what a model can do, one request in 40,000 finds more."""
REVIEW_NS: Final = 50_000_000
LONGEST_PAUSE: Final = 60
"""Seconds after which a client may try again, at the most: the pace may be another by then."""


class Admission:
    """For the queue of one model version. Counts requests, not rows."""

    __slots__ = (
        "_burst",
        "_highest",
        "_limit",
        "_long_since",
        "_lowest",
        "_model",
        "_most",
        "_overloaded",
        "_pace",
        "_refusal",
        "_review_at",
        "_seconds",
        "_short",
        "least",
    )

    def __init__(self, bounds: QueueOptions, model: str) -> None:
        self._model = model
        self._most = bounds.max_requests or sys.maxsize
        self._seconds = bounds.max_seconds
        self._burst = int(bounds.burst_seconds * 1e9)
        self._pace = Pace()
        self._calm_down()

    def _calm_down(self) -> None:
        """Forget what was: nobody waits."""
        self.least = min(FEW, self._most) if self._seconds else self._most
        """How many have to wait before ``refusal`` needs to be asked."""
        self._limit = self._short = self._most
        self._long_since = self._highest = self._lowest = 0
        self._overloaded = False
        self._review_at = 0
        self._refusal: Unavailable | None = None
        self._pace.forget()

    def refusal(self, waiting: int, begun: int, now: int) -> Unavailable | None:
        """Return why a request may not wait behind ``waiting`` others; None if it may.

        ``begun`` counts the requests that have left the queue so far, from wherever.
        """
        if not waiting:
            self._calm_down()
            return None
        if now >= self._review_at:
            self._review(waiting, begun, now)
        if waiting < self._limit or self._bursts_again(waiting, now):
            return None
        if self._seconds:
            self._overloaded = True
            self._limit = min(self._short, self._most)
        if self._refusal is None:
            self._refusal = self._explain(waiting)
        return self._refusal

    def _bursts_again(self, waiting: int, now: int) -> bool:
        """Return whether a queue that is too long was an eighth shorter before; then it may grow for a while."""
        if self._overloaded or waiting >= self._most or self._lowest >= self._highest - self._highest // 8:
            return False
        self._begin_burst(waiting, now)
        self._limit = self._most
        return True

    def _begin_burst(self, waiting: int, now: int) -> None:
        self._long_since = now
        self._highest = self._lowest = waiting

    def _review(self, waiting: int, begun: int, now: int) -> None:
        """Work out how long the queue may be until the next review."""
        self._review_at = now + REVIEW_NS
        self._refusal = None
        self._pace.note(begun, now)
        if not self._seconds:
            return
        # Asked by everybody now: one of them will find nobody waiting.
        self.least = 0
        pace = self._pace.per_second
        self._short = self._most if pace is None else max(FEW, int(self._seconds * pace))
        limit = self._most
        if self._overloaded:
            limit = self._short
        elif waiting < self._short:
            self._long_since = 0
        elif not self._long_since:
            self._begin_burst(waiting, now)
        elif now - self._long_since < self._burst:
            self._highest = self._lowest = max(self._highest, waiting)
        else:
            self._lowest = min(self._lowest, waiting)
            limit = self._highest + self._highest // 8
        self._limit = min(limit, self._most)

    def _explain(self, waiting: int) -> Unavailable:
        pace = self._pace.per_second
        wait = waiting / pace if pace else 0.0
        pause = min(max(math.ceil(wait), 1), LONGEST_PAUSE)
        work = f", {wait:.1f} s of work" if pace else ""
        return Unavailable(
            f"Exceeds maximum queue size: {waiting} requests wait for model '{self._model}'{work}. "
            f"Try again in {pause} s. How many may wait is up to --max-queue-seconds and --max-queued-requests.",
            retry_after=pause,
        )
