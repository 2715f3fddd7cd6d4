"""Sequence batcher: runs the requests of one correlation id in order, on one instance, one at a time.

A sequence starts with a request flagged START and gets a slot of an instance as soon as one is free; until then it
waits in the backlog. It keeps the slot until a request flagged END has run, until it has been idle for ``max_idle_us``
(or at all, once no more requests can come), or until it is lost: one of its requests was cancelled before it ran or
timed out in the backlog, or its instance died. A later request without START is rejected with that reason. On shutdown,
sequences in the backlog for which no slot will become free are rejected.

With tenants, a correlation id names a sequence of its tenant alone: nobody can continue, restart or end a sequence of
another one, and no tenant's sequences get more slots than its share.

Each instance has a ``SequenceSlots``, which decides how the first waiting requests of its sequences form a batch.

A START on a live sequence restarts it in its slot, after its earlier requests. A START after END creates a new sequence
that waits until the old one is over, so that a model that keeps state by correlation id never sees both.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeAlias, TypeVar

from nerite.core.errors import InvalidArgument, NeriteError, QueueTimeout, Unavailable
from nerite.core.request import SequenceKey
from nerite.scheduling.decider import DIRECT, DYNAMIC
from nerite.scheduling.sequence import (
    DirectSlots,
    OldestSlots,
    RequestSequence,
    SequenceBacklog,
    SequenceRequest,
    SequenceRules,
    SequenceSlots,
    SlotBatch,
    frees_slot,
    has_slot,
)

MAX_REMEMBERED: Final = 4096
"""Maximum number of remembered sequences; the oldest are forgotten first."""


class EndedSequences:
    """Reasons why sequences were ended early, by their keys: for the error that their next request gets."""

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: dict[SequenceKey, str] = {}

    def add(self, key: SequenceKey, why: str) -> None:
        """Remember why a sequence was ended."""
        self._reasons[key] = why
        if len(self._reasons) > MAX_REMEMBERED:
            del self._reasons[next(iter(self._reasons))]

    def forget(self, key: SequenceKey) -> None:
        """Forget a sequence, because a new one with its key starts."""
        self._reasons.pop(key, None)

    def why(self, key: SequenceKey) -> str:
        """Return why a sequence was ended; empty if unknown."""
        return self._reasons.get(key, "")


Instance = TypeVar("Instance")
Lost: TypeAlias = list[tuple[SequenceRequest, NeriteError]]
"""Requests that were dropped, each with the error to answer it with."""


class SequenceBatcher(Generic[Instance]):
    """Assigns the sequences of one model to slots of instances. Instances are opaque keys chosen by the owner."""

    __slots__ = (
        "_backlog",
        "_blocked",
        "_ended",
        "_failed",
        "_finishing",
        "_free",
        "_hold",
        "_idle_ns",
        "_idle_sequences",
        "_live",
        "_number",
        "_prepare",
        "_rules",
        "_slots",
        "_stopping",
        "idle",
        "releases",
        "size",
    )

    def __init__(
        self, rules: SequenceRules, prepare: Callable[[SequenceRequest], NeriteError | None] = lambda _request: None
    ) -> None:
        """``prepare`` is called with each request before it may run, after its predecessor in the sequence finished.

        If it returns an error, the request is answered with it and its sequence ends.
        """
        self._rules = rules
        self._prepare = prepare
        self._idle_ns = rules.max_idle_us * 1000
        self._hold = rules.hold_until > 0
        self._live: dict[SequenceKey, RequestSequence] = {}
        """The most recently started sequence of each key that is not over."""
        self._slots: dict[Instance, SequenceSlots] = {}
        self._free: list[tuple[int, int, SequenceSlots]] = []
        """Heap of free slots, lowest slot number first, so that sequences spread over the instances."""
        self._number = itertools.count()
        self._backlog = SequenceBacklog(rules.share_of)
        self._idle_sequences: dict[RequestSequence, None] = {}
        """Idle sequences that hold a slot, in the order in which they became idle."""
        self._ended = EndedSequences()
        self._failed: Lost = []
        """Requests that could not be prepared, and those that waited behind them; returned by ``expire``."""
        self._finishing = False
        self._stopping = False
        self.idle: dict[Instance, SequenceSlots] = {}
        """Instances that are up and idle."""
        self._blocked: set[Instance] = set()
        """Idle instances that had a batch but were not allowed to start it."""
        self.size = 0
        """Number of waiting requests."""
        self.releases = dict.fromkeys(DIRECT if rules.batching is None else DYNAMIC, 0)
        """Number of batches started for each reason, over all instances."""

    def lives(self, key: SequenceKey) -> bool:
        """Return whether a sequence with this key is live."""
        return key in self._live

    def begun(self, key: SequenceKey) -> bool:
        """Return whether the next request of a sequence would continue a live one."""
        sequence = self._live.get(key)
        return sequence is not None and not sequence.closed

    def offer(self, request: SequenceRequest, now: int) -> NeriteError | None:
        """Enqueue ``request``, which belongs to a sequence, or return the error with which it is rejected."""
        key = request.sequence_key
        sequence = self._live.get(key)
        if sequence is None or sequence.closed:
            if not request.starts:
                return self._not_begun(request.sequence_id, self._ended.why(key))
            self._ended.forget(key)
            before, sequence = sequence, RequestSequence(request.sequence_id, key)
            self._live[key] = sequence
            if before is not None:
                before.follower = sequence
                sequence.follows = True
            self._enqueue(sequence, request, now)
            if before is None:
                self._find_slot(sequence)
        else:
            self._enqueue(sequence, request, now)
            if sequence.slots is not None and not sequence.running and len(sequence.waiting) == 1:
                self._make_ready(sequence)
        if sequence.slots is None and request.queue is self:
            self._backlog.limit(request)
        return None

    def choose(self, now: int, may: Callable[[Instance], bool] | None = None) -> tuple[Instance, SlotBatch] | None:
        """Return an idle instance and the batch that it should run now; None if nothing should start.

        ``may`` decides whether an instance that has a batch is allowed to start it.
        """
        if not self.size or (self._hold and self._held()):
            return None
        self._blocked.clear()
        for instance, slots in self.idle.items():
            if may is not None and slots.due(now) and not may(instance):
                self._blocked.add(instance)
                continue
            batch = slots.take(now)
            if batch is not None:
                for request in batch:
                    if request is not None:
                        request.queue = None
                        request.sequence.waiting.popleft()
                        request.sequence.running, request.sequence.ready = True, False
                        self.size -= 1
                del self.idle[instance]
                return instance, batch
        return None

    def ended(
        self, instance: Instance, batch: Iterable[SequenceRequest], now: int, again: Iterable[SequenceRequest] = ()
    ) -> None:
        """Record that ``instance`` finished ``batch``. The requests in ``again`` ran too, and are rescheduled."""
        slots = self._slots.get(instance)
        if slots is None:  # it died, and ``remove_instance`` has already ended its sequences
            return
        for request in again:
            request.starts, request.begun = False, True
            request.queued_ns = now
            request.queue = self
            request.sequence.waiting.appendleft(request)
            self.size += 1
        self.idle[instance] = slots
        for request in itertools.chain(batch, again):
            self._request_ended(request.sequence, now)

    def add_instance(self, instance: Instance) -> None:
        """Add ``instance``, which is up and idle."""
        rules = self._rules
        order = next(self._number)
        slots: SequenceSlots = (
            DirectSlots(order, rules.slots, rules.max_delay_us, rules.min_utilization, self.releases)
            if rules.batching is None
            else OldestSlots(order, rules.slots, rules.batching, self.releases)
        )
        self._slots[instance] = self.idle[instance] = slots
        for slot in range(rules.slots):
            heapq.heappush(self._free, (slot, order, slots))
        self._serve_backlog()

    def remove_instance(self, instance: Instance, why: str) -> Lost:
        """Remove ``instance`` and end its sequences; return the requests that no other instance can run."""
        slots = self._slots.pop(instance, None)
        self.idle.pop(instance, None)
        if slots is None:
            return []
        slots.open = False
        lost: Lost = []
        for sequence in has_slot(slots):
            self._idle_sequences.pop(sequence, None)
            self._backlog.release(sequence)
            sequence.slots = sequence.state = None
            sequence.running = sequence.ready = False
            before = sequence.drop_before_start()
            self.size -= len(before)
            if not sequence.waiting:
                self._close(sequence, why)
                self._remove(sequence)
            else:  # it has not started, or is about to restart: another instance can run it
                for request in sequence.waiting:
                    self._backlog.limit(request)
                self._find_slot(sequence)
            lost += [
                (request, self._interrupted(why) if request.begun else self._not_begun(sequence.id, why))
                for request in before
            ]
        return lost

    def retire(self, instance: Instance) -> None:
        """Start no new sequences on ``instance``; its current ones continue."""
        if instance in self._slots:
            self._slots[instance].open = False

    def holds(self, instance: Instance) -> bool:
        """Return whether ``instance`` has live sequences."""
        slots = self._slots.get(instance)
        return slots is not None and any(has_slot(slots))

    def wake_at(self) -> int | None:
        """Return when to call ``expire`` and ``choose`` unless another event comes first; None for never."""
        if self._failed:
            return 0
        asked = (slots for instance, slots in self.idle.items() if instance not in self._blocked)
        times = [at for slots in asked if (at := slots.wake_at()) is not None]
        if (deadline := self._backlog.next_deadline()) is not None:
            times.append(deadline)
        for sequence in self._idle_sequences:
            times.append(sequence.touched_ns + self._idle_ns)
            break
        return min(times, default=None)

    def expire(self, now: int) -> Lost:
        """End sequences that were idle too long, timed out in the backlog, or can no longer get a slot.

        Return the dropped requests, and those that could not be prepared, each with its error.
        """
        lost, self._failed = self._failed, []
        for sequence in self._backlog.expire(now):
            lost += [
                (request, QueueTimeout("timeout of the corresponding sequence has been expired"))
                for request in self._end(sequence, "one of its requests timed out waiting for a slot")
            ]
        for sequence in [
            *itertools.takewhile(lambda each: each.touched_ns + self._idle_ns <= now, self._idle_sequences)
        ]:
            self._end(
                sequence, f"it received no request for {self._rules.max_idle_us} µs (max_sequence_idle_microseconds)"
            )
        return lost + self._reject_stranded()

    def resume(self, request: SequenceRequest) -> None:
        """Let ``request``, which was held back because its caller paused its responses, run again."""
        if request.queue is self and not request.sequence.ready:
            self._make_ready(request.sequence)

    def server_stops(self) -> None:
        """Prepare for shutdown: from the next ``expire`` on, reject sequences that no slot will become free for."""
        self._stopping = True
        self._backlog.lift_shares()
        self._serve_backlog()

    def finish(self) -> None:
        """End each sequence as soon as it is idle, because no more requests will come."""
        self._finishing = True
        for sequence in [*self._idle_sequences]:
            self._give_up_slot(sequence)

    def withdraw(self, request: SequenceRequest) -> list[SequenceRequest]:
        """End the sequence of ``request``, whose caller cancelled it; return the sequence's waiting requests.

        Do nothing if ``request`` does not wait: a running request continues, and so does its sequence.
        """
        if request.queue is None:
            return []
        return self._end(request.sequence, "one of its requests was cancelled")

    def drain(self) -> list[SequenceRequest]:
        """End all sequences that have waiting requests, because no instance will ever run them; return the requests."""
        held = [sequence for slots in self._slots.values() for sequence in has_slot(slots)]
        sequences = [*held, *self._backlog]
        for sequence in sequences:
            if sequence.follower is not None:
                sequences.append(sequence.follower)
        drained: list[SequenceRequest] = []
        # Followers first, so that none of them gets the slot that its predecessor gives up.
        for sequence in reversed(sequences):
            if sequence.waiting:
                drained += self._end(sequence, "no instance was left to run it")
        return drained

    def _enqueue(self, sequence: RequestSequence, request: SequenceRequest, now: int) -> None:
        request.sequence = sequence
        request.queue = self
        request.queued_ns = now
        sequence.waiting.append(request)
        sequence.closed = request.ends
        self._idle_sequences.pop(sequence, None)
        self.size += 1

    def _find_slot(self, sequence: RequestSequence) -> None:
        """Give a sequence the best free slot, or let it wait in the backlog."""
        sequence.follows = False
        self._backlog.add(sequence)
        self._serve_backlog()

    def _serve_backlog(self) -> None:
        """Assign free slots to the sequences that are next."""
        while self._backlog and self._free:
            slot, _, slots = self._free[0]
            if not slots.open:
                heapq.heappop(self._free)
                continue
            sequence = self._backlog.take(len(self._slots) * self._rules.slots)
            if sequence is None:
                return
            heapq.heappop(self._free)
            slots.seats[slot] = sequence
            sequence.slot, sequence.slots = slot, slots
            self._make_ready(sequence)

    def _make_ready(self, sequence: RequestSequence) -> None:
        """Make the first waiting request of a sequence eligible to run, unless its caller paused responses."""
        request = sequence.waiting[0]
        if request.held:
            return
        error = self._prepare(request)
        if error is not None:
            self._failed += [(each, error) for each in self._end(sequence, "one of its requests could not be prepared")]
            return
        assert sequence.slots is not None
        sequence.ready = True
        sequence.slots.ready(sequence)

    def _request_ended(self, sequence: RequestSequence, now: int) -> None:
        """After a request of a sequence has run: run the next one, end the sequence, or leave it idle."""
        sequence.running = False
        sequence.touched_ns = now
        if sequence.waiting:
            self._make_ready(sequence)
        elif sequence.closed or self._finishing:
            self._give_up_slot(sequence)
        else:
            self._idle_sequences[sequence] = None

    def _close(self, sequence: RequestSequence, why: str) -> None:
        """Stop requests from joining a sequence, and remember why; do nothing if it is already closed."""
        if not sequence.closed:
            sequence.closed = True
            self._ended.add(sequence.key, why)

    def _end(self, sequence: RequestSequence, why: str) -> list[SequenceRequest]:
        """Drop and return the waiting requests of a sequence, and end it as soon as none of its requests runs."""
        if sequence.slots is not None and sequence.ready:
            sequence.slots.withdraw(sequence)
            sequence.ready = False
        dropped = sequence.drop()
        self.size -= len(dropped)
        self._close(sequence, why)
        if sequence.slots is not None:
            if not sequence.running:
                self._give_up_slot(sequence)
        elif not sequence.follows:
            self._backlog.remove(sequence)
            self._remove(sequence)
        return dropped

    def _give_up_slot(self, sequence: RequestSequence) -> None:
        slots = sequence.slots
        assert slots is not None
        slots.seats[sequence.slot] = None
        if slots.open:
            heapq.heappush(self._free, (sequence.slot, slots.order, slots))
        self._backlog.release(sequence)
        sequence.slots = sequence.state = None
        self._idle_sequences.pop(sequence, None)
        self._serve_backlog()
        self._remove(sequence)

    def _remove(self, sequence: RequestSequence) -> None:
        """Remove a sequence that is over, and start the next one with its key."""
        follower = sequence.follower
        while follower is not None and not follower.waiting:
            sequence, follower = follower, follower.follower
        if follower is not None:
            self._find_slot(follower)
        else:
            del self._live[sequence.key]

    def _reject_stranded(self) -> Lost:
        """On shutdown, end the sequences in the backlog if no slot will become free."""
        lost: Lost = []
        if self._stopping and not self._finishing and self._slots and not any(map(frees_slot, self._slots.values())):
            # Ending a sequence may start the next one with its id, hence the loop. Sequences with a request that
            # another request depends on may wait.
            while stranded := [each for each in self._backlog if not any(request.caused for request in each.waiting)]:
                for sequence in stranded:
                    refusal = self._no_room(sequence.id)
                    lost += [(request, refusal) for request in self._end(sequence, "the server stops")]
        return lost

    def _held(self) -> bool:
        """Return whether too few requests wait to start at all. Never checked again once enough have waited."""
        in_slots = sum(len(sequence.waiting) for slots in self._slots.values() for sequence in has_slot(slots))
        rules = self._rules
        self._hold = in_slots < rules.hold_until or self.size - in_slots < rules.hold_until_backlog
        return self._hold

    def _interrupted(self, why: str) -> NeriteError:
        return Unavailable(f"inference request to model '{self._rules.model}' was interrupted: {why}; send it again")

    def _no_room(self, sequence_id: int | str) -> NeriteError:
        return Unavailable(
            "Server is stopping, scheduler for model has stopped accepting new inference requests\n"
            f"    Model '{self._rules.model}' has no free slot for sequence {sequence_id}: send it to another server.",
            retry_after=1,
        )

    def _not_begun(self, sequence_id: int | str, why: str) -> NeriteError:
        """``why`` the sequence was ended, if it is known to have begun."""
        text = (
            f"inference request for sequence {sequence_id} to model '{self._rules.model}' must specify the START flag "
            "on the first request of the sequence"
        )
        return InvalidArgument(f"{text} (sequence {sequence_id} ended: {why})" if why else text)
