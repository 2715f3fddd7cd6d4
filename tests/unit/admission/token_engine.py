"""An engine behind a gate, by a clock of its own: continuous batching, chunked prefill, paged memory."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from nerite.admission.accounts import Accounts
from nerite.admission.controller import AdmissionController
from nerite.admission.estimates import EngineStatistics
from nerite.admission.policy import AdmissionPolicy
from nerite.admission.refusals import AdmissionRefusal
from nerite.admission.ticket import AdmissionTicket, Admit, DueTicket, Refuse, TicketEnding

MS = 1_000_000
S = 1000 * MS
BLOCK = 16
TELL = 500 * MS
"""Between two statistics."""
PROMPT_STEP = 512
"""Tokens of prompts that are read in one step, at the most."""

Arrivals: TypeAlias = Callable[[], tuple[int, Callable[[], None]]]


@dataclass(eq=False)
class Sequence:
    """A request in the engine."""

    ticket: AdmissionTicket
    length: int
    """Output tokens that it will have, whatever it was thought to have."""
    unread: int
    done: int = 0

    @property
    def blocks(self) -> int:
        return -(-(self.ticket.input_size + self.done - self.unread) // BLOCK)


@dataclass
class Seen:
    """What came of it all."""

    first_token: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds, by class."""
    work: Counter[str] = field(default_factory=Counter)
    """Tokens of finished requests, by tenant."""
    in_time: int = 0
    """Tokens of those that kept the promise of their class."""
    refused: list[AdmissionRefusal] = field(default_factory=list)
    preemptions: int = 0
    most_blocks: int = 0
    most_promised: float = 0.0
    """The part of all blocks that was promised when somebody was let in beside others."""


class Engine:
    """And those who ask it."""

    def __init__(
        self, policy: AdmissionPolicy, blocks: int = 1200, *, tells: bool = True, seed: int = 1, noise: float = 0.0
    ) -> None:
        """Without ``tells`` it says nothing of its memory: whom the gate lets in may have to begin anew.

        ``noise``: how unlike each other steps of the same work are, as the deviation of a logarithm.
        """
        self.now = 0
        self.accounts = Accounts(policy)
        self.gate = AdmissionController("llm", self.accounts, 0)
        self.blocks = blocks
        self.speed = 1.0
        self.noise = noise
        self.random = random.Random(seed)
        self.running: list[Sequence] = []
        self.lengths: dict[AdmissionTicket, int] = {}
        self.seen = Seen()
        self.counting = True
        self._told = -TELL
        self._tells = tells
        self._tell()

    def ask(self, ticket: AdmissionTicket, length: int) -> None:
        """Have somebody ask now."""
        decision = self.gate.offer(ticket, self.now)
        if isinstance(decision, Refuse):
            self.seen.refused.append(decision.refusal)
            return
        self.lengths[ticket] = length
        if isinstance(decision, Admit):
            self._begin(ticket)
        else:
            self._refuse(DueTicket([], list(decision.displaced)))

    def run(self, until: int, arrivals: Arrivals) -> None:
        """Go on until then. ``arrivals`` says in how long somebody comes, and lets him."""
        gap, come = arrivals()
        next_one = self.now + gap
        while self.now < until:
            if not self.running and next_one > self.now:
                self.now = min(next_one, until)
            self._step()
            while next_one <= self.now:
                come()
                gap, come = arrivals()
                next_one += gap
            self._tell()
            self._due()

    def _step(self) -> None:
        reading, budget = 0, PROMPT_STEP
        generating = []
        for each in self.running:
            if each.unread:
                part = min(each.unread, budget)
                each.unread -= part
                reading += part
                budget -= part
            if not each.unread:
                generating.append(each)
        slowness = self.random.lognormvariate(0, self.noise) if self.noise else 1.0
        self.now += int((8 * MS + 0.15 * MS * len(generating) + 0.04 * MS * reading) / self.speed * slowness)
        for each in generating:
            each.done += 1
            ticket = each.ticket
            if each.done == 1:
                self.gate.started(ticket, self.now)
                if self.counting:
                    self.seen.first_token[ticket.level.name].append((self.now - ticket.offered_at) / S)
            self.gate.progressed(ticket, 1, self.now)
            if each.done == each.length:
                if self.counting:
                    self._count(ticket)
                self.gate.finished(ticket, TicketEnding.COMPLETE, self.now)
        if generating:
            self.running = [each for each in self.running if each.done < each.length]
        self._preempt()

    def _count(self, ticket: AdmissionTicket) -> None:
        work = ticket.input_size + ticket.generated
        self.seen.work[ticket.tenant] += work
        promise = ticket.level.ttft_seconds
        if not promise or (ticket.started_at or 0) - ticket.offered_at <= promise * S:
            self.seen.in_time += work

    def _preempt(self) -> None:
        """Have the last one begin anew as long as there is no memory."""
        while (used := sum(each.blocks for each in self.running)) > self.blocks:
            last = max((each for each in self.running if each.blocks), key=lambda each: each.ticket.admitted_at)
            last.unread = last.ticket.input_size + last.done
            self.seen.preemptions += 1
        self.seen.most_blocks = max(self.seen.most_blocks, used)

    def _begin(self, ticket: AdmissionTicket) -> None:
        if self.gate.running > 1:
            promised = self.gate.headroom.promised / self.blocks
            self.seen.most_promised = max(self.seen.most_promised, promised)
        self.running.append(Sequence(ticket, self.lengths.pop(ticket), ticket.input_size))

    def _due(self) -> None:
        due = self.gate.due(self.now)
        for ticket in due.admitted:
            self._begin(ticket)
        self._refuse(due)

    def _refuse(self, due: DueTicket) -> None:
        for ticket, refusal in due.refused:
            del self.lengths[ticket]
            self.seen.refused.append(refusal)

    def _tell(self) -> None:
        if self._tells and self.now >= self._told + TELL:
            self._told = self.now
            used = sum(each.blocks for each in self.running)
            self.gate.tell(EngineStatistics(self.blocks, self.blocks - used, BLOCK))


def crowd(engine: Engine, per_second: float, who: dict[tuple[str, str], float]) -> Arrivals:
    """Return arrivals by chance: of tenants and classes as often as ``who`` says, of many sizes."""
    chance = engine.random
    names, parts = list(who), list(who.values())

    def come() -> None:
        ((tenant, level),) = chance.choices(names, parts)
        engine.ask(AdmissionTicket(tenant, chance.randint(16, 512), 256, wanted_class=level), chance.randint(8, 200))

    return lambda: (int(chance.expovariate(per_second) * S), come)


def percentile(values: list[float], part: float) -> float:
    """Return the value that ``part`` of all do not exceed."""
    return heapq.nlargest(max(1, int(len(values) * (1 - part)) + 1), values)[-1]
