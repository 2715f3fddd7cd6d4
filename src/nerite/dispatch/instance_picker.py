"""Instance picker of a model whose requests may run on any instance, and the leases of batches.

An idle instance gets the batch that the decider releases. One that prefetches (``ModelInstance.ahead``) gets a second
batch while the first runs, and starts it the moment the first ends: a round trip to the loop costs a thread about 0.1
ms in which it computes nothing. But a request that was handed over cannot be overtaken, expire or be withdrawn. So only
a full batch goes ahead, which gains nothing by waiting, and only to a model whose batches are so brief that the pause
matters and that waiting behind one more does not.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from nerite.core.errors import QueueTimeout
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import NOBODY, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.dispatch.interface import Ended, May, Refusal
from nerite.instances.instance import Batch, ModelInstance
from nerite.scheduling.decider import BatchReason, Decider

BRIEF_NS: Final = 10_000_000
"""An execution that took less is brief. The pause and the cold caches after it cost a 5 ms execution a tenth of its
rate."""

_NONE: Final[Batch] = []


class AnyInstancePicker:
    """Assigns batches of a decider to instances that have room. On the path of every batch: written for speed."""

    settles = False
    __slots__ = ("_barred", "_behind", "_brief", "_decider", "_full", "_present", "idle", "offer", "timed")

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self.timed = decider.timed
        self.offer = decider.offer
        self.idle: deque[ModelInstance] = deque()
        self._behind: deque[ModelInstance] = deque()
        """Instances that run one batch and accept another."""
        self._full: set[ModelInstance] = set()
        """Instances that run one batch and have another."""
        self._present: set[ModelInstance] = set()
        self._brief = False
        self._barred = False
        """None of the idle instances may start a batch."""

    @property
    def ahead(self) -> bool:
        """Whether a full batch may go to an instance that is not idle."""
        return self._brief and bool(self._behind)

    @property
    def size(self) -> int:
        """Number of requests that wait."""
        return self._decider.size

    @property
    def waiting(self) -> Mapping[int, int]:
        """Number of requests that wait, by priority."""
        return self._decider.waiting

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Number of batches by the reason for their release."""
        return self._decider.releases

    def renewed(self) -> AnyInstancePicker:
        """Return an empty picker with the same rules and no instances."""
        return AnyInstancePicker(self._decider.renewed())

    def alone(self, batch: Batch, index: int) -> Batch:
        """Return the request as a batch of its own."""
        return [batch[index]]

    def displace(self, request: InferenceRequest) -> InferenceRequest | None:
        """Drop and return a request of lower priority than ``request``; return ``request`` itself if none waits."""
        return self._decider.displace(request) or request

    def choose(self, now: int, may: May | None = None) -> tuple[ModelInstance, Batch] | None:
        """Return an instance and the batch to start on it now; None if nothing should start."""
        decider = self._decider
        if not decider.size or (may is not None and not self._bring_forward(may, now)):
            return None
        if self.idle:
            batch = decider.take(now)
            if batch is None:
                return None
            instance = self.idle.popleft()
            if instance.ahead:
                self._behind.append(instance)
            return instance, batch
        if self._brief and self._behind and (batch := decider.take_full(now)) is not None:
            instance = self._behind.popleft()
            self._full.add(instance)
            return instance, batch
        return None

    def ended(
        self, instance: ModelInstance, batch: Batch, responses: Sequence[InferenceResponse | None], took_ns: int
    ) -> Ended:
        """Record that ``instance`` has finished a batch, which finishes all its requests."""
        if instance in self._present:
            self._brief = took_ns < BRIEF_NS
            if not instance.ahead:
                self.idle.append(instance)
            elif instance in self._full:
                self._full.remove(instance)
                self._behind.append(instance)
            else:
                self._behind.remove(instance)
                self.idle.append(instance)
        return batch, responses, _NONE

    def settle(self, request: InferenceRequest, response: InferenceResponse) -> InferenceResponse:
        """Return ``response`` unchanged."""
        return response

    def resume(self, request: InferenceRequest) -> None:
        """Do nothing: requests that run cannot be paused here."""

    def server_stops(self) -> None:
        """Do nothing: no request waits for another one."""

    def finish(self) -> None:
        """Do nothing: no request waits for another one."""

    def add_instance(self, instance: ModelInstance) -> None:
        """Add ``instance``, which is up and idle."""
        self._present.add(instance)
        self.idle.append(instance)

    def remove_instance(self, instance: ModelInstance) -> Sequence[Refusal]:
        """Remove ``instance``, which went down or was removed. No request depended on it."""
        self.retire(instance)
        return ()

    def retire(self, instance: ModelInstance) -> None:
        """Give no more batches to ``instance``, even if it is busy."""
        self._present.discard(instance)
        self._full.discard(instance)
        for among in (self.idle, self._behind):
            if instance in among:
                among.remove(instance)

    def holds(self, instance: ModelInstance) -> bool:
        """Return False: a retiring instance only has to finish what it runs."""
        return False

    def wake_at(self) -> int | None:
        """Return when the gathered batch has waited long enough, or when the next request expires."""
        return self._decider.wake_at(bool(self.idle) and not self._barred)

    def expire(self, now: int) -> Sequence[Refusal]:
        """Drop and return the requests that have waited too long."""
        return [(request, QueueTimeout("Request timeout expired")) for request in self._decider.expire(now)]

    def withdraw(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Drop ``request``, if it waits."""
        return (request,) if self._decider.withdraw(request) else ()

    def drain(self) -> list[InferenceRequest]:
        """Drop and return all waiting requests."""
        return self._decider.drain()

    def _bring_forward(self, may: May, now: int) -> bool:
        """Move an idle instance that may start the batch that is due to the front; return False if there is none."""
        due = self._decider.due(now)
        instance = next(filter(may, self.idle), None) if due else None
        self._barred = due and instance is None
        if instance is not None:
            self.idle.remove(instance)
            self.idle.appendleft(instance)
        return instance is not None


# Leases: each batch that was handed to an instance comes back exactly once.
#
# A batch that an instance cannot take as a whole, because one of its requests cannot be sent, is handed over again
# request by request: then only the request at fault fails, and the others run.


class BatchSplit:
    """A batch that runs request by request: the requests left to run, and the responses so far."""

    __slots__ = ("_left", "awaited", "batch", "looping", "responses", "timings")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.timings: ExecutionTimes | None = None
        """Times of the latest execution."""
        self.responses: list[InferenceResponse | None] = [None] * len(batch)
        # A request that only fills a slot has no caller, and gets no response.
        self._left = [index for index, request in enumerate(batch) if request.sink is not NOBODY]
        self._left.reverse()
        self.awaited: int | None = None
        """Index of the running request in the batch."""
        self.looping = False
        """A loop in progress hands over the next request."""

    def next(self) -> int | None:
        """Return the index of the request to run now; None after the last."""
        self.awaited = self._left.pop() if self._left else None
        return self.awaited

    def answered(
        self, alone: Batch, responses: Sequence[InferenceResponse | None], timings: ExecutionTimes | None
    ) -> None:
        """Record the response to the request that ran in ``alone``."""
        assert self.awaited is not None
        self.responses[self.awaited] = responses[alone.index(self.batch[self.awaited])]
        self.timings = timings or self.timings
        self.awaited = None


class Leases:
    """Batches of one model version that its instances have. For the loop's thread only.

    A batch is identified by its list object: it comes back as the same object, exactly once.
    """

    __slots__ = ("_by_batch", "begun", "requests")

    def __init__(self) -> None:
        self._by_batch: dict[int, tuple[ModelInstance, Batch]] = {}
        self.begun = 0
        """Total number of leases."""
        self.requests = 0
        """Number of requests in leased batches, including those that only fill a slot."""

    def begin(self, instance: ModelInstance, batch: Batch) -> None:
        """Lease ``batch`` to ``instance``."""
        self._by_batch[id(batch)] = instance, batch
        self.begun += 1
        self.requests += len(batch)

    def end(self, batch: Batch, timings: ExecutionTimes | None = None) -> bool:
        """End the lease of ``batch``; return False if it has none. Without ``timings`` it was not executed."""
        if self._by_batch.pop(id(batch), None) is None:
            return False
        self.requests -= len(batch)
        return True

    def __contains__(self, batch: Batch) -> bool:
        return id(batch) in self._by_batch

    def holder(self, batch: Batch) -> ModelInstance | None:
        """Return the instance that has ``batch``; None if it has no lease."""
        found = self._by_batch.get(id(batch))
        return None if found is None else found[0]

    def __iter__(self) -> Iterator[Batch]:
        return (batch for _, batch in self._by_batch.values())

    def holds(self, instance: ModelInstance) -> bool:
        """Return whether ``instance`` has a batch."""
        return any(holder is instance for holder, _ in self._by_batch.values())

    def lost(self) -> Sequence[tuple[ModelInstance, Batch]]:
        """Return the leased batches whose instance reports that it has nothing to do."""
        return [(instance, batch) for instance, batch in self._by_batch.values() if not instance.busy]


def unanswered(holder: Callable[[InferenceRequest], None], since: int) -> list[InferenceRequest]:
    """Return unfinished requests whose ``on_cancel`` is ``holder`` and that are in no queue.

    A request queued before ``since`` is in a queue that no longer exists. They are found by a scan of all objects of
    the process, so that no bookkeeping per request is needed for the rare case that one is lost.
    """
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), InferenceRequest)  # ``isinstance`` may run code of the object's class
        and not each.finished
        and each.on_cancel is holder
        and (each.queue is None or each.queued_ns < since)
    ]
