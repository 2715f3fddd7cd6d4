"""An owner of a sequence batcher that checks, at each step, that no rule of sequences is broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from doubles import request
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.request import Caller, SequenceKey
from nerite.scheduling.sequence import RequestSequence, SequenceRequest, SequenceRules, SlotBatch
from nerite.scheduling.sequence_batcher import SequenceBatcher

US = 1000


def half(_tenant: str) -> float:
    """Return a share."""
    return 0.5


def asked(
    sequence_id: int | str,
    *,
    start: bool = False,
    end: bool = False,
    timeout_us: int = 0,
    key: object = None,
    tenant: str = "",
) -> SequenceRequest:
    caller = Caller(tenant) if tenant else None
    fields = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end, "caller": caller}
    return SequenceRequest(request(timeout_us=timeout_us, key=key, **fields))


@dataclass(eq=False)
class Conversation:
    """What one START began, by the books of a client: it is open until END, or until something of it was refused."""

    key: SequenceKey
    sequence: RequestSequence
    waiting: list[SequenceRequest] = field(default_factory=list)
    open: bool = True
    running: SequenceRequest | None = None
    instance: str | None = None
    place: int | None = None
    rested_at: int | None = None


class Owner:
    """Plays the dispatcher, with instances that finish when a test says so."""

    def __init__(self, rules: SequenceRules, instances: int) -> None:
        self.rules = rules
        self.batcher: SequenceBatcher[str] = SequenceBatcher(rules)
        self.now = 0
        self.stopping = False
        self.up: set[str] = set()
        self.most = 0
        self.leaving: set[str] = set()
        self.running: dict[str, list[SequenceRequest]] = {}
        self.conversations: list[Conversation] = []
        self.of: dict[SequenceRequest, Conversation] = {}
        self.accepted: list[SequenceRequest] = []
        self.outcomes: Counter[SequenceRequest] = Counter()
        self.batches = 0
        for number in range(instances):
            self.come(f"model_{number}")

    def current(self, key: SequenceKey) -> Conversation | None:
        """The open conversation with a key."""
        for each in reversed(self.conversations):
            if each.key == key:
                return each if each.open else None
        return None

    def offer(self, each: SequenceRequest) -> NeriteError | None:
        self.expire()
        current = self.current(each.sequence_key)
        refusal = self.batcher.offer(each, self.now)
        if current is None and not each.starts:
            assert isinstance(refusal, InvalidArgument)
            assert "must specify the START flag" in refusal.message
            return refusal
        assert refusal is None
        if current is None:
            current = Conversation(each.sequence_key, each.sequence)
            self.conversations.append(current)
        current.waiting.append(each)
        current.rested_at = None
        current.open = not each.ends
        self.of[each] = current
        self.accepted.append(each)
        return None

    def choose(self) -> dict[str, SlotBatch]:
        """Start whatever may start now."""
        self.expire()
        started = {}
        while (chosen := self.batcher.choose(self.now)) is not None:
            instance, batch = chosen
            assert instance in self.up
            assert instance not in self.running, "one batch at a time"
            self._started(instance, batch)
            started[instance] = batch
            self.batches += 1
        assert sum(self.batcher.releases.values()) == self.batches, "each began for a reason"
        self._shares_kept()
        self._nothing_forgotten()
        return started

    def _started(self, instance: str, batch: SlotBatch) -> None:
        real = [each for each in batch if each is not None]
        assert real
        assert batch[-1] is not None
        assert len(batch) <= self.rules.slots
        for place, each in enumerate(batch):
            if each is None:
                continue
            talk = self.of[each]
            assert talk.waiting[0] is each, "in order"
            assert talk.running is None, "one at a time"
            earlier = [other for other in self.conversations[: self.conversations.index(talk)] if other.key == talk.key]
            assert not any(other.waiting or other.running for other in earlier), "after what was before"
            if talk.instance is None:
                assert each.starts
            else:
                assert talk.instance == instance, "all on one instance"
            if self.rules.batching is None:
                assert talk.place in (None, place), "and in one place"
                talk.place = place
            talk.instance = instance
            talk.waiting.pop(0)
            talk.running = each
        on_it = [talk for talk in self.conversations if talk.instance == instance]
        assert sum(talk.open or bool(talk.waiting) or talk.running is not None for talk in on_it) <= self.rules.slots
        self.running[instance] = real

    def _shares_kept(self) -> None:
        """No tenant has more slots than its share."""
        if self.rules.share_of is not None and not self.stopping:
            held = Counter({talk.sequence: talk.sequence.tenant for talk in self._seated()}.values())
            for tenant, count in held.items():
                assert count <= max(1, self.rules.share_of(tenant) * self.rules.slots * self.most)

    def _nothing_forgotten(self) -> None:
        """Nobody waits for a sequence that has an instance with nothing to do."""
        if self.rules.max_delay_us or (self.rules.batching and self.rules.batching.max_delay_us):
            return
        for talk in self.conversations:
            if talk.waiting and talk.running is None and talk.instance is not None:
                assert talk.instance in self.running
        begun = [talk for talk in self.conversations if talk.instance in self.up]
        if not begun and self.up - self.leaving:
            assert not any(talk.waiting for talk in self.conversations)

    def finish(self, instance: str) -> None:
        batch = self.running.pop(instance)
        for each in batch:
            self.outcomes[each] += 1
            talk = self.of[each]
            talk.running = None
            if not talk.waiting and talk.open:
                talk.rested_at = self.now
            self._forget_if_over(talk)
        self.batcher.ended(instance, batch, self.now)
        self._see_off()

    def come(self, instance: str) -> None:
        self.up.add(instance)
        self.most = max(self.most, len(self.up))
        self.batcher.add_instance(instance)

    def die(self, instance: str) -> None:
        self.up.discard(instance)
        self.leaving.discard(instance)
        died = self.running.pop(instance, [])
        lost = self.batcher.remove_instance(instance, f"{instance} died")
        for each in died:
            self.outcomes[each] += 1
            self.of[each].running = None
        self.batcher.ended(instance, died, self.now)
        for each, error in lost:
            assert self.of[each].instance == instance
            assert error.message.endswith(f"ended: {instance} died)")
            self._dropped(each)
        for talk in [talk for talk in self.conversations if talk.instance == instance]:
            talk.instance = talk.place = talk.rested_at = None
            if talk.waiting:
                assert talk.waiting[0].starts, "what can begin anew does"
            else:
                talk.open = False
                self._forget_if_over(talk)

    def retire(self, instance: str) -> None:
        self.leaving.add(instance)
        self.batcher.retire(instance)
        self._see_off()

    def _see_off(self) -> None:
        for instance in [each for each in self.leaving if each not in self.running and not self.batcher.holds(each)]:
            assert not any(talk.instance == instance for talk in self.conversations)
            assert self.batcher.remove_instance(instance, "left") == []
            self.leaving.discard(instance)
            self.up.discard(instance)

    def cancel(self, each: SequenceRequest) -> None:
        withdrawn = self.batcher.withdraw(each)
        talk = self.of[each]
        assert withdrawn == (talk.waiting if each in talk.waiting else [])
        for other in withdrawn:
            self._dropped(other)
        if withdrawn:
            talk.open = False
            self._forget_if_over(talk)

    def expire(self) -> None:
        idle = [
            talk
            for talk in self.conversations
            if talk.rested_at is not None and talk.rested_at + self.rules.max_idle_us * US <= self.now
        ]
        for talk in idle:
            talk.open = False
            talk.rested_at = None
            self._forget_if_over(talk)
        late = {
            self.of[each]
            for talk in self.conversations
            for each in talk.waiting
            if each.header.timeout_us
            and talk.instance is None
            and self._has_no_slot(each)
            and each.queued_ns + each.header.timeout_us * US <= self.now
        }
        over = self.batcher.expire(self.now)
        timely = {each for each, error in over if error.message.startswith("Server is stopping")}
        assert {each for each, _ in over} - timely == {each for talk in late for each in talk.waiting}
        for each, error in over:
            assert each in timely or error.message == "timeout of the corresponding sequence has been expired"
            self._dropped(each)
        for talk in {*late, *(self.of[each] for each in timely)}:
            assert not talk.waiting
            talk.open = False
            self._forget_if_over(talk)
        if self.stopping and self.up:
            # What follows a sequence that has its key is not looked at before that is over.
            held = {talk.key for talk in self._seated()}
            waits = [talk for talk in self.conversations if talk.waiting and self._has_no_slot(talk.waiting[0])]
            in_vain = any(talk.key not in held for talk in waits)
            assert not (timely if self._room() else in_vain), "refused if no slot becomes free, and only then"
        self._see_off()

    def _seated(self) -> list[Conversation]:
        """The conversations that have a slot."""
        return [talk for talk in self.conversations if talk.sequence.slots is not None]

    def _room(self) -> bool:
        """Whether a slot is free, or will be."""
        seated = [talk for talk in self._seated() if talk.sequence.slots is not None and talk.sequence.slots.open]
        return len(seated) < self.rules.slots * len(self.up - self.leaving) or any(not talk.open for talk in seated)

    def stop(self) -> None:
        """The server stops."""
        self.stopping = True
        self.batcher.server_stops()

    def drain(self) -> None:
        drained = self.batcher.drain()
        assert set(drained) == {each for talk in self.conversations for each in talk.waiting}
        for each in drained:
            talk = self.of[each]
            talk.open = False
            self._dropped(each)
            self._forget_if_over(talk)

    def wake(self) -> None:
        """Let time pass until the batcher wants to be asked again."""
        at = self.batcher.wake_at()
        if at is not None:
            assert at > self.now or self.batcher.choose(self.now) is None
            self.now = max(self.now, at)

    def check(self) -> None:
        assert self.batcher.size == sum(len(talk.waiting) for talk in self.conversations)
        assert set(self.batcher.idle) == self.up - set(self.running)
        assert all(count == 1 for count in self.outcomes.values())

    def check_all_answered(self) -> None:
        assert set(self.outcomes) == set(self.accepted)
        self.check()

    @staticmethod
    def _has_no_slot(each: SequenceRequest) -> bool:
        return each.sequence.slots is None

    def _dropped(self, each: SequenceRequest) -> None:
        self.of[each].waiting.remove(each)
        self.outcomes[each] += 1

    def _forget_if_over(self, talk: Conversation) -> None:
        if not talk.open and not talk.waiting and talk.running is None:
            talk.instance = None
