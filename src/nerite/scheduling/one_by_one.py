"""The default scheduler: each request runs alone, in order of arrival."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest
from nerite.scheduling.policy import BatchingRules
from nerite.scheduling.release import Release
from nerite.scheduling.request_queue import RequestQueue


class OneByOne:
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
    def releases(self) -> Mapping[Release, int]:
        """Return nothing: no request waits for others."""
        return {}

    def renewed(self) -> OneByOne:
        """Return an empty one."""
        return OneByOne()

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
