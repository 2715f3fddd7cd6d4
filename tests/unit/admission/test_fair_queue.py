"""The fair queue: everybody has its share, and those that matter least make room."""

from __future__ import annotations

import random
from collections import Counter
from weakref import WeakSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.admission.fair_queue import FairQueue
from nerite.admission.policy import AdmissionPolicy, PriorityClass, Tenant
from nerite.admission.ticket import AdmissionTicket, TicketState

HIGH, LOW = PriorityClass("high", 1, 3), PriorityClass("low", 2, 1)
WEIGHTS = {"a": 3, "b": 2, "c": 1}


class Hall:
    """A queue, and those who come to it."""

    def __init__(self) -> None:
        self.queue = FairQueue()

    def come(self, tenant: str, level: PriorityClass = HIGH, cost: float = 10, priority: int = 0) -> AdmissionTicket:
        ticket = made(tenant, level, cost, priority)
        self.queue.push(ticket, WEIGHTS[tenant])
        return ticket

    def go(self) -> AdmissionTicket:
        first = self.queue.first()
        ticket = self.queue.pop()
        assert ticket is first
        ticket.state = TicketState.RUNNING
        return ticket


class Ticket(AdmissionTicket):
    """One to which there can be weak references."""


def made(tenant: str, level: PriorityClass = HIGH, cost: float = 10, priority: int = 0) -> AdmissionTicket:
    ticket = Ticket(tenant, 1, priority=priority)
    ticket.level, ticket.cost = level, cost
    return ticket


def test_one_tenant_is_served_in_order() -> None:
    hall = Hall()
    tickets = [hall.come("a") for _ in range(5)]
    assert [hall.go() for _ in range(5)] == tickets
    assert hall.queue.first() is None
    assert (hall.queue.count, hall.queue.cost) == (0, 0.0)


def test_a_tenant_says_which_of_its_own_may_wait() -> None:
    hall = Hall()
    tickets = {number: hall.come("a", priority=priority) for number, priority in enumerate([0, 2, 1, 0, 2, 1])}
    hall.queue.remove(tickets[2])
    other = hall.come("b", priority=9)
    order = [hall.go() for _ in range(6)]
    assert [each for each in order if each is not other] == [tickets[number] for number in (0, 3, 5, 1, 4)]
    assert order.index(other) < 5, "it is behind its own tenant's alone, and that has no others"


def test_who_may_wait_is_not_ahead_and_makes_room() -> None:
    hall = Hall()
    hall.come("a", cost=20)
    later = [hall.come("a", priority=priority) for priority in (1, 2)]
    assert [hall.queue.ahead(HIGH, "a", 3, priority) for priority in range(3)] == [20, 30, 40]
    assert hall.queue.displaced_by(made("a"), 3, 1, 0) == [later[1]]
    assert hall.queue.displaced_by(made("a"), 3, 1, 11) is None
    assert hall.queue.displaced_by(made("a", priority=2), 3, 1, 0) is None


@pytest.mark.parametrize("costs", [{"a": 10, "b": 10, "c": 10}, {"a": 40, "b": 5, "c": 17}])
def test_work_is_shared_by_weight(costs: dict[str, float]) -> None:
    hall = Hall()
    for tenant in WEIGHTS:
        for _ in range(2000):
            hall.come(tenant, cost=costs[tenant])
    work: Counter[str] = Counter()
    while sum(work.values()) < 12_000:
        ticket = hall.go()
        work[ticket.tenant] += int(ticket.cost)
    assert {tenant: work[tenant] / 12_000 for tenant in WEIGHTS} == pytest.approx(
        {"a": 1 / 2, "b": 1 / 3, "c": 1 / 6}, rel=0.02
    )


def test_classes_have_their_share_too() -> None:
    hall = Hall()
    for level in (LOW, HIGH):
        for _ in range(100):
            hall.come("a", level)
    assert Counter(hall.go().level.name for _ in range(100)) == {"high": 75, "low": 25}


def test_of_two_classes_that_are_even_the_one_that_matters_more_is_first() -> None:
    hall = Hall()
    hall.come("a", LOW)
    assert hall.come("a", HIGH) is hall.go()


def test_who_asks_for_little_is_next() -> None:
    hall = Hall()
    for _ in range(100):
        hall.come("a")
    for _ in range(50):
        hall.go()
    late = hall.come("c")
    assert late in (hall.go(), hall.go())


def test_a_rest_saves_nothing_up_but_a_few_requests() -> None:
    hall = Hall()
    for _ in range(1000):
        hall.come("a")
    for _ in range(500):
        hall.go()
    for _ in range(500):
        hall.come("c")
    assert 7 <= [hall.go().tenant for _ in range(10)].count("c") <= 9
    assert Counter(hall.go().tenant for _ in range(100))["a"] == pytest.approx(75, abs=2)


def test_who_has_nothing_waiting_now_and_then_does_not_lose_its_share() -> None:
    """It may have one request waiting, and asks at random moments for more than its share."""
    hall, chance = Hall(), random.Random(1)
    for _ in range(2000):
        hall.come("b")
        hall.come("c")
    work: Counter[str] = Counter()
    waiting = False
    for _ in range(2000):
        if not waiting and chance.random() < 0.58:
            hall.come("a")
            waiting = True
        tenant = hall.go().tenant
        work[tenant] += 1
        waiting = waiting and tenant != "a"
    assert work["a"] == pytest.approx(1000, rel=0.01)


def test_work_beyond_the_estimate_counts_later() -> None:
    hall = Hall()
    for _ in range(100):
        hall.come("a")
        hall.come("a", cost=10)
        hall.come("c")
    settled = Counter({"a": 0, "c": 0})
    for _ in range(80):
        ticket = hall.go()
        hall.queue.settle(ticket, 10 if ticket.tenant == "a" else -5)
        settled[ticket.tenant] += 20 if ticket.tenant == "a" else 5
    assert settled["a"] / settled["c"] == pytest.approx(3, rel=0.15)


def test_who_leaves_was_never_there() -> None:
    hall = Hall()
    leaving = [hall.come("a") for _ in range(200)]
    staying = hall.come("a")
    other = hall.come("c")
    for ticket in leaving:
        hall.queue.remove(ticket)
    assert (hall.queue.count, hall.queue.cost) == (2, 20.0)
    assert {hall.go(), hall.go()} == {staying, other}


def test_who_comes_and_leaves_again_and_again_leaves_nothing_behind() -> None:
    hall = Hall()
    hall.come("c")
    kept = WeakSet[AdmissionTicket]()
    for _ in range(1000):
        ticket = hall.come("a")
        kept.add(ticket)
        hall.queue.remove(ticket)
    assert len(kept) < 100


def test_the_last_of_the_least_class_makes_room() -> None:
    hall = Hall()
    hall.come("a", LOW)
    last = hall.come("a", LOW)
    hall.come("c", LOW, cost=1)
    hall.come("b", HIGH)
    assert hall.queue.displaced_by(made("b"), 2, 1, 0) == [last]
    assert len(hall.queue.displaced_by(made("b"), 2, 1, 15) or []) == 2
    assert hall.queue.displaced_by(made("b"), 2, 1, 100) is None


def test_among_equals_whoever_has_most_waiting_makes_room() -> None:
    hall = Hall()
    many = [hall.come("a") for _ in range(12)]
    hall.come("b")
    assert hall.queue.displaced_by(made("c"), 1, 1, 0) == [many[-1]]
    assert hall.queue.displaced_by(made("a"), 3, 1, 0) is None
    assert hall.queue.displaced_by(made("b", LOW), 2, 1, 0) is None
    for _ in range(3):
        hall.come("c")
    assert hall.queue.displaced_by(made("c"), 1, 1, 0) is None


def test_how_much_is_ahead() -> None:
    hall = Hall()
    assert hall.queue.ahead(HIGH, "a", 3) == 0
    for _ in range(100):
        hall.come("a")
    assert hall.queue.ahead(HIGH, "a", 3) == 1000
    assert hall.queue.ahead(HIGH, "c", 1) == 0
    hall.come("c")
    assert hall.queue.ahead(HIGH, "c", 1) == 40
    hall.come("c", LOW)
    assert hall.queue.ahead(LOW, "c", 1) == 40


def test_another_policy_changes_shares() -> None:
    hall = Hall()
    for _ in range(200):
        hall.come("a")
        hall.come("c")
    tenants = {"a": Tenant("a", "high", 1), "c": Tenant("c", "high", 3)}
    hall.queue.follow(AdmissionPolicy(classes={"high": HIGH}, tenants=tenants, everybody=Tenant(level="high")))
    assert Counter(hall.go().tenant for _ in range(100))["c"] == pytest.approx(75, abs=3)


@given(
    st.lists(st.tuples(st.sampled_from(["come", "go", "leave"]), st.sampled_from("abc"), st.booleans()), max_size=200)
)
def test_nobody_is_lost(acts: list[tuple[str, str, bool]]) -> None:
    hall, waiting = Hall(), dict[AdmissionTicket, None]()
    for act, tenant, high in acts:
        if act == "come":
            waiting[hall.come(tenant, HIGH if high else LOW)] = None
        elif waiting and act == "go":
            del waiting[hall.go()]
        elif waiting:
            ticket = list(waiting)[len(waiting) // 2]
            hall.queue.remove(ticket)
            del waiting[ticket]
        assert hall.queue.count == len(waiting)
        assert hall.queue.cost == 10 * len(waiting)
    drained = hall.queue.drain()
    assert len(drained) == len(waiting)
    assert set(drained) == set(waiting)
    assert hall.queue.first() is None
