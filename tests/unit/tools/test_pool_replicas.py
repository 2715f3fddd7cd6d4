"""Which servers ``nerite up`` starts, wakes and stops, so that a pool has as many as are wanted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nerite.tools.up.replicas import PoolReplicas, ReplicaOrder, ReplicaStep
from nerite.tools.up.replicas import ReplicaStep as Step


class Machine:
    """Carries orders out: what is started is ready after the next ``settle``."""

    def __init__(self, members: int = 0, standbys: int = 0, warm: int = 0) -> None:
        names = [f"p/{number}" for number in range(1, members + standbys + 1)]
        self.replicas = PoolReplicas("p", names[:members], names[members:])
        self.warm = warm
        self.alive = {name: name in names[members:] for name in names}
        """Whether each stands by."""
        self.ready: set[str] = set()
        self.listed: set[str] = set(names[:members])

    def settle(self) -> None:
        self.ready = set(self.alive)
        self.listed = set(self.replicas.joined)

    def want(self, wanted: int) -> list[ReplicaOrder]:
        orders = self.replicas.orders(wanted, self.warm, self.ready, self.listed)
        for step, name in orders:
            if step in (Step.START, Step.STAND_BY):
                assert name not in self.alive
                self.alive[name] = step is Step.STAND_BY
            elif step is Step.WAKE:
                assert self.alive[name]
                self.alive[name] = False
                self.ready.discard(name)
            elif step is Step.STOP:
                assert name not in self.listed, "the router still sends requests there"
                del self.alive[name]
                self.ready.discard(name)
        return orders

    @property
    def serving(self) -> list[str]:
        return sorted(name for name, standby in self.alive.items() if not standby)


def test_a_server_joins_when_it_is_ready() -> None:
    machine = Machine(members=1)
    machine.settle()
    assert machine.want(2) == [(Step.START, "p/2")]
    assert machine.want(2) == []
    assert machine.replicas.joined == ["p/1"]
    machine.ready.add("p/2")
    assert machine.want(2) == [(Step.JOIN, "p/2")]
    assert machine.replicas.joined == ["p/1", "p/2"]


def test_a_server_leaves_before_it_is_stopped() -> None:
    machine = Machine(members=3)
    machine.settle()
    assert machine.want(2) == [(Step.LEAVE, "p/3")]
    assert machine.want(2) == [], "the router still has it"
    machine.listed.discard("p/3")
    assert machine.want(2) == [(Step.STOP, "p/3")]
    assert machine.serving == ["p/1", "p/2"]


def test_one_that_never_joined_is_stopped_at_once_and_before_others() -> None:
    machine = Machine(members=1)
    machine.settle()
    machine.want(2)
    assert machine.want(1) == [(Step.STOP, "p/2")]


def test_a_standby_is_woken_and_replaced_when_the_members_are_ready() -> None:
    machine = Machine(members=1, standbys=1, warm=1)
    machine.settle()
    assert machine.want(2) == [(Step.WAKE, "p/2")]
    machine.ready.add("p/2")
    assert machine.want(2) == [(Step.JOIN, "p/2"), (Step.STAND_BY, "p/3")]


def test_a_standby_that_is_not_prepared_yet_is_not_waited_for() -> None:
    machine = Machine(members=1, standbys=1, warm=1)
    machine.ready.add("p/1")
    assert machine.want(2) == [(Step.START, "p/3")]


def test_a_pool_is_emptied_and_filled_again() -> None:
    machine = Machine(members=2)
    machine.settle()
    assert machine.want(0) == [(Step.LEAVE, "p/1"), (Step.LEAVE, "p/2")]
    machine.settle()
    machine.want(0)
    assert machine.alive == {}
    assert machine.want(1) == [(Step.START, "p/1")]


@given(
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40),
)
def test_in_the_end_there_are_as_many_as_are_wanted(warm: int, wishes: list[tuple[int, bool]]) -> None:
    machine = Machine(members=1, standbys=warm, warm=warm)
    for wanted, settles in wishes:
        machine.want(wanted)
        if settles:
            machine.settle()
    last = wishes[-1][0] if wishes else 1
    for _ in range(4):
        machine.settle()
        machine.want(last)
    assert len(machine.serving) == last
    assert len(machine.alive) == last + warm
    assert (machine.replicas.joined and set(machine.replicas.joined) == set(machine.serving)) or not last
    assert [order for order in machine.want(last) if order.step is not ReplicaStep.JOIN] == []


def test_a_server_that_is_replaced_stays_until_another_is_ready() -> None:
    replicas = PoolReplicas("p", ["p/1", "p/2"])
    both = {"p/1", "p/2"}
    assert replicas.orders(2, 0, both, both, replaced={"p/1"}) == [(Step.START, "p/3")]
    assert replicas.orders(2, 0, both, both, replaced={"p/1"}) == []
    assert replicas.orders(2, 0, {*both, "p/3"}, both, replaced={"p/1"}) == [(Step.JOIN, "p/3"), (Step.LEAVE, "p/1")]
    assert replicas.orders(2, 0, {*both, "p/3"}, {"p/2", "p/3"}, replaced={"p/1"}) == [(Step.STOP, "p/1")]
    assert replicas.joined == ["p/2", "p/3"]


def test_a_server_that_has_no_time_leaves_at_once() -> None:
    replicas = PoolReplicas("p", ["p/1", "p/2"])
    both = {"p/1", "p/2"}
    orders = replicas.orders(2, 0, both, both, replaced={"p/1"}, hurried={"p/1"})
    assert orders == [(Step.START, "p/3"), (Step.LEAVE, "p/1")]


def test_a_standby_that_is_replaced_ends_and_another_stands_by() -> None:
    replicas = PoolReplicas("p", ["p/1"], ["p/2"])
    orders = replicas.orders(1, 1, {"p/1", "p/2"}, {"p/1"}, replaced={"p/2"})
    assert orders == [(Step.STOP, "p/2"), (Step.STAND_BY, "p/2")]
