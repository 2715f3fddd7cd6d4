"""Schedulers of models without sequences: the dynamic batcher, and the default scheduler that never batches.

The dynamic batcher gathers requests into batches of preferred sizes and delays none longer than ``max_delay``. ``take``
is called when an instance is free. It pulls requests from the queue into ``_gathered`` while they fit the batch (rows,
and shapes if those vary), and notes the longest prefix whose size is preferred. Then, in this order:

1. If a preferred size was met and the oldest request has not waited ``max_delay``, that prefix runs.
2. If the batch cannot grow (the next request does not fit, or the largest preferred size is reached), or no delay is
   configured, or the oldest request has waited it out, all gathered requests run, preferred size or not.
3. Otherwise the gathered batch waits for more requests or for ``wake_at``.

Gathered requests stay gathered between calls, so that each is examined once however long the batch waits. They are put
back before any event that may change the front of the queue: a request that overtakes, expires or is withdrawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.scheduling.decider import DYNAMIC, BatchingRules, BatchReason
from nerite.scheduling.request_queue import RequestQueue


class DynamicBatcher:
    """Scheduler of a model with ``dynamic_batching``."""

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
        "_reordered",
        "_rows",
        "_rules",
        "releases",
        "timed",
    )

    def __init__(self, rules: BatchingRules, releases: dict[BatchReason, int] | None = None) -> None:
        """``releases`` counts the reasons of batches; pass one to share it between batchers."""
        self.timed = any(policy.timeout_us for policy in (rules.default_policy, *rules.policies.values()))
        self._rules = rules
        self._queue = RequestQueue(rules)
        self._reordered = not self._queue.in_order_of_arrival
        self._limit = max(rules.max_batch_size, 1)
        self._preferred = frozenset(rules.preferred_sizes)
        self._largest = max(rules.preferred_sizes, default=self._limit)
        self._delay = rules.max_delay_us * 1000
        self._hold = rules.hold_until
        self.releases = dict.fromkeys(DYNAMIC, 0) if releases is None else releases
        self._reset()

    @property
    def size(self) -> int:
        """Number of waiting requests."""
        return self._queue.size

    @property
    def waiting(self) -> Mapping[int, int]:
        """Number of waiting requests by priority."""
        return self._queue.waiting

    def renewed(self) -> DynamicBatcher:
        """Return an empty batcher with the same rules and the same counters."""
        return DynamicBatcher(self._rules, self.releases)

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Enqueue ``request``, or return the error with which the queue rejects it."""
        refusal = self._queue.offer(request, now)
        if self._reordered and self._gathered and not refusal and self._queue.overtakes(request, self._gathered[-1]):
            self._put_back()
        return refusal

    def displace(self, request: InferenceRequest) -> InferenceRequest | None:
        """Drop and return the youngest request of the lowest priority if it ranks below ``request``; else None."""
        if not self._queue.has_priorities:
            return None
        self._put_back()
        return self._queue.displace(request)

    def take(self, now: int) -> list[InferenceRequest] | None:
        """Return the batch that a free instance should run now; None to wait."""
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
        """Return the batch of ``take`` if no later request could join it; else None."""
        if self._queue.size < self._hold:
            return None
        if not self._full:
            self._gather()
        return self.take(now) if self._full or self._rows >= self._largest else None

    def wake_at(self, free: bool) -> int | None:
        """Return when the gathered batch reaches its delay or the next request expires; None for never."""
        deadline = self._queue.next_deadline()
        if not free or not self._gathered or not self._delay:
            return deadline
        due = self._oldest + self._delay
        return due if deadline is None or due < deadline else deadline

    def expire(self, now: int) -> list[InferenceRequest]:
        """Drop and return the requests that their queue policy rejects on timeout."""
        deadline = self._queue.next_deadline()
        if deadline is None or deadline > now:
            return []
        self._put_back()
        return self._queue.expire(now)

    def withdraw(self, request: InferenceRequest) -> bool:
        """Drop ``request``; return False if it no longer waits."""
        self._put_back()
        return self._queue.withdraw(request)

    def drain(self) -> list[InferenceRequest]:
        """Drop and return all waiting requests."""
        self._put_back()
        return self._queue.drain()

    def _reset(self) -> None:
        self._gathered: list[InferenceRequest] = []
        self._key: object = None
        self._rows = 0
        self._best = 0
        self._oldest = 0
        self._full = False

    def _put_back(self) -> None:
        if self._gathered:
            self._queue.put_back(self._gathered)
            self._reset()

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

    def _release(self, count: int, reason: BatchReason) -> list[InferenceRequest]:
        self.releases[reason] += 1
        batch = self._gathered
        if count < len(batch):
            self._queue.put_back(batch[count:])
            batch = batch[:count]
        self._reset()
        self._queue.leave(batch)
        return batch


class DefaultScheduler(DynamicBatcher):
    """Scheduler of a model without batching: each request runs alone, in FIFO order, and none is gathered.

    It has no timeouts and no priorities. ``hold_until`` is a hook for tests.
    """

    __slots__ = ()

    def __init__(self, hold_until: int = 0) -> None:
        super().__init__(BatchingRules(max_batch_size=0, hold_until=hold_until), {})

    def renewed(self) -> DefaultScheduler:
        """Return an empty scheduler."""
        return DefaultScheduler()

    def take(self, now: int) -> list[InferenceRequest] | None:
        """Return the oldest request as a batch of one."""
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
        """Return the batch of ``take``, which is always full."""
        return self.take(now)
