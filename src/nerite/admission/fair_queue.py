"""Who is next: the work of a model divided fairly between classes, and inside a class between tenants.

Start-time fair queueing, twice. Each request has a *start tag* on a clock that shows how much work was begun for
everybody, divided by weight: that of whoever was served last. Who has the smallest tag is next. A tenant that asks for
more than its share runs ahead of the clock and has to wait for it; one that asks for less finds the clock where it
stands and is next. Who did not ask for a while saves nothing up but a few requests: where waits have to be brief hardly
anybody may wait, and of a tenant that asks for all of its share at times nobody does; what it lost so it makes up for.

Only the first request of a tenant has a tag, so a heap has one entry for each tenant that waits. Classes are few.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Final

from nerite.admission.policy import AdmissionPolicy, PriorityClass
from nerite.admission.ticket import AdmissionTicket, TicketState

_HUSKS: Final = 32
_SAVED: Final = 8
"""Requests that somebody may be behind the clock, who had nothing to do.

With 4, where promises leave time for two of a tenant to wait, the heaviest lost a twentieth of its share."""


class _Share:
    """Whoever has a part of something, and the clock by which that is."""

    __slots__ = ("finish", "owed", "start", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.start = 0.0
        self.finish = 0.0
        self.owed = 0.0
        """Work that was done beyond what was expected."""

    def rise(self, clock: float) -> None:
        """Have something to do after a while without."""
        self.finish += self.owed / self.weight
        self.owed = 0.0
        self.start = max(clock, self.finish)

    def serve(self, cost: float) -> None:
        """Have the first of what waits done, and be ready for the next."""
        # What was expected and not done is worth no more than what is begun now: the clock does not run backwards.
        work = max(cost + self.owed, 0.0)
        self.owed += cost - work
        self.finish = self.start = self.start + work / self.weight


class _Flow(_Share):
    """What waits of one tenant in one class. Those who left from the middle stay as husks until they are passed."""

    __slots__ = ("cost", "count", "entries", "husks")

    def __init__(self, weight: int) -> None:
        super().__init__(weight)
        self.entries: deque[AdmissionTicket] = deque()
        self.husks = 0
        self.count = 0
        self.cost = 0.0

    @property
    def length(self) -> float:
        """How much waits, by what it may have."""
        return self.cost / self.weight

    def first(self) -> AdmissionTicket:
        while self.entries[0].state is not TicketState.WAITING:
            self.entries.popleft()
            self.husks -= 1
        return self.entries[0]

    def last(self) -> AdmissionTicket:
        while self.entries[-1].state is not TicketState.WAITING:
            self.entries.pop()
            self.husks -= 1
        return self.entries[-1]

    def add(self, ticket: AdmissionTicket) -> None:
        """Let one wait behind those that matter as much, and before those that matter less."""
        entries, behind = self.entries, 0
        while behind < len(entries) and entries[-1 - behind].priority > ticket.priority:
            behind += 1
        entries.insert(len(entries) - behind, ticket)

    def before(self, priority: int) -> float:
        """Return what those cost that a request of this priority would wait for."""
        cost = self.cost
        for each in reversed(self.entries):
            if each.priority <= priority:
                break
            if each.state is TicketState.WAITING:
                cost -= each.cost
        return cost

    def drop_husks(self) -> None:
        if self.husks > len(self.entries) // 2 + _HUSKS:
            self.entries = deque(each for each in self.entries if each.state is TicketState.WAITING)
            self.husks = 0


class _Level(_Share):
    """The flows of one class."""

    __slots__ = ("active_weight", "clock", "cost", "count", "flows", "heap", "longest", "rank")

    def __init__(self, rank: PriorityClass) -> None:
        super().__init__(rank.share)
        self.rank = rank
        self.clock = 0.0
        self.flows: dict[str, _Flow] = {}
        self.heap: list[tuple[float, int, _Flow]] = []
        """By start tag. An entry that is not that of its flow any more does not count."""
        self.longest: list[tuple[float, int, _Flow]] = []
        """By negative length, which was right when it was noted and can only have shrunk since."""
        self.active_weight = 0
        self.count = 0
        self.cost = 0.0


class FairQueue:
    """What waits for one model."""

    def __init__(self) -> None:
        self._levels: dict[str, _Level] = {}
        self._order: list[_Level] = []
        """Those that matter most come first."""
        self._clock = 0.0
        self._numbers = itertools.count()
        self.count = 0
        self.cost = 0.0
        """What all that wait cost together."""

    def push(self, ticket: AdmissionTicket, weight: int) -> None:
        """Let ``ticket`` wait behind what its tenant has waiting of its priority; the tenant has a ``weight``."""
        level = self._level(ticket.level)
        flow = self._flow(level, ticket.tenant, weight)
        ticket.state = TicketState.WAITING
        flow.add(ticket)
        if not level.count:
            level.rise(self._clock)
        if not flow.count:
            flow.rise(level.clock - _SAVED * ticket.cost / flow.weight)
            level.active_weight += flow.weight
            self._stand(level, flow)
        self._count(level, flow, 1, ticket.cost)
        self._note_length(level, flow)

    def first(self) -> AdmissionTicket | None:
        """Return who is next; None if nobody waits."""
        if not self.count:
            return None
        return self._next_flow(self._next_level()).first()

    def pop(self) -> AdmissionTicket:
        """Take out who is next: it runs. Somebody waits."""
        level = self._next_level()
        flow = self._next_flow(level)
        ticket = flow.first()
        flow.entries.popleft()
        heapq.heappop(level.heap)
        self._clock = max(self._clock, level.start)
        level.clock = max(level.clock, flow.start)
        level.serve(ticket.cost)
        flow.serve(ticket.cost)
        self._count(level, flow, -1, -ticket.cost)
        if flow.count:
            self._stand(level, flow)
        else:
            level.active_weight -= flow.weight
        return ticket

    def remove(self, ticket: AdmissionTicket) -> None:
        """Take out one that waits, wherever it stands, as if it had never come."""
        level = self._levels[ticket.level.name]
        flow = level.flows[ticket.tenant]
        ticket.state = TicketState.OVER
        flow.husks += 1
        self._count(level, flow, -1, -ticket.cost)
        flow.drop_husks()
        if not flow.count:
            level.active_weight -= flow.weight

    def settle(self, ticket: AdmissionTicket, more: float) -> None:
        """Note that a request that ran cost ``more`` than it was expected to, or less."""
        level = self._levels.get(ticket.level.name)
        if level is not None and (flow := level.flows.get(ticket.tenant)) is not None:
            level.owed += more
            flow.owed += more

    def ahead(self, rank: PriorityClass, tenant: str, weight: int, priority: int = 0) -> float:
        """Return about how much work is done before a request that comes now, at the most."""
        level = self._levels.get(rank.name)
        if level is None:
            return 0.0
        flow = level.flows.get(tenant)
        own = flow.before(priority) if flow is not None else 0.0
        others = level.active_weight - (weight if own else 0)
        in_class = min(level.cost, own * (weight + others) / weight)
        shares = sum(each.weight for each in self._order if each.count and each is not level)
        return min(self.cost, in_class * (level.weight + shares) / level.weight)

    def displaced_by(
        self, ticket: AdmissionTicket, weight: int, count: int, cost: float
    ) -> list[AdmissionTicket] | None:
        """Return who has to go so that ``ticket`` may wait: ``count`` requests or more, of ``cost`` or more together.

        Those of the least class go first, of the tenant that has most waiting for its weight, and the last to come.
        In its own class a request takes the place of one of a tenant that has more waiting, or of one of its own that
        has a lower priority. None: it may not wait. They wait until they are removed.
        """
        below = [level for level in reversed(self._order) if level.rank.order > ticket.level.order]
        if sum(level.count for level in below) >= count and sum(level.cost for level in below) >= cost:
            return list(self._from_the_end(below, count, cost))
        level = self._level(ticket.level)
        if count > 1 or not level.count:
            return None
        longest = self._longest(level)
        last = longest.last()
        own = level.flows.get(ticket.tenant)
        length = ((own.cost if own else 0.0) + ticket.cost) / weight
        if longest is not own and last.cost >= cost and (longest.cost - last.cost) / longest.weight >= length:
            return [last]
        mine = own.last() if own is not None and own.count else None
        return [mine] if mine is not None and mine.priority > ticket.priority and mine.cost >= cost else None

    def follow(self, policy: AdmissionPolicy) -> None:
        """Go on by the shares and weights of another policy. A class that it does not have keeps its own."""
        for level in self._order:
            level.rank = policy.classes.get(level.rank.name, level.rank)
            level.weight = level.rank.share
            for tenant, flow in level.flows.items():
                flow.weight = policy.tenant(tenant).weight
            level.active_weight = sum(flow.weight for flow in level.flows.values() if flow.count)
            level.longest = [(-each.length, next(self._numbers), each) for each in level.flows.values() if each.count]
            heapq.heapify(level.longest)
        self._order.sort(key=lambda level: level.rank.order)

    def drain(self) -> list[AdmissionTicket]:
        """Take out everybody."""
        waiting = [
            ticket
            for level in self._order
            for flow in level.flows.values()
            for ticket in flow.entries
            if ticket.state is TicketState.WAITING
        ]
        for ticket in waiting:
            self.remove(ticket)
        return waiting

    def _from_the_end(self, levels: list[_Level], count: int, cost: float) -> Iterator[AdmissionTicket]:
        """Yield the last of the longest flows, class by class, until it is enough."""
        for level in levels:
            entries = {id(flow): reversed(flow.entries) for flow in level.flows.values() if flow.count}
            lengths = [(-flow.length, number, flow) for number, flow in enumerate(level.flows.values()) if flow.count]
            heapq.heapify(lengths)
            while lengths:
                if count <= 0 and cost <= 0:
                    return
                negative, number, flow = heapq.heappop(lengths)
                last = next((each for each in entries[id(flow)] if each.state is TicketState.WAITING), None)
                if last is not None:
                    count, cost = count - 1, cost - last.cost
                    heapq.heappush(lengths, (negative + last.cost / flow.weight, number, flow))
                    yield last

    def _level(self, rank: PriorityClass) -> _Level:
        level = self._levels.get(rank.name)
        if level is None:
            level = self._levels[rank.name] = _Level(rank)
            level.rise(self._clock)
            self._order = sorted(self._levels.values(), key=lambda each: each.rank.order)
        return level

    @staticmethod
    def _flow(level: _Level, tenant: str, weight: int) -> _Flow:
        flow = level.flows.get(tenant)
        if flow is None:
            flow = level.flows[tenant] = _Flow(weight)
        elif not flow.count:
            flow.weight = weight
        return flow

    def _next_level(self) -> _Level:
        return min((level for level in self._order if level.count), key=lambda level: level.start)

    @staticmethod
    def _next_flow(level: _Level) -> _Flow:
        while True:
            start, _, flow = level.heap[0]
            if flow.count and flow.start == start:
                return flow
            heapq.heappop(level.heap)

    def _stand(self, level: _Level, flow: _Flow) -> None:
        """Have a flow stand where its tag says."""
        if len(level.heap) > 2 * len(level.flows) + _HUSKS:
            level.heap = [entry for entry in level.heap if entry[2].count and entry[2].start == entry[0]]
            heapq.heapify(level.heap)
        heapq.heappush(level.heap, (flow.start, next(self._numbers), flow))

    def _count(self, level: _Level, flow: _Flow, one: int, cost: float) -> None:
        for each in (self, level, flow):
            each.count += one
            each.cost = each.cost + cost if each.count else 0.0

    def _note_length(self, level: _Level, flow: _Flow) -> None:
        heapq.heappush(level.longest, (-flow.length, next(self._numbers), flow))
        if len(level.longest) > 2 * len(level.flows) + _HUSKS:
            level.longest = [(-each.length, next(self._numbers), each) for each in level.flows.values() if each.count]
            heapq.heapify(level.longest)

    def _longest(self, level: _Level) -> _Flow:
        while True:
            noted, _, flow = level.longest[0]
            if flow.count and -flow.length == noted:
                return flow
            heapq.heappop(level.longest)
            if flow.count:
                heapq.heappush(level.longest, (-flow.length, next(self._numbers), flow))
