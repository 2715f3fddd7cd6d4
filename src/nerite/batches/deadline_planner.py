"""Plans batches by their deadlines: which batch goes next, when it will end, and how much it must be raised for that.

A pure decider: it is given events and the time. All batches of one tenant that use one model are a *lane*. Within a
lane the earliest deadline goes first (EDF); between lanes the one that has used the least time of items for its weight.
The rate of a lane is measured, and with it the end of each batch is predicted. A batch whose prediction uses up most of
the time left is raised: so many of its items at once go in its tenant's own class as reach the deadline by Little's
law. It is lowered only when there is much more room, so that the class does not change to and fro. A batch is also told
its pace: how many items at once end it well before its deadline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Final

RAISE: Final = 0.8
LOWER: Final = 0.5
"""Fraction of the time left that the predicted work has to use for a batch to be raised, or lowered again."""
_RATE_SECONDS: Final = 15.0
_LEAST_EVENTS: Final = 32
_MOST_EVENTS: Final = 512
"""A rate is measured over so many seconds, but at least and at most over so many events."""
_LEAST_RATE: Final = 1e-6
"""Items a second below which nothing is predicted."""
_GRACE: Final = 0.1
_LONGEST_GRACE: Final = 60.0
"""Fraction of its window, and seconds, for which a new batch is not raised: its rate is not known yet."""
_SPARE: Final = 1.25
"""Factor on the number of items at once that a raised batch is computed to need."""
_REFRESH_SECONDS: Final = 0.1
"""Time for which predictions hold, unless batches come or go: there may be many, and many items a second."""
_PACE: Final = 0.6
"""Fraction of the time left in which a paced batch ends."""


class RecentRate:
    """Events a second: of the last ones, at least so many that chance hardly shows, and of some seconds."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._times: deque[float] = deque(maxlen=_MOST_EVENTS)

    def note(self, now: float) -> None:
        """Record an event."""
        times = self._times
        if len(times) == _MOST_EVENTS:
            self._began = times[0]
        times.append(now)
        while len(times) > _LEAST_EVENTS and times[0] < now - _RATE_SECONDS:
            self._began = times.popleft()

    def value(self, now: float) -> float:
        """Return events a second. It falls once the next event is overdue."""
        count = len(self._times)
        if not count:
            return 0.0
        span = self._times[-1] - self._began
        overdue = now - self._times[-1] - span / count
        return count / max(span + max(overdue, 0.0), 1e-3)


class _Lane:
    """Batches of one tenant that use one model."""

    def __init__(self, weight: float, used: float, now: float) -> None:
        self.weight = weight
        self.used = used
        """Seconds of its items divided by its weight."""
        self.rate = RecentRate(now)
        self.batches: dict[str, _Planned] = {}
        self.rest: list[str] = []
        """Those that are not raised, by their deadlines."""

    def by_deadline(self) -> list[_Planned]:
        return sorted(self.batches.values(), key=lambda batch: batch.deadline)


class _Planned:
    """A batch with items left."""

    def __init__(self, key: str, lane: _Lane, left: int, began: float, deadline: float) -> None:
        self.key = key
        self.lane = lane
        self.left = left
        self.began = began
        self.deadline = deadline
        self.seconds = 0.0
        """Mean seconds of an item, with decaying weights; 0 if none has ended."""
        self.raised = False


class DeadlinePlanner:
    """Plans all batches of a server. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._batches: dict[str, _Planned] = {}
        self._raised: list[str] = []
        self._refreshed_at = -math.inf
        """When it was decided which batches are raised."""

    def knows(self, key: str) -> bool:
        """Return whether a batch is planned."""
        return key in self._batches

    def add(
        self, key: str, tenant: str, model: str, left: int, deadline: float, now: float, weight: float = 1.0
    ) -> None:
        """Plan a batch with ``left`` items. ``weight`` is its tenant's."""
        lane = self._lanes.get((tenant, model))
        if lane is None:
            # A new lane has no credit for the time in which it had no items.
            used = min((each.used for each in self._lanes.values() if each.batches), default=0.0)
            lane = self._lanes[tenant, model] = _Lane(weight, used, now)
        lane.weight = weight
        self._batches[key] = lane.batches[key] = _Planned(key, lane, left, now, deadline)
        self._refreshed_at = -math.inf

    def is_first(self, key: str) -> bool:
        """Return whether a batch is the first of its lane."""
        batch = self._batches.get(key)
        return batch is not None and min(batch.lane.batches.values(), key=_deadline) is batch

    def mean_seconds(self, key: str) -> float:
        """Return the seconds that an item of a batch takes; 0 if that is not known."""
        batch = self._batches.get(key)
        return 0.0 if batch is None else batch.seconds

    def remove(self, key: str) -> None:
        """Forget a batch."""
        batch = self._batches.pop(key, None)
        if batch is not None:
            self._refreshed_at = -math.inf
            del batch.lane.batches[key]
            if not batch.lane.batches:
                self._lanes = {name: lane for name, lane in self._lanes.items() if lane.batches}

    def ended(self, key: str, seconds: float, now: float) -> None:
        """Record that an item was answered, ``seconds`` after it began."""
        batch = self._batches.get(key)
        if batch is None:
            return
        batch.left = max(batch.left - 1, 0)
        batch.seconds = seconds if not batch.seconds else batch.seconds + (seconds - batch.seconds) / 16
        lane = batch.lane
        lane.rate.note(now)
        lane.used += seconds / lane.weight

    def order(self, now: float) -> list[str]:
        """Return the batches in the order in which they get idle room: those in danger first."""
        self._keep_fresh(now)
        lanes = sorted(self._lanes.values(), key=lambda lane: lane.used)
        return [*self._raised, *(key for lane in lanes for key in lane.rest)]

    def _keep_fresh(self, now: float) -> None:
        """Raise or lower all batches by their predictions, and order those of each lane, if that is due."""
        if 0 <= now - self._refreshed_at < _REFRESH_SECONDS:
            return
        raised: list[_Planned] = []
        for lane in self._lanes.values():
            rate, ahead, lane.rest = lane.rate.value(now), 0, []
            for batch in lane.by_deadline():
                ahead += batch.left
                if self._update(batch, now, ahead, rate):
                    raised.append(batch)
                else:
                    lane.rest.append(batch.key)
        self._raised = [batch.key for batch in sorted(raised, key=_deadline)]
        self._refreshed_at = now

    def needs(self, key: str, now: float) -> int:
        """Return how many items of a batch must be under way to reach its deadline; 0 if idle room is enough."""
        self._keep_fresh(now)
        batch = self._batches.get(key)
        if batch is None or not batch.raised or not batch.left:
            return 0
        return self._at_once(batch, now, RAISE / _SPARE)

    def pace(self, key: str, now: float) -> int:
        """Return how many items of a batch run at once beside others' requests: enough to end well before its deadline.

        More would end it sooner than anybody needs it, and slow the others down.
        """
        batch = self._batches.get(key)
        return 0 if batch is None else self._at_once(batch, now, _PACE)

    @staticmethod
    def _at_once(batch: _Planned, now: float, fraction: float) -> int:
        """Return how many items must be under way to end in a fraction of the time left, by Little's law."""
        left = max((batch.deadline - now) * fraction, 1e-3)
        return max(1, math.ceil((batch.seconds or 1.0) * batch.left / left))

    def predicted_end(self, key: str, now: float) -> float | None:
        """Return when a batch ends at the rate that was measured; None if none was."""
        batch = self._batches.get(key)
        rate = 0.0 if batch is None else batch.lane.rate.value(now)
        if batch is None or rate < _LEAST_RATE:
            return None
        return now + sum(self._ahead(batch)) / rate

    def _ahead(self, batch: _Planned) -> Iterator[int]:
        """Yield the items of a batch and of those that go before it."""
        yield batch.left
        for other in batch.lane.batches.values():
            if other is not batch and other.deadline < batch.deadline:
                yield other.left

    @staticmethod
    def _update(batch: _Planned, now: float, ahead: int, rate: float) -> bool:
        """Raise or lower a batch by its prediction; return whether it is raised.

        ``ahead``: items of the batch and of those before it. ``rate``: of its lane.
        """
        if not batch.left:
            return False
        if now - batch.began < min(_GRACE * (batch.deadline - batch.began), _LONGEST_GRACE):
            return False
        used = math.inf if rate < _LEAST_RATE else ahead / rate / max(batch.deadline - now, 1e-3)
        batch.raised = used > (LOWER if batch.raised else RAISE)
        return batch.raised


def _deadline(batch: _Planned) -> float:
    return batch.deadline
