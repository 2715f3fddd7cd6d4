"""Weighted fair queueing of the requests to one model: between classes, and within a class between tenants.

The algorithm is start-time fair queueing (SFQ) on two levels. Each flow has a *start tag* on a virtual clock that
advances with the work started, divided by weight: the clock is the start tag of the flow served last. The flow with the
smallest tag is served next. A tenant that requests more than its share runs ahead of the clock and has to wait; one
that requests less is tagged with the current clock and is served soon. An idle flow accumulates no credit beyond a few
requests. That much is needed because with short latency targets hardly any request may wait, so that even a tenant that
uses its full share momentarily has an empty queue; the credit makes up for the share it loses then.

Only the first request of a tenant has a tag, so a heap has one entry per waiting tenant. Classes are few.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Final

from nerite.admission.policy import AdmissionPolicy, PriorityClass
from nerite.admission.ticket import AdmissionTicket, TicketState

_TOMBSTONE_SLACK: Final = 32
_MAX_CREDIT: Final = 8
"""Maximum credit of a flow that was idle, in requests: how far its start tag may be behind the clock.

With 4, and latency targets that allow two requests of a tenant to wait, the heaviest tenant lost 5 % of its share."""


class _Share:
    """Entity with a weight that is scheduled by start tag on the virtual clock: a class, or a tenant's flow."""

    __slots__ = ("finish", "owed", "start", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.start = 0.0
        self.finish = 0.0
        self.owed = 0.0
        """Actual minus expected work not yet accounted for in the tags."""

    def activate(self, clock: float) -> None:
        """Become active after having been idle: compute the start tag."""
        self.finish += self.owed / self.weight
        self.owed = 0.0
        self.start = max(clock, self.finish)

    def serve(self, cost: float) -> None:
        """Account for the first waiting request being served, and compute the start tag of the next one."""
        # A credit for work that was expected but not done is limited to this cost: virtual time never goes back.
        work = max(cost + self.owed, 0.0)
        self.owed += cost - work
        self.finish = self.start = self.start + work / self.weight


class _Flow(_Share):
    """Waiting requests of one tenant in one class. Requests removed from the middle stay as tombstones until passed."""

    __slots__ = ("cost", "count", "entries", "tombstones")

    def __init__(self, weight: int) -> None:
        super().__init__(weight)
        self.entries: deque[AdmissionTicket] = deque()
        self.tombstones = 0
        self.count = 0
        self.cost = 0.0

    @property
    def length(self) -> float:
        """Waiting work divided by weight."""
        return self.cost / self.weight

    def first(self) -> AdmissionTicket:
        while self.entries[0].state is not TicketState.WAITING:
            self.entries.popleft()
            self.tombstones -= 1
        return self.entries[0]

    def last(self) -> AdmissionTicket:
        while self.entries[-1].state is not TicketState.WAITING:
            self.entries.pop()
            self.tombstones -= 1
        return self.entries[-1]

    def add(self, ticket: AdmissionTicket) -> None:
        """Insert a ticket behind those of the same or a higher priority."""
        entries, behind = self.entries, 0
        while behind < len(entries) and entries[-1 - behind].priority > ticket.priority:
            behind += 1
        entries.insert(len(entries) - behind, ticket)

    def before(self, priority: int) -> float:
        """Return the total cost of the requests that a request of this priority would wait for."""
        cost = self.cost
        for each in reversed(self.entries):
            if each.priority <= priority:
                break
            if each.state is TicketState.WAITING:
                cost -= each.cost
        return cost

    def drop_tombstones(self) -> None:
        if self.tombstones > len(self.entries) // 2 + _TOMBSTONE_SLACK:
            self.entries = deque(each for each in self.entries if each.state is TicketState.WAITING)
            self.tombstones = 0


class _Level(_Share):
    """Flows of one class, one per tenant."""

    __slots__ = ("active_weight", "clock", "cost", "count", "flows", "heap", "longest", "rank")

    def __init__(self, rank: PriorityClass) -> None:
        super().__init__(rank.share)
        self.rank = rank
        self.clock = 0.0
        self.flows: dict[str, _Flow] = {}
        self.heap: list[tuple[float, int, _Flow]] = []
        """Heap by start tag. An entry whose tag is no longer that of its flow is stale."""
        self.longest: list[tuple[float, int, _Flow]] = []
        """Heap by negative length as of insertion; the flow can only have become shorter since."""
        self.active_weight = 0
        self.count = 0
        self.cost = 0.0


class FairQueue:
    """Waiting requests of one model in fair order."""

    def __init__(self) -> None:
        self._levels: dict[str, _Level] = {}
        self._order: list[_Level] = []
        """Classes, the most important first."""
        self._clock = 0.0
        self._numbers = itertools.count()
        self.count = 0
        self.cost = 0.0
        """Total cost of the waiting requests."""

    def push(self, ticket: AdmissionTicket, weight: int) -> None:
        """Enqueue ``ticket`` behind its tenant's requests of the same priority. ``weight`` is the tenant's."""
        level = self._level(ticket.level)
        flow = self._flow(level, ticket.tenant, weight)
        ticket.state = TicketState.WAITING
        flow.add(ticket)
        if not level.count:
            level.activate(self._clock)
        if not flow.count:
            flow.activate(level.clock - _MAX_CREDIT * ticket.cost / flow.weight)
            level.active_weight += flow.weight
            self._push_tag(level, flow)
        self._count(level, flow, 1, ticket.cost)
        self._push_length(level, flow)

    def first(self) -> AdmissionTicket | None:
        """Return the next ticket; None if the queue is empty."""
        if not self.count:
            return None
        return self._next_flow(self._next_level()).first()

    def pop(self) -> AdmissionTicket:
        """Remove and return the next ticket, which is going to run. The queue must not be empty."""
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
            self._push_tag(level, flow)
        else:
            level.active_weight -= flow.weight
        return ticket

    def remove(self, ticket: AdmissionTicket) -> None:
        """Remove a waiting ticket from anywhere in the queue, as if it had never been enqueued."""
        level = self._levels[ticket.level.name]
        flow = level.flows[ticket.tenant]
        ticket.state = TicketState.OVER
        flow.tombstones += 1
        self._count(level, flow, -1, -ticket.cost)
        flow.drop_tombstones()
        if not flow.count:
            level.active_weight -= flow.weight

    def settle(self, ticket: AdmissionTicket, more: float) -> None:
        """Account for the difference between the actual and the expected cost of a request that ran."""
        level = self._levels.get(ticket.level.name)
        if level is not None and (flow := level.flows.get(ticket.tenant)) is not None:
            level.owed += more
            flow.owed += more

    def ahead(self, rank: PriorityClass, tenant: str, weight: int, priority: int = 0) -> float:
        """Return an approximate upper bound of the work that is done before a request that arrives now."""
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
        """Return the tickets to shed for ``ticket``: at least ``count``, with a total cost of at least ``cost``.

        The least important class is shed first, within it the tenant with the most waiting work for its weight, and of
        that tenant the last request. Within its own class, a request displaces one of a tenant with more waiting work,
        or one of its own tenant with a lower priority. None: ``ticket`` must be rejected. Nothing is removed here.
        """
        below = [level for level in reversed(self._order) if level.rank.order > ticket.level.order]
        if sum(level.count for level in below) >= count and sum(level.cost for level in below) >= cost:
            return list(self._victims(below, count, cost))
        level = self._level(ticket.level)
        if count > 1 or not level.count:
            return None
        longest = self._longest(level)
        last = longest.last()
        own = level.flows.get(ticket.tenant)
        length = ((own.cost if own else 0.0) + ticket.cost) / weight
        if longest is not own and last.cost >= cost and (longest.cost - last.cost) / longest.weight >= length:
            return [last]
        own_last = own.last() if own is not None and own.count else None
        return (
            [own_last]
            if own_last is not None and own_last.priority > ticket.priority and own_last.cost >= cost
            else None
        )

    def follow(self, policy: AdmissionPolicy) -> None:
        """Apply the shares and weights of a new policy. Classes that it does not define keep theirs."""
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
        """Remove and return all waiting tickets."""
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

    def _victims(self, levels: list[_Level], count: int, cost: float) -> Iterator[AdmissionTicket]:
        """Yield the last tickets of the longest flows, class by class, until ``count`` and ``cost`` are reached."""
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
            level.activate(self._clock)
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

    def _push_tag(self, level: _Level, flow: _Flow) -> None:
        """Push the current start tag of a flow to the heap."""
        if len(level.heap) > 2 * len(level.flows) + _TOMBSTONE_SLACK:
            level.heap = [entry for entry in level.heap if entry[2].count and entry[2].start == entry[0]]
            heapq.heapify(level.heap)
        heapq.heappush(level.heap, (flow.start, next(self._numbers), flow))

    def _count(self, level: _Level, flow: _Flow, one: int, cost: float) -> None:
        for each in (self, level, flow):
            each.count += one
            each.cost = each.cost + cost if each.count else 0.0

    def _push_length(self, level: _Level, flow: _Flow) -> None:
        heapq.heappush(level.longest, (-flow.length, next(self._numbers), flow))
        if len(level.longest) > 2 * len(level.flows) + _TOMBSTONE_SLACK:
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
