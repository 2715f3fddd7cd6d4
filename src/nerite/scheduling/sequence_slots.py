"""The slots of one instance: which sequences it works on, and which of their requests make its next batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

from nerite.scheduling.dynamic_batcher import DynamicBatcher
from nerite.scheduling.policy import BatchingRules
from nerite.scheduling.release import Release
from nerite.scheduling.sequence import Sequence, SequenceRequest

SlotBatch: TypeAlias = list["SequenceRequest | None"]
"""None stands for a slot that has no request for this batch, and is in it all the same."""


class Slots(Protocol):
    """What both strategies answer to. The instance runs one batch at a time."""

    order: int
    """The number of the instance."""
    seats: list[Sequence | None]
    open: bool
    """New sequences may come."""

    def due(self, now: int) -> bool:
        """Return whether ``take`` would return a batch."""

    def ready(self, sequence: Sequence) -> None:
        """Note that the first request that waits of a sequence, which has a slot here, may run."""

    def withdraw(self, sequence: Sequence) -> None:
        """Note that the first request that waits of a sequence may not run after all."""

    def take(self, now: int) -> SlotBatch | None:
        """Return the batch that the instance, which is idle, should run now; None if it should wait."""

    def wake_at(self) -> int | None:
        """Return when to ask ``take``, which was asked last, again if nothing else happens before."""


class DirectSlots:
    """Strategy ``direct``: each sequence has a place of its own in every batch, from its first request to its last.

    A batch reaches to the highest slot that has a request. It waits, for a limited time, until enough slots have one.
    """

    __slots__ = ("_delay", "_due", "_enough", "_releases", "open", "order", "seats")

    def __init__(
        self, order: int, count: int, max_delay_us: int, min_utilization: float, releases: dict[Release, int]
    ) -> None:
        """``releases``: where to count why batches begin."""
        self.order = order
        self.seats: list[Sequence | None] = [None] * count
        self.open = True
        self._delay = max_delay_us * 1000
        self._enough = min_utilization * count
        self._due: int | None = None
        self._releases = releases

    def due(self, now: int) -> bool:
        """Return whether enough sequences have a request, or one has waited enough."""
        ready = [sequence.waiting[0].queued_ns for sequence in seated(self) if sequence.ready]
        return bool(ready) and not self._waits(len(ready), min(ready), now)

    def ready(self, sequence: Sequence) -> None:
        """Do nothing: ``take`` looks at all slots."""

    def withdraw(self, sequence: Sequence) -> None:
        """Wait for nothing until ``take`` is asked again."""
        self._due = None

    def take(self, now: int) -> SlotBatch | None:
        """Return the first requests of all sequences, each in its slot, if they are enough or have waited enough."""
        self._due = None
        first = [sequence.waiting[0] if sequence is not None and sequence.ready else None for sequence in self.seats]
        ready = [request for request in first if request is not None]
        if not ready:
            return None
        oldest = min(ready, key=_age)
        if self._waits(len(ready), oldest.queued_ns, now):
            self._due = oldest.queued_ns + self._delay
            return None
        # Requests of other shapes have to stay behind. The oldest has its way, so that each gets its turn.
        key = oldest.header.batch_key
        batch = [None if request is None or request.header.batch_key != key else request for request in first]
        while batch[-1] is None:
            batch.pop()
        self._releases[self._why(len(ready))] += 1
        return batch

    def wake_at(self) -> int | None:
        """Return when the oldest request has waited enough."""
        return self._due

    def _waits(self, count: int, since: int, now: int) -> bool:
        return count < self._enough and now - since < self._delay

    def _why(self, count: int) -> Release:
        """Return why a batch begins that need not wait."""
        if not self._delay or not self._enough:
            return Release.FREE
        return Release.SLOTS if count >= self._enough else Release.DELAY


class OldestSlots:
    """Strategy ``oldest``: the first request of each sequence goes to a dynamic batcher, where the oldest go first."""

    __slots__ = ("_batcher", "open", "order", "seats")

    def __init__(self, order: int, count: int, rules: BatchingRules, releases: dict[Release, int]) -> None:
        """``releases``: where to count why batches begin."""
        self.order = order
        self.seats: list[Sequence | None] = [None] * count
        self.open = True
        self._batcher = DynamicBatcher(rules, releases)

    def due(self, now: int) -> bool:
        """Return whether the rules of dynamic batching make a batch of the first requests of all sequences now."""
        return self._batcher.due(now)

    def ready(self, sequence: Sequence) -> None:
        """Let the first request of a sequence join the others."""
        request = sequence.waiting[0]
        self._batcher.offer(request, request.queued_ns)

    def withdraw(self, sequence: Sequence) -> None:
        """Take it back."""
        self._batcher.withdraw(sequence.waiting[0])

    def take(self, now: int) -> SlotBatch | None:
        """Return what the rules of dynamic batching make of the first requests of all sequences."""
        # All that was offered is of sequences; the batcher does not know.
        return self._batcher.take(now) if self._batcher.size else None  # type: ignore[return-value]

    def wake_at(self) -> int | None:
        """Return when the gathered batch has waited enough."""
        return self._batcher.wake_at(True)


def _age(request: SequenceRequest) -> int:
    return request.queued_ns


def frees(slots: Slots) -> bool:
    """Return whether a slot is free for a new sequence, or will be when all that is there has run."""
    return slots.open and any(sequence is None or sequence.closed for sequence in slots.seats)


def seated(slots: Slots) -> Iterator[Sequence]:
    """Yield the sequences that have a slot."""
    return (sequence for sequence in slots.seats if sequence is not None)
