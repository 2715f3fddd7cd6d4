"""Parts of the sequence batcher: sequences and their requests, rules, backlog, and the slots of an instance.

``SequenceBatcher`` in ``sequence_batcher.py`` ties them together.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

from nerite.core.request import EVERYBODY, InferenceRequest, SequenceKey
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, TensorSpec
from nerite.scheduling.decider import BatchingRules, BatchReason
from nerite.scheduling.dynamic_batcher import DynamicBatcher


class StateForm:
    """Types and shapes of a model's states between two requests. Interned, mostly."""

    __slots__ = ("specs", "varies")

    def __init__(self, specs: tuple[TensorSpec, ...], *, varies: bool) -> None:
        self.specs = specs
        """Specs of the state inputs, in the order of the configuration."""
        self.varies = varies
        """Requests may have different forms, which cannot share a batch."""


class KeptState(NamedTuple):
    """The states that a sequence keeps between two requests."""

    form: StateForm
    data: list[Buffer]


class RequestSequence:
    """State of one sequence, from its first request until its last is answered. Changed by ``SequenceBatcher`` only."""

    __slots__ = (
        "closed",
        "follower",
        "follows",
        "id",
        "key",
        "ready",
        "running",
        "slot",
        "slots",
        "state",
        "touched_ns",
        "waiting",
    )

    def __init__(self, id: int | str, key: SequenceKey | None = None) -> None:
        """``key`` tells it from the sequences of other tenants with the same id; None: there are none."""
        self.id = id
        self.key = id if key is None else key
        self.state: KeptState | None = None
        """Implicit state that the last request left for the next; ``SequenceInputs`` keeps it."""
        self.waiting: deque[SequenceRequest] = deque()
        self.running = False
        """One of its requests runs. Two never run at once."""
        self.ready = False
        """Its first waiting request may run, and ``slots`` has been notified."""
        self.closed = False
        """No further request may join it."""
        self.follower: RequestSequence | None = None
        """The next sequence with the same id, which may not start before this one is over."""
        self.follows = False
        """It waits for its predecessor with the same id to end."""
        self.slots: SequenceSlots | None = None
        """Slots of the instance that runs it; None while it waits for a slot."""
        self.slot = 0
        """Index of its slot in ``slots``."""
        self.touched_ns = 0
        """When one of its requests last finished."""

    @property
    def tenant(self) -> str:
        """Whose it is."""
        key = self.key
        return key[0] if isinstance(key, tuple) else EVERYBODY

    def drop(self) -> list[SequenceRequest]:
        """Drop and return all waiting requests."""
        dropped = [*self.waiting]
        self.waiting.clear()
        for request in dropped:
            request.queue = None
        return dropped

    def drop_before_start(self) -> list[SequenceRequest]:
        """Drop and return the waiting requests before the next START, which depend on earlier ones."""
        dropped = []
        while self.waiting and not self.waiting[0].starts:
            request = self.waiting.popleft()
            request.queue = None
            dropped.append(request)
        return dropped


class SequenceRequest(InferenceRequest):
    """Request of a sequence as schedulers and models see it; its responses answer the caller's request.

    Its header and data may differ from the caller's, and it may run several times.
    """

    __slots__ = ("begun", "ends", "outer", "paused", "sequence", "sequence_id", "sequence_key", "starts")

    sequence: RequestSequence

    def __init__(self, outer: InferenceRequest) -> None:
        super().__init__(outer.header, outer.data, outer.sink, outer.arrived_ns, outer.id)
        self.outer = outer
        """The caller's request."""
        self.sequence_id = outer.header.sequence_id
        """The caller's correlation id, or one that was assigned to the request."""
        self.sequence_key = outer.header.sequence_key
        """Names its sequence."""
        self.paused = False
        """The caller applies backpressure: it accepts no more responses for now."""
        self.begun = False
        """It has run and was rescheduled to run again."""
        self.starts = outer.header.sequence_start
        """It is the first request of its sequence."""
        self.ends = outer.header.sequence_end
        """It is the last request of its sequence."""
        outer.on_cancel = self._outer_cancelled
        outer.on_pause = self._outer_paused

    def assign(self, sequence_id: int) -> None:
        """Make it a request of another sequence of its tenant."""
        key = self.sequence_key
        self.sequence_id = sequence_id
        self.sequence_key = (key[0], sequence_id) if isinstance(key, tuple) else sequence_id

    def respond(self, response: InferenceResponse, final: bool = True) -> None:
        """Send ``response`` to the caller."""
        if final:
            self.finished = True
            self.on_cancel = self.on_pause = None
        self.outer.respond(response, final)

    @property
    def caused(self) -> bool:  # type: ignore[override]  # delegates to the caller's request
        """Whether another request inside the server waits for the answer."""
        return self.outer.caused

    @property
    def origin(self) -> InferenceRequest:
        """The caller's request."""
        return self.outer

    def detach(self) -> None:
        """Restore the caller's header and data."""
        self.header, self.data = self.outer.header, self.outer.data

    @property
    def held(self) -> bool:
        """Whether it must not run again yet, because its caller paused responses."""
        return self.paused and self.on_pause is not None

    def _outer_cancelled(self, _outer: InferenceRequest) -> None:
        self.cancel()

    def _outer_paused(self, _outer: InferenceRequest, paused: bool) -> None:
        self.paused = paused
        self.pause(paused)


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """Normalised ``sequence_batching`` of a model."""

    model: str
    slots: int
    """Number of sequences that an instance runs concurrently."""
    max_idle_us: int
    batching: BatchingRules | None = None
    """Rules for gathering requests under the strategy ``oldest``; None for ``direct``."""
    max_delay_us: int = 0
    """``direct``: how long a batch waits for ``min_utilization``."""
    min_utilization: float = 0.0
    """``direct``: fraction of slots that must have a request for a batch to start without delay."""
    hold_until: int = 0
    """``direct``: start no batch before this many requests wait in slots (``TRITONSERVER_DELAY_SCHEDULER``).

    A hook for tests."""
    hold_until_backlog: int = 0
    """In addition, wait for this many requests in the backlog (``TRITONSERVER_BACKLOG_DELAY_SCHEDULER``)."""
    share_of: Callable[[str], float] | None = None
    """Returns the fraction of all slots that the sequences of a tenant may hold; None: requests have no tenants."""


class SequenceBacklog:
    """Sequences that wait for a slot, with optional timeouts; removal from the middle takes constant time.

    They are served in the order in which they came. Those of several tenants: the tenant that holds fewest slots is
    next, and none gets a slot beyond its share, so that nobody can keep others out by never ending sequences.

    Request timeouts apply only while the sequence is in the backlog.
    """

    __slots__ = ("_deadlines", "_held", "_lines", "_most", "_number", "_share_of")

    def __init__(self, share_of: Callable[[str], float] | None = None) -> None:
        """``share_of`` is that of ``SequenceRules``."""
        self._share_of = share_of
        self._lines: dict[str, dict[RequestSequence, None]] = {}
        """Sequences that wait, by tenant; all in one line if requests have no tenants. Lines are never empty."""
        self._held: dict[str, int] = {}
        """Number of slots that the sequences of each tenant hold."""
        self._deadlines: list[tuple[int, int, SequenceRequest]] = []
        self._number = itertools.count()
        self._most = 64

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[RequestSequence]:
        return itertools.chain.from_iterable(self._lines.values())

    def _line_of(self, sequence: RequestSequence) -> str:
        return EVERYBODY if self._share_of is None else sequence.tenant

    def add(self, sequence: RequestSequence) -> None:
        """Append a sequence."""
        self._lines.setdefault(self._line_of(sequence), {})[sequence] = None

    def take(self, slots: int) -> RequestSequence | None:
        """Remove and return the sequence that gets a free slot, of ``slots`` in all; None if its tenant may have none.

        ``release`` must follow when it gives up its slot.
        """
        lines, share_of = self._lines, self._share_of
        tenant = EVERYBODY
        if share_of is not None:
            held = self._held
            for tenant in lines if len(lines) == 1 else sorted(lines, key=self._holds):
                count = held.get(tenant, 0)
                if not count or count < int(share_of(tenant) * slots + _ROUNDING):
                    held[tenant] = count + 1
                    break
            else:
                return None
        line = lines.pop(tenant)
        sequence = next(iter(line))
        del line[sequence]
        if line:
            lines[tenant] = line  # at the end: among equals, the next one is another
        return sequence

    def _holds(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    def release(self, sequence: RequestSequence) -> None:
        """Record that a sequence has given up its slot."""
        if self._share_of is not None:
            tenant = sequence.tenant
            if left := self._held[tenant] - 1:
                self._held[tenant] = left
            else:
                del self._held[tenant]

    def lift_shares(self) -> None:
        """Let sequences have any free slot from now on."""
        if self._share_of is not None:
            self._share_of = _everything

    def remove(self, sequence: RequestSequence) -> None:
        """Remove a sequence if it is in the backlog."""
        line = self._line_of(sequence)
        sequences = self._lines.get(line)
        if sequences is not None:
            sequences.pop(sequence, None)
            if not sequences:
                del self._lines[line]

    def limit(self, request: SequenceRequest) -> None:
        """Register the timeout, if any, of a request whose sequence has no slot."""
        timeout_us = request.header.timeout_us
        if timeout_us:
            heapq.heappush(self._deadlines, (request.queued_ns + timeout_us * 1000, next(self._number), request))
            # Requests that no longer wait leave a stale entry, which must not keep their tensors alive for long.
            if len(self._deadlines) > self._most:
                self._deadlines = [entry for entry in self._deadlines if _waits(entry[2])]
                heapq.heapify(self._deadlines)
                self._most = 2 * len(self._deadlines) + 64

    def next_deadline(self) -> int | None:
        """Return the earliest deadline of a waiting request; None if there is none."""
        deadlines = self._deadlines
        while deadlines and not _waits(deadlines[0][2]):
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def expire(self, now: int) -> list[RequestSequence]:
        """Remove and return the sequences that have a request past its deadline."""
        expired: list[RequestSequence] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            sequence = heapq.heappop(self._deadlines)[2].sequence
            self.remove(sequence)
            if sequence not in expired:
                expired.append(sequence)
        return expired


_ROUNDING: Final = 1e-9


def _everything(_tenant: str) -> float:
    return 1.0


def _waits(request: SequenceRequest) -> bool:
    return request.queue is not None and request.sequence.slots is None


SlotBatch: TypeAlias = list["SequenceRequest | None"]
"""Batch by slot. None stands for a slot without a request that is part of the batch nevertheless."""


class SequenceSlots(Protocol):
    """Slots of one instance: the sequences assigned to it, and the decision which of their requests run next.

    Implemented by both batching strategies. The instance runs one batch at a time.
    """

    order: int
    """Number of the instance."""
    seats: list[RequestSequence | None]
    open: bool
    """New sequences may be assigned."""

    def due(self, now: int) -> bool:
        """Return whether ``take`` would return a batch."""

    def ready(self, sequence: RequestSequence) -> None:
        """Record that the first waiting request of a sequence with a slot here may run."""

    def withdraw(self, sequence: RequestSequence) -> None:
        """Record that the first waiting request of a sequence may not run after all."""

    def take(self, now: int) -> SlotBatch | None:
        """Return the batch that the idle instance should run now; None to wait."""

    def wake_at(self) -> int | None:
        """Return when to repeat the last call of ``take`` unless another event comes first; None for never."""


class DirectSlots:
    """Strategy ``direct``: each sequence occupies the same row of every batch, from its first request to its last.

    A batch extends to the highest slot that has a request. It waits up to the maximum delay until enough slots have
    one.
    """

    __slots__ = ("_delay", "_due", "_enough", "_releases", "open", "order", "seats")

    def __init__(
        self, order: int, count: int, max_delay_us: int, min_utilization: float, releases: dict[BatchReason, int]
    ) -> None:
        """``releases`` counts the reasons of batches."""
        self.order = order
        self.seats: list[RequestSequence | None] = [None] * count
        self.open = True
        self._delay = max_delay_us * 1000
        self._enough = min_utilization * count
        self._due: int | None = None
        self._releases = releases

    def due(self, now: int) -> bool:
        """Return whether enough sequences have a request, or one has waited for the maximum delay."""
        ready = [sequence.waiting[0].queued_ns for sequence in has_slot(self) if sequence.ready]
        return bool(ready) and not self._waits(len(ready), min(ready), now)

    def ready(self, sequence: RequestSequence) -> None:
        """Do nothing: ``take`` looks at all slots."""

    def withdraw(self, sequence: RequestSequence) -> None:
        """Clear the wake-up time until the next call of ``take``."""
        self._due = None

    def take(self, now: int) -> SlotBatch | None:
        """Return the first requests of all sequences by slot, if there are enough or one reached the maximum delay."""
        self._due = None
        first = [sequence.waiting[0] if sequence is not None and sequence.ready else None for sequence in self.seats]
        ready = [request for request in first if request is not None]
        if not ready:
            return None
        oldest = min(ready, key=_queued_since)
        if self._waits(len(ready), oldest.queued_ns, now):
            self._due = oldest.queued_ns + self._delay
            return None
        # Requests of other shapes have to wait. The oldest request decides the shape, so that none starves.
        key = oldest.header.batch_key
        batch = [None if request is None or request.header.batch_key != key else request for request in first]
        while batch[-1] is None:
            batch.pop()
        self._releases[self._reason(len(ready))] += 1
        return batch

    def wake_at(self) -> int | None:
        """Return when the oldest request reaches the maximum delay; None if no batch waits."""
        return self._due

    def _waits(self, count: int, since: int, now: int) -> bool:
        return count < self._enough and now - since < self._delay

    def _reason(self, count: int) -> BatchReason:
        """Return the reason why a batch of ``count`` requests starts."""
        if not self._delay or not self._enough:
            return BatchReason.FREE
        return BatchReason.SLOTS if count >= self._enough else BatchReason.DELAY


class OldestSlots:
    """Strategy ``oldest``: the first request of each sequence goes to a dynamic batcher, where the oldest run first."""

    __slots__ = ("_batcher", "open", "order", "seats")

    def __init__(self, order: int, count: int, rules: BatchingRules, releases: dict[BatchReason, int]) -> None:
        """``releases`` counts the reasons of batches."""
        self.order = order
        self.seats: list[RequestSequence | None] = [None] * count
        self.open = True
        self._batcher = DynamicBatcher(rules, releases)

    def due(self, now: int) -> bool:
        """Return whether the dynamic batcher would start a batch of the sequences' first requests now."""
        return self._batcher.due(now)

    def ready(self, sequence: RequestSequence) -> None:
        """Enqueue the first request of a sequence in the dynamic batcher."""
        request = sequence.waiting[0]
        self._batcher.offer(request, request.queued_ns)

    def withdraw(self, sequence: RequestSequence) -> None:
        """Remove the first request of a sequence from the dynamic batcher."""
        self._batcher.withdraw(sequence.waiting[0])

    def take(self, now: int) -> SlotBatch | None:
        """Return the batch that the dynamic batcher forms of the sequences' first requests."""
        # Only sequence requests were offered, but the batcher's type does not say so.
        return self._batcher.take(now) if self._batcher.size else None  # type: ignore[return-value]

    def wake_at(self) -> int | None:
        """Return when the gathered batch reaches its delay; None for never."""
        return self._batcher.wake_at(True)


def _queued_since(request: SequenceRequest) -> int:
    return request.queued_ns


def frees_slot(slots: SequenceSlots) -> bool:
    """Return whether a slot is free for a new sequence, or will be once all queued requests have run."""
    return slots.open and any(sequence is None or sequence.closed for sequence in slots.seats)


def has_slot(slots: SequenceSlots) -> Iterator[RequestSequence]:
    """Yield the sequences that occupy a slot."""
    return (sequence for sequence in slots.seats if sequence is not None)
