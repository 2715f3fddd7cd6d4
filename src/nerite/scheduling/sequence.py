"""A sequence: requests that belong together, in their order, and what one leaves for the next."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.scheduling.decider import BatchingRules, BatchReason
from nerite.scheduling.dynamic_batcher import DynamicBatcher


class RequestSequence:
    """One sequence, from its first request until its last was answered. Changed by ``SequenceBatcher`` only."""

    __slots__ = (
        "closed",
        "follower",
        "follows",
        "id",
        "ready",
        "running",
        "slot",
        "slots",
        "state",
        "touched_ns",
        "waiting",
    )

    def __init__(self, id: int | str) -> None:
        self.id = id
        self.state: Any = None
        """What the last request left for the next; belongs to ``dispatch/sequence_inputs.py``."""
        self.waiting: deque[SequenceRequest] = deque()
        self.running = False
        """A request of it runs. Two never do."""
        self.ready = False
        """The first request that waits may run: ``slots`` know of it."""
        self.closed = False
        """No request joins it any more."""
        self.follower: RequestSequence | None = None
        """The next sequence with the same id, which may not begin before this one is over."""
        self.follows = False
        """It waits for the one before."""
        self.slots: Any = None
        """The ``Slots`` of the instance that has it; None while it waits for one."""
        self.slot = 0
        """Which of them."""
        self.touched_ns = 0
        """When a request of it last came to its end."""

    def drop(self) -> list[SequenceRequest]:
        """Let go of the requests that wait, and return them."""
        dropped = [*self.waiting]
        self.waiting.clear()
        for request in dropped:
            request.queue = None
        return dropped

    def drop_before_start(self) -> list[SequenceRequest]:
        """Let go of the waiting requests that need what ran before them, and return them."""
        dropped = []
        while self.waiting and not self.waiting[0].starts:
            request = self.waiting.popleft()
            request.queue = None
            dropped.append(request)
        return dropped


class SequenceRequest(InferenceRequest):
    """A request of a sequence, as schedulers and models see it. Its answers are the answers to the caller's.

    It may get another header and other data than the caller wrote, and may run several times.
    """

    __slots__ = ("begun", "ends", "outer", "paused", "sequence", "sequence_id", "starts")

    sequence: RequestSequence

    def __init__(self, outer: InferenceRequest) -> None:
        super().__init__(outer.header, outer.data, outer.sink, outer.arrived_ns, outer.id)
        self.outer = outer
        """The caller's."""
        self.sequence_id = outer.header.sequence_id
        """The caller's, or one that he was given."""
        self.paused = False
        """The caller wants no more responses for now."""
        self.begun = False
        """It has run, and waits to run once more."""
        self.starts = outer.header.sequence_start
        """It is the first of its sequence."""
        self.ends = outer.header.sequence_end
        """It is the last."""
        outer.on_cancel = self._outer_cancelled
        outer.on_pause = self._outer_paused

    def respond(self, response: InferenceResponse, final: bool = True) -> None:
        """Answer the caller."""
        if final:
            self.finished = True
            self.on_cancel = self.on_pause = None
        self.outer.respond(response, final)

    @property
    def caused(self) -> bool:  # type: ignore[override]  # what the caller's says
        """Whether somebody inside the server waits for the answer."""
        return self.outer.caused

    @property
    def origin(self) -> InferenceRequest:
        """The caller's."""
        return self.outer

    def detach(self) -> None:
        """Have the caller's header and data."""
        self.header, self.data = self.outer.header, self.outer.data

    @property
    def held(self) -> bool:
        """Whether it is not to run again for now: it has had responses, and the caller wants no more yet."""
        return self.paused and self.on_pause is not None

    def _outer_cancelled(self, _outer: InferenceRequest) -> None:
        self.cancel()

    def _outer_paused(self, _outer: InferenceRequest, paused: bool) -> None:
        self.paused = paused
        self.pause(paused)


# The rules a sequence batcher works by, as plain data.


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """A model's ``sequence_batching``, normalised."""

    model: str
    slots: int
    """Sequences that an instance works on side by side."""
    max_idle_us: int
    batching: BatchingRules | None = None
    """How requests are gathered under the strategy ``oldest``; None for ``direct``."""
    max_delay_us: int = 0
    """``direct``: how long a batch waits for ``min_utilization``."""
    min_utilization: float = 0.0
    """``direct``: the fraction of slots with a request that a batch need not wait with."""
    hold_until: int = 0
    """``direct``: start nothing before this many wait in slots (``TRITONSERVER_DELAY_SCHEDULER``, a hook for tests)."""
    hold_until_backlog: int = 0
    """Nor, then, before this many wait for a slot (``TRITONSERVER_BACKLOG_DELAY_SCHEDULER``)."""


# Sequences that wait for a slot: in order of arrival, and only here for a limited time, if their requests say so.


class SequenceBacklog:
    """A line of sequences. One that leaves from the middle costs no more than the first."""

    __slots__ = ("_deadlines", "_line", "_most", "_number")

    def __init__(self) -> None:
        self._line: dict[RequestSequence, None] = {}
        self._deadlines: list[tuple[int, int, SequenceRequest]] = []
        self._number = itertools.count()
        self._most = 64

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[RequestSequence]:
        return iter(self._line)

    def __contains__(self, sequence: RequestSequence) -> bool:
        return sequence in self._line

    def add(self, sequence: RequestSequence) -> None:
        """Let a sequence wait."""
        self._line[sequence] = None

    def pop(self) -> RequestSequence:
        """Take out the sequence that has waited longest."""
        sequence = next(iter(self._line))
        del self._line[sequence]
        return sequence

    def remove(self, sequence: RequestSequence) -> None:
        """Take out a sequence, if it is here."""
        self._line.pop(sequence, None)

    def limit(self, request: SequenceRequest) -> None:
        """Note how long a request of a sequence without a slot wants to wait at the most."""
        timeout_us = request.header.timeout_us
        if timeout_us:
            heapq.heappush(self._deadlines, (request.queued_ns + timeout_us * 1000, next(self._number), request))
            # Requests that wait no more leave their entry behind; it must not keep their tensors alive for long.
            if len(self._deadlines) > self._most:
                self._deadlines = [entry for entry in self._deadlines if _waits(entry[2])]
                heapq.heapify(self._deadlines)
                self._most = 2 * len(self._deadlines) + 64

    def next_deadline(self) -> int | None:
        """Return when ``expire`` has something to do next."""
        deadlines = self._deadlines
        while deadlines and not _waits(deadlines[0][2]):
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def expire(self, now: int) -> list[RequestSequence]:
        """Take out and return the sequences of which a request has waited too long."""
        expired: list[RequestSequence] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            sequence = heapq.heappop(self._deadlines)[2].sequence
            self.remove(sequence)
            if sequence not in expired:
                expired.append(sequence)
        return expired


def _waits(request: SequenceRequest) -> bool:
    return request.queue is not None and request.sequence.slots is None


# The slots of one instance: which sequences it works on, and which of their requests make its next batch.

SlotBatch: TypeAlias = list["SequenceRequest | None"]
"""None stands for a slot that has no request for this batch, and is in it all the same."""


class SequenceSlots(Protocol):
    """What both strategies answer to. The instance runs one batch at a time."""

    order: int
    """The number of the instance."""
    seats: list[RequestSequence | None]
    open: bool
    """New sequences may come."""

    def due(self, now: int) -> bool:
        """Return whether ``take`` would return a batch."""

    def ready(self, sequence: RequestSequence) -> None:
        """Note that the first request that waits of a sequence, which has a slot here, may run."""

    def withdraw(self, sequence: RequestSequence) -> None:
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
        self, order: int, count: int, max_delay_us: int, min_utilization: float, releases: dict[BatchReason, int]
    ) -> None:
        """``releases``: where to count why batches begin."""
        self.order = order
        self.seats: list[RequestSequence | None] = [None] * count
        self.open = True
        self._delay = max_delay_us * 1000
        self._enough = min_utilization * count
        self._due: int | None = None
        self._releases = releases

    def due(self, now: int) -> bool:
        """Return whether enough sequences have a request, or one has waited enough."""
        ready = [sequence.waiting[0].queued_ns for sequence in has_slot(self) if sequence.ready]
        return bool(ready) and not self._waits(len(ready), min(ready), now)

    def ready(self, sequence: RequestSequence) -> None:
        """Do nothing: ``take`` looks at all slots."""

    def withdraw(self, sequence: RequestSequence) -> None:
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

    def _why(self, count: int) -> BatchReason:
        """Return why a batch begins that need not wait."""
        if not self._delay or not self._enough:
            return BatchReason.FREE
        return BatchReason.SLOTS if count >= self._enough else BatchReason.DELAY


class OldestSlots:
    """Strategy ``oldest``: the first request of each sequence goes to a dynamic batcher, where the oldest go first."""

    __slots__ = ("_batcher", "open", "order", "seats")

    def __init__(self, order: int, count: int, rules: BatchingRules, releases: dict[BatchReason, int]) -> None:
        """``releases``: where to count why batches begin."""
        self.order = order
        self.seats: list[RequestSequence | None] = [None] * count
        self.open = True
        self._batcher = DynamicBatcher(rules, releases)

    def due(self, now: int) -> bool:
        """Return whether the rules of dynamic batching make a batch of the first requests of all sequences now."""
        return self._batcher.due(now)

    def ready(self, sequence: RequestSequence) -> None:
        """Let the first request of a sequence join the others."""
        request = sequence.waiting[0]
        self._batcher.offer(request, request.queued_ns)

    def withdraw(self, sequence: RequestSequence) -> None:
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


def frees_slot(slots: SequenceSlots) -> bool:
    """Return whether a slot is free for a new sequence, or will be when all that is there has run."""
    return slots.open and any(sequence is None or sequence.closed for sequence in slots.seats)


def has_slot(slots: SequenceSlots) -> Iterator[RequestSequence]:
    """Yield the sequences that have a slot."""
    return (sequence for sequence in slots.seats if sequence is not None)
