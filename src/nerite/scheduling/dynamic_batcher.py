"""The dynamic batcher: gathers requests into batches of preferred sizes, and never keeps one longer than agreed.

Theory of operation. ``take`` is asked when an instance is free. It pulls requests from the queue one by one into
``_gathered``, as long as they fit the batch (rows, and shapes where those vary), and notes the longest beginning whose
size is preferred. Then, in this order:

1. A preferred size was met, and the oldest request has not waited ``max_delay``: that beginning runs.
2. The batch cannot grow (the next request does not fit, or the largest preferred size is reached), or there is no
   delay, or the oldest has waited it out: everything gathered runs, preferred or not.
3. Otherwise the batch waits, gathered, for more requests or for ``wake_at``.

What was gathered stays gathered between calls, so that a request is looked at once however long the batch waits. Any
event that may change the front of the queue puts it back first: a request that overtakes, expires or is withdrawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.scheduling.decider import DYNAMIC, BatchingRules, BatchReason
from nerite.scheduling.request_queue import RequestQueue


class DynamicBatcher:
    """A model with ``dynamic_batching``."""

    __slots__ = (
        "_best",
        "_delay",
        "_full",
        "_gathered",
        "_hold",
        "_key",
        "_largest",
        "_limit",
        "_oldest",
        "_preferred",
        "_queue",
        "_rows",
        "_rules",
        "releases",
        "timed",
    )

    def __init__(self, rules: BatchingRules, releases: dict[BatchReason, int] | None = None) -> None:
        """``releases``: where to count why batches begin, if others count there, too."""
        self.timed = any(policy.timeout_us for policy in (rules.default_policy, *rules.policies.values()))
        self._rules = rules
        self._queue = RequestQueue(rules)
        self._limit = max(rules.max_batch_size, 1)
        self._preferred = frozenset(rules.preferred_sizes)
        self._largest = max(rules.preferred_sizes, default=self._limit)
        self._delay = rules.max_delay_us * 1000
        self._hold = rules.hold_until
        self.releases = dict.fromkeys(DYNAMIC, 0) if releases is None else releases
        self._forget()

    @property
    def size(self) -> int:
        """Requests that wait."""
        return self._queue.size

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait, by priority."""
        return self._queue.waiting

    def renewed(self) -> DynamicBatcher:
        """Return an empty one with the same rules, which goes on counting."""
        return DynamicBatcher(self._rules, self.releases)

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Let ``request`` wait, or return why its queue refuses it."""
        refusal = self._queue.offer(request, now)
        if refusal is None and self._gathered and request.queue.rank < self._gathered[-1].queue.rank:
            self._put_back()
        return refusal

    def give_way(self, request: InferenceRequest) -> InferenceRequest | None:
        """Drop and return the youngest request of the lowest priority, if that is below that of ``request``."""
        if not self._queue.has_priorities:
            return None
        self._put_back()
        return self._queue.give_way(request)

    def take(self, now: int) -> list[InferenceRequest] | None:
        """Return the batch that a free instance should run now; None if it should wait."""
        if self._queue.size < self._hold:
            return None
        self._hold = 0
        if not self._full:
            self._gather()
        gathered = self._gathered
        if not gathered:
            return None
        overdue = self._delay and now - self._oldest >= self._delay
        if self._best and not overdue:
            return self._release(self._best, BatchReason.PREFERRED)
        if self._full or self._rows >= self._largest:
            return self._release(len(gathered), BatchReason.FULL)
        if overdue:
            return self._release(len(gathered), BatchReason.DELAY)
        if not self._delay:
            return self._release(len(gathered), BatchReason.FREE)
        return None

    def due(self, now: int) -> bool:
        """Return whether ``take`` would return a batch."""
        if self._queue.size < self._hold:
            return False
        if not self._full:
            self._gather()
        full = self._full or self._rows >= self._largest
        return bool(self._gathered) and (full or self._best > 0 or not self._delay or now - self._oldest >= self._delay)

    def take_full(self, now: int) -> list[InferenceRequest] | None:
        """Return the batch that ``take`` would, if no request that is yet to come could join it; else None."""
        if self._queue.size < self._hold:
            return None
        if not self._full:
            self._gather()
        return self.take(now) if self._full or self._rows >= self._largest else None

    def wake_at(self, free: bool) -> int | None:
        """Return when the gathered batch has waited enough, or the next request expires."""
        deadline = self._queue.next_deadline()
        if not free or not self._gathered or not self._delay:
            return deadline
        due = self._oldest + self._delay
        return due if deadline is None or due < deadline else deadline

    def expire(self, now: int) -> list[InferenceRequest]:
        """Drop and return the requests whose queue policy refuses them for their age."""
        deadline = self._queue.next_deadline()
        if deadline is None or deadline > now:
            return []
        self._put_back()
        return self._queue.expire(now)

    def withdraw(self, request: InferenceRequest) -> bool:
        """Drop ``request``; False if it does not wait any more."""
        self._put_back()
        return self._queue.withdraw(request)

    def drain(self) -> list[InferenceRequest]:
        """Drop and return everything that waits."""
        self._put_back()
        return self._queue.drain()

    def _forget(self) -> None:
        self._gathered: list[InferenceRequest] = []
        self._key: object = None
        self._rows = 0
        self._best = 0
        self._oldest = 0
        self._full = False

    def _put_back(self) -> None:
        if self._gathered:
            self._queue.put_back(self._gathered)
            self._forget()

    def _gather(self) -> None:
        queue = self._queue
        gathered = self._gathered
        rows, limit, key = self._rows, self._limit, self._key
        preferred, delay = self._preferred, self._delay
        for request in queue.pull():
            header = request.header
            total = rows + (header.batch_size or 1)
            if not gathered:
                key = self._key = header.batch_key
                self._oldest = request.queued_ns
            elif total > limit or header.batch_key != key:
                queue.put_back((request,))
                self._full = True
                break
            elif delay and request.queued_ns < self._oldest:
                self._oldest = request.queued_ns
            if preferred:
                if total > self._largest and not self._best:
                    self._best = len(gathered)
                if total in preferred:
                    self._best = len(gathered) + 1
            gathered.append(request)
            rows = total
        self._rows = rows

    def _release(self, count: int, why: BatchReason) -> list[InferenceRequest]:
        self.releases[why] += 1
        batch = self._gathered
        if count < len(batch):
            self._queue.put_back(batch[count:])
            batch = batch[:count]
        self._forget()
        self._queue.leave(batch)
        return batch


# The default scheduler: each request runs alone, in order of arrival.


class DefaultScheduler:
    """A model without batching. Has no timeouts and no priorities; ``hold_until`` is the tests' hook."""

    __slots__ = ("_hold", "_queue", "timed")

    def __init__(self, hold_until: int = 0) -> None:
        self.timed = False
        self._queue = RequestQueue(BatchingRules(max_batch_size=0))
        self._hold = hold_until

    @property
    def size(self) -> int:
        """Requests that wait."""
        return self._queue.size

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait, by priority: all have the same."""
        return self._queue.waiting

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Return nothing: no request waits for others."""
        return {}

    def renewed(self) -> DefaultScheduler:
        """Return an empty one."""
        return DefaultScheduler()

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Let ``request`` wait. Never refuses."""
        return self._queue.offer(request, now)

    def give_way(self, request: InferenceRequest) -> InferenceRequest | None:
        """Return None: no request matters less than another."""
        return None

    def take(self, now: int) -> list[InferenceRequest] | None:
        """Return the oldest request, as a batch of its own."""
        if self._queue.size < self._hold:
            return None
        self._hold = 0
        batch = [*itertools.islice(self._queue.pull(), 1)]
        self._queue.leave(batch)
        return batch or None

    def due(self, now: int) -> bool:
        """Return whether ``take`` would return a request."""
        return self._queue.size >= max(self._hold, 1)

    def take_full(self, now: int) -> list[InferenceRequest] | None:
        """Return what ``take`` does: one request is all that fits."""
        return self.take(now)

    def wake_at(self, free: bool) -> int | None:
        """Return None: time changes nothing here."""
        return None

    def expire(self, now: int) -> list[InferenceRequest]:
        """Return nothing: no request waits too long."""
        return []

    def withdraw(self, request: InferenceRequest) -> bool:
        """Drop ``request``; False if it does not wait any more."""
        return self._queue.withdraw(request)

    def drain(self) -> list[InferenceRequest]:
        """Drop and return everything that waits."""
        return self._queue.drain()
