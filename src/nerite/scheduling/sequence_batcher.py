"""The sequence batcher: requests with one correlation id run in order, on one instance, one at a time.

Theory of operation. A sequence begins with a request that says START, and gets a slot of an instance as soon as one is
free; until then it stands in the backlog. It keeps the slot until a request with END has run, until nothing of it has
waited or run for ``max_idle_us`` (at all, once no more requests come), or until it is lost: a request of it was
cancelled before it ran, waited too long in the backlog, or its instance died. Whoever asks for it afterwards, without
START, is told so. When the server stops, those in the backlog that no slot becomes free for have no future here.

How the requests that are first in line in their sequences make a batch is the business of ``SequenceSlots``, one of
which each instance has.

A START on a live sequence begins it anew, in its place, after what was asked before. A START after END makes a new
sequence that waits until the old one is over: a model that keeps state by correlation id never sees both.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeAlias, TypeVar

from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
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

# Why sequences are over that did not end by themselves: for the error that their next request gets.

MOST: Final = 4096
"""Sequences remembered: the last ones."""


class EndedSequences:
    """Reasons by correlation id."""

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: dict[int | str, str] = {}

    def add(self, sequence_id: int | str, why: str) -> None:
        """Remember why a sequence is over."""
        self._reasons[sequence_id] = why
        if len(self._reasons) > MOST:
            del self._reasons[next(iter(self._reasons))]

    def forget(self, sequence_id: int | str) -> None:
        """Forget a sequence, because another one with its id begins."""
        self._reasons.pop(sequence_id, None)

    def why(self, sequence_id: int | str) -> str | None:
        """Return why a sequence is over, if it is known."""
        return self._reasons.get(sequence_id)


Instance = TypeVar("Instance")
Lost: TypeAlias = list[tuple[SequenceRequest, NeriteError]]
"""Requests that wait no more, and what they are to be told."""


class SequenceBatcher(Generic[Instance]):
    """The sequences of one model. Instances are whatever the owner calls them."""

    __slots__ = (
        "_backlog",
        "_barred",
        "_ended",
        "_failed",
        "_finishing",
        "_free",
        "_hold",
        "_idle_ns",
        "_live",
        "_number",
        "_prepare",
        "_resting",
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
        """``prepare`` is called with a request when what ran before it in its sequence is over, before it may run.

        It returns an error if the request cannot run; then its sequence is over.
        """
        self._rules = rules
        self._prepare = prepare
        self._idle_ns = rules.max_idle_us * 1000
        self._hold = rules.hold_until > 0
        self._live: dict[int | str, RequestSequence] = {}
        """By id, the sequence that was begun last and is not over."""
        self._slots: dict[Instance, SequenceSlots] = {}
        self._free: list[tuple[int, int, SequenceSlots]] = []
        """SequenceSlots that nobody has, the lowest number first: sequences spread over the instances."""
        self._number = itertools.count()
        self._backlog = SequenceBacklog()
        self._resting: dict[RequestSequence, None] = {}
        """Sequences with a slot of which nothing waits or runs, in the order in which that began."""
        self._ended = EndedSequences()
        self._failed: Lost = []
        """Requests that could not be prepared, and those that waited behind them: ``expire`` returns them."""
        self._finishing = False
        self._stopping = False
        self.idle: dict[Instance, SequenceSlots] = {}
        """The instances that are up and run nothing."""
        self._barred: set[Instance] = set()
        """Idle instances that had to let their requests wait."""
        self.size = 0
        """Requests that wait."""
        self.releases = dict.fromkeys(DIRECT if rules.batching is None else DYNAMIC, 0)
        """Why batches began, on all instances."""

    def lives(self, sequence_id: int | str) -> bool:
        """Return whether there is a sequence with this id."""
        return sequence_id in self._live

    def begun(self, sequence_id: int | str) -> bool:
        """Return whether the next request of a sequence goes on with what is there."""
        sequence = self._live.get(sequence_id)
        return sequence is not None and not sequence.closed

    def offer(self, request: SequenceRequest, now: int) -> NeriteError | None:
        """Let ``request``, which names a sequence, wait; or return why it is refused."""
        sequence_id = request.sequence_id
        sequence = self._live.get(sequence_id)
        if sequence is None or sequence.closed:
            if not request.starts:
                return self._not_begun(sequence_id)
            self._ended.forget(sequence_id)
            before, sequence = sequence, RequestSequence(sequence_id)
            self._live[sequence_id] = sequence
            if before is not None:
                before.follower = sequence
                sequence.follows = True
            self._join(sequence, request, now)
            if before is None:
                self._find_slot(sequence)
        else:
            self._join(sequence, request, now)
            if sequence.slots is not None and not sequence.running and len(sequence.waiting) == 1:
                self._make_ready(sequence)
        if sequence.slots is None and request.queue is self:
            self._backlog.limit(request)
        return None

    def choose(self, now: int, may: Callable[[Instance], bool] | None = None) -> tuple[Instance, SlotBatch] | None:
        """Return an instance and the batch that it is given now; None if nothing should start.

        With ``may`` it is asked of idle instances that there is a batch for, in turn, until one may begin.
        """
        if not self.size or (self._hold and self._held()):
            return None
        self._barred.clear()
        for instance, slots in self.idle.items():
            if may is not None and slots.due(now) and not may(instance):
                self._barred.add(instance)
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
        """Note that ``instance`` has finished a batch. The requests in ``again`` run once more, and are not in it."""
        slots = self._slots.get(instance)
        if slots is None:  # it died, and what it had is lost already
            return
        for request in again:
            request.starts, request.begun = False, True
            request.queued_ns = now
            request.queue = self
            request.sequence.waiting.appendleft(request)
            self.size += 1
        self.idle[instance] = slots
        for request in itertools.chain(batch, again):
            self._rested(request.sequence, now)

    def came(self, instance: Instance) -> None:
        """Note that ``instance`` is there, up and idle."""
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

    def gone(self, instance: Instance, why: str) -> Lost:
        """Note that ``instance`` is no more, and with it its sequences; return what nobody else can run."""
        slots = self._slots.pop(instance, None)
        self.idle.pop(instance, None)
        if slots is None:
            return []
        slots.open = False
        lost: Lost = []
        for sequence in has_slot(slots):
            self._resting.pop(sequence, None)
            sequence.slots = sequence.state = None
            sequence.running = sequence.ready = False
            before = sequence.drop_before_start()
            self.size -= len(before)
            if not sequence.waiting:
                self._close(sequence, why)
                self._let_go(sequence)
            else:  # it had not begun, or is to begin anew: that can be done elsewhere
                for request in sequence.waiting:
                    self._backlog.limit(request)
                self._find_slot(sequence)
            lost += [
                (request, self._interrupted(why) if request.begun else self._not_begun(sequence.id, why))
                for request in before
            ]
        return lost

    def retire(self, instance: Instance) -> None:
        """Begin no sequence on ``instance`` any more. Those that it has go on."""
        if instance in self._slots:
            self._slots[instance].open = False

    def holds(self, instance: Instance) -> bool:
        """Return whether ``instance`` has sequences that are not over."""
        slots = self._slots.get(instance)
        return slots is not None and any(has_slot(slots))

    def wake_at(self) -> int | None:
        """Return when to call ``expire`` and ``choose`` again, if nothing else happens before."""
        if self._failed:
            return 0
        asked = (slots for instance, slots in self.idle.items() if instance not in self._barred)
        times = [at for slots in asked if (at := slots.wake_at()) is not None]
        if (deadline := self._backlog.next_deadline()) is not None:
            times.append(deadline)
        for sequence in self._resting:
            times.append(sequence.touched_ns + self._idle_ns)
            break
        return min(times, default=None)

    def expire(self, now: int) -> Lost:
        """End the sequences that were idle, or in the backlog for too long or in vain; return the latter's requests."""
        lost, self._failed = self._failed, []
        for sequence in self._backlog.expire(now):
            lost += [
                (request, Unavailable("timeout of the corresponding sequence has been expired"))
                for request in self._end(sequence, "a request of it waited longer for a slot than its timeout allows")
            ]
        for sequence in [*itertools.takewhile(lambda each: each.touched_ns + self._idle_ns <= now, self._resting)]:
            self._end(sequence, f"it got no request for {self._rules.max_idle_us} µs (max_sequence_idle_microseconds)")
        return lost + self._in_vain()

    def resume(self, request: SequenceRequest) -> None:
        """Note that the caller of ``request``, of which responses have left, wants more again."""
        if request.queue is self and not request.sequence.ready:
            self._make_ready(request.sequence)

    def server_stops(self) -> None:
        """Let nothing wait any more, from the next ``expire`` on, that what is there does not make room for."""
        self._stopping = True

    def finish(self) -> None:
        """Let sequences be over, from now on, as soon as nothing of them waits or runs: no more requests come."""
        self._finishing = True
        for sequence in [*self._resting]:
            self._give_up_slot(sequence)

    def withdraw(self, request: SequenceRequest) -> list[SequenceRequest]:
        """End the sequence of ``request``, whose caller gave up; return all of it that waited.

        Nothing happens if ``request`` does not wait: what is running runs on, and the sequence goes on after it.
        """
        if request.queue is None:
            return []
        return self._end(request.sequence, "a request of it was cancelled")

    def drain(self) -> list[SequenceRequest]:
        """End all sequences of which requests wait, because nobody will ever take these; return them."""
        held = [sequence for slots in self._slots.values() for sequence in has_slot(slots)]
        sequences = [*held, *self._backlog]
        for sequence in sequences:
            if sequence.follower is not None:
                sequences.append(sequence.follower)
        drained: list[SequenceRequest] = []
        # Those that wait for others first: none gets a place that became free just now.
        for sequence in reversed(sequences):
            if sequence.waiting:
                drained += self._end(sequence, "nobody was left to run it")
        return drained

    def _join(self, sequence: RequestSequence, request: SequenceRequest, now: int) -> None:
        request.sequence = sequence
        request.queue = self
        request.queued_ns = now
        sequence.waiting.append(request)
        sequence.closed = request.ends
        self._resting.pop(sequence, None)
        self.size += 1

    def _find_slot(self, sequence: RequestSequence) -> None:
        """Give a sequence the best slot that is free, or let it wait for one."""
        sequence.follows = False
        self._backlog.add(sequence)
        self._serve_backlog()

    def _serve_backlog(self) -> None:
        """Give the slots that are free to the sequences that have waited longest."""
        while self._backlog and self._free:
            slot, _, slots = heapq.heappop(self._free)
            if slots.open:
                sequence = self._backlog.pop()
                slots.seats[slot] = sequence
                sequence.slot, sequence.slots = slot, slots
                self._make_ready(sequence)

    def _make_ready(self, sequence: RequestSequence) -> None:
        """Let the first request that waits of a sequence run, unless its caller has enough for now."""
        request = sequence.waiting[0]
        if request.held:
            return
        error = self._prepare(request)
        if error is not None:
            self._failed += [(each, error) for each in self._end(sequence, "a request of it could not be prepared")]
            return
        sequence.ready = True
        sequence.slots.ready(sequence)

    def _rested(self, sequence: RequestSequence, now: int) -> None:
        """A request of a sequence has run: the next may, or it is over, or it rests."""
        sequence.running = False
        sequence.touched_ns = now
        if sequence.waiting:
            self._make_ready(sequence)
        elif sequence.closed or self._finishing:
            self._give_up_slot(sequence)
        else:
            self._resting[sequence] = None

    def _close(self, sequence: RequestSequence, why: str) -> None:
        """Let no more requests join a sequence, unless it was closed already."""
        if not sequence.closed:
            sequence.closed = True
            self._ended.add(sequence.id, why)

    def _end(self, sequence: RequestSequence, why: str) -> list[SequenceRequest]:
        """Let go of what waits of a sequence, and of the sequence as soon as nothing of it runs."""
        if sequence.ready:
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
            self._let_go(sequence)
        return dropped

    def _give_up_slot(self, sequence: RequestSequence) -> None:
        slots = sequence.slots
        slots.seats[sequence.slot] = None
        if slots.open:
            heapq.heappush(self._free, (sequence.slot, slots.order, slots))
        sequence.slots = sequence.state = None
        self._resting.pop(sequence, None)
        self._serve_backlog()
        self._let_go(sequence)

    def _let_go(self, sequence: RequestSequence) -> None:
        """Forget a sequence that is over, and begin the next one with its id."""
        follower = sequence.follower
        while follower is not None and not follower.waiting:
            sequence, follower = follower, follower.follower
        if follower is not None:
            self._find_slot(follower)
        else:
            del self._live[sequence.id]

    def _in_vain(self) -> Lost:
        """End what waits for a slot, if all of them have sequences of which the end is not in sight."""
        lost: Lost = []
        if self._stopping and not self._finishing and self._slots and not any(map(frees_slot, self._slots.values())):
            # One that ends may make room for the next with its id. What another request needs to go on may wait.
            while vain := [each for each in self._backlog if not any(request.caused for request in each.waiting)]:
                for sequence in vain:
                    refusal = self._no_room(sequence.id)
                    lost += [(request, refusal) for request in self._end(sequence, "the server stops")]
        return lost

    def _held(self) -> bool:
        """Return whether too few requests wait to begin at all. Once they were enough, nobody counts them again."""
        in_slots = sum(len(sequence.waiting) for slots in self._slots.values() for sequence in has_slot(slots))
        rules = self._rules
        self._hold = in_slots < rules.hold_until or self.size - in_slots < rules.hold_until_backlog
        return self._hold

    def _interrupted(self, why: str) -> NeriteError:
        return Unavailable(
            f"inference request to model '{self._rules.model}' had begun and cannot go on: {why}; send it again"
        )

    def _no_room(self, sequence_id: int | str) -> NeriteError:
        return Unavailable(
            "Server is stopping, scheduler for model has stopped accepting new inference requests\n"
            f"    Model '{self._rules.model}' gets no slot free for sequence {sequence_id}: send it to another server.",
            retry_after=1,
        )

    def _not_begun(self, sequence_id: int | str, why: str | None = None) -> NeriteError:
        text = (
            f"inference request for sequence {sequence_id} to model '{self._rules.model}' must specify the START flag "
            "on the first request of the sequence"
        )
        why = why or self._ended.why(sequence_id)
        return InvalidArgument(text if why is None else f"{text} (what was sequence {sequence_id} is over: {why})")
