"""Ejection of members that fail, retries within a budget, and delays of hedges."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import SECOND, load_of, picked, pool, sent

from nerite.balancing.member import AttemptEnd, RoutedRequest
from nerite.balancing.outliers import OutlierDetector
from nerite.balancing.policy import EjectionPolicy, PoolPolicy
from nerite.balancing.retries import LatencyQuantile, PoolRetryBudget


def detector(count: int, **settings: float) -> OutlierDetector:
    made = OutlierDetector(EjectionPolicy(**settings))  # type: ignore[arg-type]
    made.set_members([f"m{number}" for number in range(count)])
    made.advance(0)
    return made


def test_failures_in_a_row_eject() -> None:
    found = detector(3, consecutive_failures=3)
    assert [found.failed("m0", 0) for _ in range(2)] == [False, False]
    found.answered("m0")
    assert [found.failed("m0", 0) for _ in range(3)] == [False, False, True]
    assert (found.ejected, found.ejections) == ({"m0"}, 1)


def test_each_ejection_is_twice_as_long_and_one_failure_is_enough_then() -> None:
    found = detector(2, consecutive_failures=2, base_ejection=5.0, max_ejection=15.0, interval=86_400.0)
    found.failed("m0", 0)
    now = 0
    for seconds in (5, 10, 15, 15):
        assert found.failed("m0", now)
        assert not found.advance(now + seconds * SECOND - 1)
        now += seconds * SECOND
        assert found.advance(now)
        assert not found.ejected


def test_an_answer_ends_the_probation_and_good_intervals_are_remembered() -> None:
    found = detector(2, consecutive_failures=2, base_ejection=5.0, interval=10.0)
    for _ in range(2):
        found.failed("m0", 0)
    found.advance(5 * SECOND)
    found.answered("m0")
    assert not found.failed("m0", 6 * SECOND)
    found.answered("m0")
    for end in (10, 20):
        found.advance(end * SECOND)
        found.answered("m0")
    found.failed("m0", 25 * SECOND)
    assert found.failed("m0", 25 * SECOND)
    found.advance(30 * SECOND)
    assert not found.ejected, "the first ejection is forgotten: this one is short again"


def test_a_larger_share_of_failures_than_that_of_the_others_ejects() -> None:
    found = detector(3, consecutive_failures=0, failure_ratio=0.3, request_volume=20, interval=10.0)
    for _ in range(20):
        for name in ("m0", "m1", "m2"):
            found.answered(name)
        for _ in range(2):
            found.failed("m1", SECOND)
    assert found.advance(10 * SECOND)
    assert found.ejected == {"m1"}


def test_what_fails_everywhere_ejects_nobody() -> None:
    found = detector(3, consecutive_failures=0, interval=10.0)
    for _ in range(50):
        for name in ("m0", "m1", "m2"):
            found.failed(name, SECOND)
    assert not found.advance(10 * SECOND)


@pytest.mark.parametrize(("count", "share", "most"), [(1, 1.0, 0), (2, 0.1, 1), (3, 1.0, 2), (10, 0.5, 5), (4, 0.0, 0)])
def test_no_more_than_a_share_is_out(count: int, share: float, most: int) -> None:
    found = detector(count, consecutive_failures=1, max_ejected=share)
    for number in range(count):
        found.failed(f"m{number}", 0)
    assert len(found.ejected) == most


def test_who_left_is_forgotten() -> None:
    found = detector(3, consecutive_failures=1)
    assert found.failed("m0", 0)
    found.set_members(["m1", "m2"])
    assert not found.ejected
    assert not found.failed("m0", 0)
    found.answered("m0")


def test_a_share_of_requests_may_be_retried() -> None:
    budget = PoolRetryBudget(share=0.2, floor=0.0)
    while budget.take(SECOND):
        pass
    for _ in range(1000):
        budget.add_request()
    assert sum(budget.take(SECOND) for _ in range(1000)) == 20, "what was not used is kept for 100 requests"
    for _ in range(50):
        budget.add_request()
    assert sum(budget.take(SECOND) for _ in range(1000)) in (9, 10)
    assert budget.refused >= 1971


def test_the_floor_allows_retries_of_few_requests() -> None:
    budget = PoolRetryBudget(share=0.0, floor=2.0)
    assert sum(budget.take(SECOND) for _ in range(100)) == 20
    assert sum(budget.take(3 * SECOND) for _ in range(100)) == 4


def test_no_budget_no_retries() -> None:
    budget = PoolRetryBudget(share=0.0, floor=0.0)
    budget.add_request()
    assert not budget.take(SECOND)
    assert not budget.take(1000 * SECOND)


def test_the_pool_counts_requests_and_not_their_retries() -> None:
    balancer = pool(2, PoolPolicy(retry_share=1.0, retry_floor=0.0))
    while balancer.take_retry(SECOND):
        pass
    first = picked(balancer, RoutedRequest("m"))
    picked(balancer, RoutedRequest("m"), tried=[first.member.name])
    assert [balancer.take_retry(SECOND) for _ in range(2)] == [True, False]


@given(st.lists(st.sampled_from(["request", "retry", "second"]), max_size=300))
def test_retries_are_never_more_than_the_budget(events: list[str]) -> None:
    budget = PoolRetryBudget(share=0.5, floor=1.0)
    now = SECOND
    taken = 0
    for event in events:
        if event == "request":
            budget.add_request()
        elif event == "retry":
            taken += budget.take(now)
        else:
            now += SECOND
    assert taken <= 50 + 0.5 * events.count("request") + events.count("second") + 1e-6


def test_a_quantile_of_latencies_follows_them() -> None:
    chance = random.Random(1)
    latency = LatencyQuantile(0.95)
    assert latency.nanoseconds is None
    for median in (5e6, 50e6):
        values = [round(median * chance.lognormvariate(0, 0.5)) for _ in range(20_000)]
        for value in values:
            latency.add(value)
        assert latency.nanoseconds == pytest.approx(sorted(values)[19_000], rel=0.1)
    latency.add(0)
    latency.add(10**18)


def test_only_tensors_are_hedged_and_only_when_it_is_known_what_is_late() -> None:
    balancer = pool(2, PoolPolicy(hedge_quantile=0.9))
    tensors = RoutedRequest("m")
    for number in range(200):
        assert (balancer.hedge_delay_ns(tensors) is None) == (number < 128)
        balancer.end(sent(balancer, tensors), AttemptEnd.ANSWERED, None, 10_000_000)
    assert balancer.hedge_delay_ns(tensors) == pytest.approx(10_000_000, rel=0.1)
    for other in (
        RoutedRequest("m", prompt_tokens=3.0),
        RoutedRequest("m", answer_tokens=20.0),
        RoutedRequest("m", repeatable=False),
        RoutedRequest("m", sequence="s"),
        RoutedRequest("n"),
    ):
        assert balancer.hedge_delay_ns(other) is None
    balancer.set_members([load_of(balancer, "m0").member])
    assert balancer.hedge_delay_ns(tensors) is None, "there is no second member"
    assert pool(2).hedge_delay_ns(tensors) is None, "not asked for"
