"""How many members the autoscaler wants, second by second, on a clock of the test's own."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.autoscaling.figures import PoolFigures
from nerite.autoscaling.policy import ScalingPolicy
from nerite.autoscaling.scaler import PoolScaler
from nerite.core.errors import InvalidArgument


class Pool:
    """A pool whose members are ready ``start`` seconds after they are wanted."""

    def __init__(self, ready: int = 1, start: float = 0.0, **settings: Any) -> None:
        self.scaler = PoolScaler(ScalingPolicy(**{"most": 20, **settings}))
        self.ready = ready
        self.now = 1000.0
        self._start = start
        self._starting: list[float] = []

    def second(self, **figures: Any) -> int:
        """Pass a second in which this happened; return what is wanted."""
        self.now += 1
        self.ready += sum(at <= self.now for at in self._starting)
        self._starting = [at for at in self._starting if at > self.now]
        wanted = self.scaler.observe(PoolFigures(1.0, **{"ready": self.ready, **figures}), self.now).wanted
        missing = wanted - self.ready - len(self._starting)
        self._starting += [self.now + self._start] * missing
        if wanted < self.ready:
            self.ready = wanted
        return wanted

    def seconds(self, count: int, **figures: Any) -> list[int]:
        return [self.second(**figures) for _ in range(count)]

    @property
    def reason(self) -> str:
        return self.scaler.decision.reason


def working(rate: float, ready: int, capacity: float = 10.0) -> dict[str, Any]:
    """Return the figures of a second with members that keep the promise up to a rate of work."""
    done = min(rate, ready * capacity)
    answers = round(done * 2)
    late = answers if rate > ready * capacity else 0
    return {"arrived": rate, "done": done, "answers": answers, "late": late, "under_way": round(3 * ready)}


def test_the_given_rate_of_a_member_decides_with_headroom() -> None:
    pool = Pool(rate=10.0, headroom=0.2)
    assert pool.seconds(3, arrived=8.0)[-1] == 1
    assert pool.seconds(15, arrived=30.0)[-1] == 4
    assert "work arrives at" in pool.reason


def test_half_of_the_headroom_is_used_before_a_member_is_added() -> None:
    pool = Pool(rate=10.0, headroom=0.2)
    assert pool.seconds(90, arrived=9.0)[-1] == 1
    assert pool.seconds(90, arrived=9.2)[-1] == 2


def test_requests_at_the_same_time_decide() -> None:
    pool = Pool(concurrency=4.0, headroom=0.0)
    assert pool.seconds(60, arrived=1.0, under_way=9)[-1] == 3
    assert "requests at the same time" in pool.reason


def test_steps_upwards_are_bounded() -> None:
    pool = Pool(ready=2, rate=1.0, step=2.0, start=1.0)
    wanted = pool.seconds(40, arrived=100.0)
    assert wanted[0] == 6, "two members may become four, and four more are always allowed"
    assert wanted[13] == 6
    assert wanted[16] == 12
    assert wanted[-1] == 20
    assert "bounded by max" in pool.reason


def test_fewer_are_wanted_only_after_the_stabilization_time() -> None:
    pool = Pool(rate=10.0, stabilization=60.0)
    assert pool.seconds(90, arrived=35.0)[-1] == 5
    wanted = pool.seconds(200, arrived=5.0)
    assert wanted[58] == 5
    assert wanted[-1] == 1


def test_a_load_that_comes_and_goes_keeps_its_members() -> None:
    pool = Pool(rate=10.0, stabilization=120.0)
    pool.seconds(120, arrived=50.0)
    wanted = [each for _ in range(10) for rate in (5.0, 50.0) for each in pool.seconds(45, arrived=rate)]
    assert min(wanted) >= 6


def test_chance_does_not_add_members() -> None:
    pool, chance = Pool(ready=4, rate=10.0), random.Random(1)
    arrivals = [sum(chance.random() < 0.3 for _ in range(100)) for _ in range(1800)]
    assert {pool.second(arrived=float(count)) for count in arrivals} == {4}


def test_what_a_member_can_do_is_learned_from_promises_that_are_nearly_broken() -> None:
    pool = Pool(latency=0.5, start=5.0)
    for _ in range(300):
        pool.second(**working(35.0, pool.ready))
    assert 8.0 <= pool.scaler.rate <= 10.0
    assert pool.ready == 5
    assert "a member keeps the promises at" in pool.reason


def test_members_that_are_never_needed_go_one_by_one() -> None:
    pool = Pool(ready=6, latency=0.5, stabilization=60.0)
    wanted = []
    for _ in range(900):
        wanted.append(pool.second(**working(15.0, pool.ready)))
    assert all(one - other <= 1 for one, other in pairwise(wanted))
    assert 2 <= wanted[-1] <= 3
    assert wanted[30] == 6


def test_a_promise_that_idle_members_break_adds_none() -> None:
    pool = Pool(ready=2, ttft=0.1)
    wanted = pool.seconds(60, arrived=5.0, done=5.0, answers=5, late=5, under_way=1)
    assert set(wanted) == {2}
    assert "more do not help" in pool.reason


def test_members_that_work_off_what_has_piled_up_are_enough() -> None:
    pool = Pool(ready=4, latency=0.5)
    wanted = pool.seconds(60, arrived=20.0, done=40.0, answers=80, late=80, under_way=50)
    assert set(wanted) == {4}


def test_the_start_time_is_learned_and_a_rising_load_is_met_in_advance() -> None:
    prompt, slow = Pool(rate=10.0, start=0.0, most=50), Pool(rate=10.0, start=60.0, most=50)
    for pool in (prompt, slow):
        pool.seconds(30, arrived=15.0)
        pool.seconds(90, arrived=15.0)
    assert slow.scaler.start_times.seconds == pytest.approx(60, abs=1)
    rates = [15 + 0.25 * second for second in range(300)]
    first = [next(at for at, rate in enumerate(rates) if pool.second(arrived=rate) > 8) for pool in (prompt, slow)]
    assert first[1] < first[0] - 20


def test_an_idle_pool_has_no_members_until_a_request_waits() -> None:
    pool = Pool(least=0, idle=30.0, concurrency=4.0)
    pool.second(arrived=1.0)
    wanted = pool.seconds(40)
    assert wanted[28] == 1
    assert wanted[-1] == 0
    assert pool.reason == "no request for 30 s"
    assert pool.second(held=1) == 1
    assert "found no member" in pool.reason


def test_a_request_that_was_turned_away_wakes_an_empty_pool() -> None:
    pool = Pool(ready=0, least=0, idle=30.0, latency=1.0)
    assert pool.second() == 0
    assert pool.second(turned_away=1) == 1
    assert pool.seconds(20)[-1] == 1, "the member is not stopped before its time"


def test_requests_that_all_members_refuse_add_one_after_the_other_is_ready() -> None:
    pool = Pool(ready=2, start=5.0, rate=100.0)
    wanted = pool.seconds(8, arrived=1.0, turned_away=3)
    assert wanted == [3] * 5 + [4] * 3
    assert pool.seconds(3, arrived=1.0)[-1] == 4


def test_a_router_that_starts_anew_keeps_what_is_there() -> None:
    pool = Pool(ready=7, rate=10.0)
    assert pool.second(arrived=1.0) == 7


@given(
    least=st.integers(0, 3),
    more=st.integers(0, 5),
    seconds=st.lists(
        st.tuples(st.floats(0, 1e6), st.integers(0, 1000), st.integers(0, 50), st.integers(0, 9)), max_size=60
    ),
    settings=st.sampled_from(({"rate": 5.0}, {"concurrency": 2.0}, {"latency": 0.2}, {"ttft": 0.2, "rate": 3.0})),
)
def test_the_bounds_hold_whatever_happens(
    least: int, more: int, seconds: list[tuple[float, int, int, int]], settings: dict[str, float]
) -> None:
    most = max(least + more, 1)
    pool = Pool(least=least, most=most, idle=5.0, **settings)
    for work, answers, waiting, ready in seconds:
        figures = {"arrived": work, "done": work / 2, "answers": answers, "late": answers // 2, "ready": ready}
        assert least <= pool.second(**figures, held=waiting, under_way=waiting) <= most
        assert pool.reason


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "there is no target"),
        ({"rate": 1.0, "least": 3, "most": 2}, "max is 2, less than min, 3: raise max"),
        ({"rate": 1.0, "share": 1.0}, "share is 1: it must be from 0.5 to 0.9999"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        ScalingPolicy(**settings)
