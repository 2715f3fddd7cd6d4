"""The rate limiter: who may execute, in which order, and who not at all."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nerite.config.flag import RateLimitResource as Limit
from nerite.core.errors import InvalidArgument
from nerite.scheduling.rate_limiter import EVERYWHERE, RateLimitedInstance, RateLimiter, ResourceClaim, ResourcePool

R, Q = ResourcePool("R"), ResourcePool("Q")


def claim(*needs: tuple[ResourcePool, int], priority: int = 1) -> ResourceClaim:
    return ResourceClaim(needs, priority)


def entered(
    limiter: RateLimiter, claim: ResourceClaim, granted: Callable[[], None] = lambda: None, model: str = "m"
) -> RateLimitedInstance:
    """Let one instance of a model come."""
    (seat,) = limiter.enter(model, [claim], granted)
    return seat


class Hall:
    """A limiter, and who was let in after waiting."""

    def __init__(self, *limits: Limit) -> None:
        self.limiter = RateLimiter(limits)
        self.let_in: list[str] = []

    def enter(self, name: str, *needs: tuple[ResourcePool, int], priority: int = 1) -> RateLimitedInstance:
        return entered(self.limiter, claim(*needs, priority=priority), lambda: self.let_in.append(name), model=name)


def test_who_shares_a_resource_waits() -> None:
    hall = Hall()
    first, second = hall.enter("first", (R, 2)), hall.enter("second", (R, 2))
    assert hall.limiter.acquire(first)
    assert not hall.limiter.acquire(second)
    assert not hall.limiter.acquire(second)
    hall.limiter.release(first)
    assert hall.let_in == ["second"]
    assert second.holding
    assert hall.limiter.acquire(second)
    assert not hall.limiter.acquire(first)


def test_there_is_as_much_as_the_neediest_needs() -> None:
    hall = Hall()
    small = [hall.enter(f"small {number}", (R, 1)) for number in range(4)]
    large = hall.enter("large", (R, 3))
    assert [hall.limiter.acquire(seat) for seat in small] == [True, True, True, False]
    hall.limiter.leave(large)
    for seat in small[:3]:
        hall.limiter.release(seat)
    assert hall.let_in == ["small 3"]
    assert not hall.limiter.acquire(small[0])


def test_more_of_a_resource_helps_those_who_wait() -> None:
    hall = Hall()
    first, second = hall.enter("first", (R, 1)), hall.enter("second", (R, 1))
    assert hall.limiter.acquire(first)
    assert not hall.limiter.acquire(second)
    hall.enter("large", (R, 2))
    assert hall.let_in == ["second"]


def test_each_device_has_its_own() -> None:
    hall = Hall()
    first, second = hall.enter("first", (ResourcePool("R", 0), 1)), hall.enter("second", (ResourcePool("R", 1), 1))
    assert hall.limiter.acquire(first)
    assert hall.limiter.acquire(second)


def test_who_needs_nothing_never_waits() -> None:
    hall = Hall()
    first, second, free = hall.enter("first", (R, 1)), hall.enter("second", (R, 1)), hall.enter("free")
    assert hall.limiter.acquire(first)
    assert not hall.limiter.acquire(second)
    assert hall.limiter.acquire(free)


def test_who_needs_something_else_is_not_held_up() -> None:
    hall = Hall()
    first, second, other = hall.enter("first", (R, 1)), hall.enter("second", (R, 1)), hall.enter("other", (Q, 1))
    assert hall.limiter.acquire(first)
    assert not hall.limiter.acquire(second)
    assert hall.limiter.acquire(other)


def test_large_needs_are_met_too() -> None:
    hall = Hall()
    small, large, late = hall.enter("small", (R, 1)), hall.enter("large", (R, 2)), hall.enter("late", (R, 1))
    assert hall.limiter.acquire(small)
    assert not hall.limiter.acquire(large)
    assert not hall.limiter.acquire(late)
    hall.limiter.release(small)
    assert hall.let_in == ["large"]
    hall.limiter.release(large)
    assert hall.let_in == ["large", "late"]


def test_who_gives_up_lets_the_others_pass() -> None:
    hall = Hall()
    small, large, late = hall.enter("small", (R, 1)), hall.enter("large", (R, 2)), hall.enter("late", (R, 1))
    for seat in (small, large, late):
        hall.limiter.acquire(seat)
    hall.limiter.release(large)
    assert hall.let_in == ["late"]
    hall.limiter.release(small)
    assert hall.let_in == ["late"]
    hall.limiter.release(small)


def test_who_leaves_gives_back_what_it_has() -> None:
    hall = Hall()
    first, second = hall.enter("first", (R, 1)), hall.enter("second", (R, 1))
    assert hall.limiter.acquire(first)
    assert not hall.limiter.acquire(second)
    hall.limiter.leave(first)
    assert hall.let_in == ["second"]


def test_priorities_weigh_executions() -> None:
    hall = Hall()
    seats = {name: hall.enter(name, (R, 1), priority=priority) for name, priority in (("a", 1), ("b", 2), ("c", 3))}
    taken: Counter[str] = Counter()
    for seat in seats.values():
        hall.limiter.acquire(seat)
    for _ in range(110):
        name = next(name for name, seat in seats.items() if seat.holding)
        seats[name].count()
        taken[name] += 1
        hall.limiter.release(seats[name], again=True)
    # As 1 to 1/2 to 1/3, but for the two executions that each has from the beginning.
    assert taken == {"a": 61, "b": 30, "c": 19}


def test_the_order_that_triton_has_been_seen_to_have() -> None:
    """Four models with priorities 0 to 3 wait while one of them executes."""
    hall = Hall()
    seats = {name: hall.enter(name, (R, 1), priority=int(name)) for name in "0123"}
    left = Counter({"1": 3, "3": 3, "2": 3, "0": 2})
    assert hall.limiter.acquire(seats["1"])
    for name in "320":
        hall.limiter.acquire(seats[name])
    order, running = [], "1"
    while left:
        seats[running].count()
        hall.limiter.release(seats[running], again=left[running] > 0)
        running = next(name for name, seat in seats.items() if seat.holding)
        order.append(running)
        left -= Counter(running)
    # Where scores are equal, Triton has no rule.
    assert [sorted(order[:3]), sorted(order[3:6]), sorted(order[6:8]), order[8:]] == [
        ["0", "0", "1"],
        ["1", "1", "2"],
        ["2", "3"],
        ["2", "3", "3"],
    ]


@pytest.mark.parametrize(
    ("limits", "needs", "enough"),
    [
        ([Limit("R", 2)], (R, 2), True),
        ([Limit("R", 2)], (ResourcePool("R", 5), 2), True),
        ([Limit("R", 1), Limit("R", 2, 5)], (ResourcePool("R", 5), 2), True),
        ([Limit("R", 1, 0), Limit("R", 2, 1)], (R, 2), True),
        ([Limit("R", 1), Limit("R", 2)], (R, 2), False),
        ([Limit("R", 2, 1)], (ResourcePool("R", 0), 1), False),
        ([Limit("Q", 2)], (R, 1), False),
    ],
)
def test_what_the_operator_says_there_is(limits: list[Limit], needs: tuple[ResourcePool, int], enough: bool) -> None:
    limiter = RateLimiter(limits)
    if enough:
        assert limiter.acquire(entered(limiter, claim(needs)))
    else:
        with pytest.raises(InvalidArgument, match=r'^Resource count for "R" is limited to [01] which will prevent'):
            entered(limiter, claim(needs))


def test_too_little() -> None:
    limiter = RateLimiter([Limit("R", 2)])
    with pytest.raises(InvalidArgument) as refusal:
        entered(limiter, claim((ResourcePool("R", 0), 4)))
    assert refusal.value.message == (
        'Resource count for "R" is limited to 2 which will prevent scheduling of one or more model instances, the '
        "minimum required count is 4. Raise the limit with --rate-limit-resource=R:4, or reduce the count in the "
        "instance group."
    )


BOTH = r'^Resource "R" is present as both global and device-specific resource '


def test_global_here_and_not_there() -> None:
    limiter = RateLimiter()
    needs = [(R, 1), (ResourcePool("R", 0), 1)]
    for claims in ([claim(*needs)], [claim(each) for each in needs]):
        with pytest.raises(InvalidArgument, match=BOTH):
            limiter.enter("m", claims, lambda: None)
    entered(limiter, claim(needs[0]))
    with pytest.raises(InvalidArgument, match=BOTH):
        entered(limiter, claim(needs[1]), model="other")
    assert limiter.acquire(entered(limiter, claim((Q, 1)), model="other"))


def test_global_before_and_not_after() -> None:
    """A model that is reloaded, whose instances of before run until they have finished what they have."""
    hall = Hall()
    limiter = hall.limiter
    old = [entered(limiter, claim((R, 1))), entered(limiter, claim((R, 1)))]
    new = [
        entered(
            limiter, claim((ResourcePool("R", device), 1)), lambda device=device: hall.let_in.append(f"on {device}")
        )  # type: ignore[misc]
        for device in (0, 1)
    ]
    assert limiter.acquire(old[0])
    assert [limiter.acquire(seat) for seat in new] == [False, False], "not both at a time"
    assert not limiter.acquire(old[1]), "and in the order in which they came"
    limiter.release(old[0])
    assert hall.let_in == ["on 0", "on 1"]
    for seat in old:
        limiter.leave(seat)
    with pytest.raises(InvalidArgument, match=BOTH):
        entered(limiter, claim((R, 1)), model="other")
    limiter.release(new[0])
    assert limiter.acquire(new[0])
    assert limiter.acquire(entered(limiter, claim((ResourcePool("R", 2), 1)), model="other"))


def test_what_a_model_says_last_counts_for_others() -> None:
    limiter = RateLimiter()
    entered(limiter, claim((R, 1)))
    entered(limiter, claim((ResourcePool("R", 0), 1)))
    entered(limiter, claim((ResourcePool("R", 0), 1)), model="other")
    with pytest.raises(InvalidArgument, match=BOTH):
        entered(limiter, claim((R, 1)))


@given(st.lists(st.tuples(st.sampled_from("RQ"), st.integers(0, 3), st.integers(1, 4)), max_size=6))
def test_whoever_is_there_can_execute_alone(wanted: list[tuple[str, int, int]]) -> None:
    limiter = RateLimiter()
    seats = [entered(limiter, claim((ResourcePool(name, device), count))) for name, device, count in wanted]
    for seat in seats:
        assert limiter.acquire(seat)
        limiter.release(seat)


needs = st.dictionaries(st.sampled_from("RQS"), st.integers(1, 3), max_size=3)


class Limited(RuleBasedStateMachine):
    """Instances come, ask, run and go as they like. What there is, is never exceeded, and nobody waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = RateLimiter()
        self.seats: list[RateLimitedInstance] = []
        self.most: Counter[ResourcePool] = Counter()
        """The largest need of each resource since it was last free."""

    @rule(needs=needs, priority=st.integers(0, 3), device=st.sampled_from([EVERYWHERE, EVERYWHERE, 0, 1]))
    def come(self, needs: dict[str, int], priority: int, device: int) -> None:
        claims = tuple((ResourcePool(name, device), count) for name, count in needs.items())
        self.seats.append(entered(self.limiter, ResourceClaim(claims, priority)))

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def ask(self, data: Any) -> None:
        seat = data.draw(st.sampled_from(self.seats))
        assert self.limiter.acquire(seat) == seat.holding
        if seat.holding:
            seat.count()

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        self.limiter.release(data.draw(st.sampled_from(self.seats)), again=data.draw(st.booleans()))

    @precondition(lambda self: self.seats)
    @rule(data=st.data())
    def go(self, data: Any) -> None:
        seat = data.draw(st.sampled_from(self.seats))
        self.seats.remove(seat)
        self.limiter.leave(seat)

    @invariant()
    def never_more_than_there_is(self) -> None:
        for pool in itertools.starmap(ResourcePool, itertools.product("RQS", (EVERYWHERE, 0, 1))):
            needed = [dict(seat.claim.needs).get(pool, 0) for seat in self.seats]
            held = [dict(seat.claim.needs).get(pool, 0) for seat in self.seats if seat.holding]
            self.most[pool] = max([*needed, self.most[pool] if any(held) else 0])
            assert sum(held) <= self.most[pool]

    @invariant()
    def global_or_not_but_never_both_at_a_time(self) -> None:
        held = {(pool.name, pool.everywhere) for seat in self.seats if seat.holding for pool, _ in seat.claim.needs}
        assert len(held) == len({name for name, _ in held})

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """The first that waits waits for something that others have."""
        waiting = [seat for seat in self.seats if seat.waiting is not None]
        if waiting:
            first = min(waiting, key=lambda seat: seat.waiting or (0, 0))
            held = {pool for seat in self.seats if seat.holding for pool, _ in seat.claim.needs}
            rivals = {(pool.name, pool.everywhere) for pool in held}
            assert any(pool in held or (pool.name, not pool.everywhere) in rivals for pool, _ in first.claim.needs)


TestLimited = Limited.TestCase
