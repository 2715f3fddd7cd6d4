"""The plan of batches: earliest deadline first, fair between tenants, raised in time and not to and fro."""

from __future__ import annotations

import pytest

from nerite.batches.deadline_planner import LOWER, RAISE, DeadlinePlanner, RecentRate


class Plan:
    """A planner and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.planner = DeadlinePlanner()

    def add(
        self, key: str, left: int, window: float, tenant: str = "acme", model: str = "llm", weight: float = 1
    ) -> None:
        self.planner.add(key, tenant, model, left, self.now + window, self.now, weight)

    def answers(self, key: str, count: int, rate: float, seconds: float = 1.0) -> None:
        """Answer items at a rate."""
        for _ in range(count):
            self.now += 1 / rate
            self.planner.ended(key, seconds, self.now)

    @property
    def order(self) -> list[str]:
        return self.planner.order(self.now)

    def needs(self, key: str) -> int:
        return self.planner.needs(key, self.now)


def test_the_earliest_deadline_of_a_tenant_goes_first() -> None:
    plan = Plan()
    plan.add("later", 10, 7200)
    plan.add("sooner", 10, 3600)
    assert plan.order == ["sooner", "later"]
    plan.planner.remove("sooner")
    assert plan.order == ["later"]


def test_tenants_take_turns_by_what_they_have_used() -> None:
    plan = Plan()
    plan.add("a", 1000, 3600, "acme")
    plan.add("b", 1000, 7200, "umbrella")
    plan.answers("a", 10, rate=10)
    assert plan.order == ["b", "a"]
    plan.answers("b", 11, rate=10)
    assert plan.order == ["a", "b"]


def test_a_weight_of_two_uses_twice_as_much() -> None:
    plan = Plan()
    plan.add("a", 1000, 3600, "acme", weight=2)
    plan.add("b", 1000, 3600, "umbrella")
    served = {"a": 0, "b": 0}
    for _ in range(90):
        first = plan.order[0]
        served[first] += 1
        plan.answers(first, 1, rate=100)
    assert served["a"] == pytest.approx(60, abs=2)


def test_a_new_tenant_has_no_credit_for_the_past() -> None:
    plan = Plan()
    plan.add("a", 1000, 3600, "acme")
    plan.answers("a", 100, rate=100)
    plan.add("b", 1000, 3600, "umbrella")
    plan.answers("b", 1, rate=100)
    assert plan.order == ["a", "b"]


def test_the_end_is_predicted_by_the_rate_and_what_goes_before() -> None:
    plan = Plan()
    plan.add("a", 400, 3600)
    plan.add("b", 100, 7200)
    assert plan.planner.predicted_end("a", plan.now) is None
    plan.answers("a", 300, rate=10)
    end = plan.planner.predicted_end("a", plan.now)
    other = plan.planner.predicted_end("b", plan.now)
    assert end is not None
    assert other is not None
    assert end - plan.now == pytest.approx(10, rel=0.15)
    assert other - plan.now == pytest.approx(20, rel=0.15)


def test_a_batch_that_would_be_late_is_raised_to_what_reaches_the_deadline() -> None:
    plan = Plan()
    plan.add("a", 2000, 600)
    plan.answers("a", 140, rate=2, seconds=4.0)  # 1,860 items at 2 a second take longer than 530 s
    needed = plan.needs("a")
    rate = 1860 / 530
    assert rate * 4.0 < needed < 2 * rate * 4.0
    assert plan.order == ["a"]


def test_a_batch_in_time_stays_in_idle_room() -> None:
    plan = Plan()
    plan.add("a", 2000, 600)
    plan.answers("a", 100, rate=20)
    assert plan.needs("a") == 0


def test_a_raised_batch_is_lowered_only_with_much_more_room() -> None:
    plan = Plan()
    plan.add("a", 2000, 1000)
    plan.answers("a", 70, rate=1)
    assert plan.needs("a") > 0
    # Just below the threshold of raising it stays raised.
    seen = []
    for rate in (2.6, 3.2, 8.0):
        plan.answers("a", int(40 * rate), rate)
        end = plan.planner.predicted_end("a", plan.now)
        assert end is not None
        used = (end - plan.now) / (2000 - plan.now)
        seen.append((used, plan.needs("a") > 0))
    assert any(LOWER < used < RAISE and raised for used, raised in seen)
    assert seen[-1][0] < LOWER
    assert not seen[-1][1]


def test_the_pace_ends_a_batch_well_before_its_deadline() -> None:
    plan = Plan()
    plan.add("a", 1000, 1000)
    assert plan.planner.pace("a", plan.now) == 2  # nothing is known of its items yet
    plan.answers("a", 100, rate=10, seconds=6.0)
    assert plan.planner.pace("a", plan.now) == 10  # 900 items of 6 s in 0.6 * 990 s, rounded up
    assert plan.needs("a") == 0
    assert plan.planner.pace("nothing", plan.now) == 0


def test_batches_in_danger_go_before_others() -> None:
    plan = Plan()
    plan.add("calm", 10, 300, "umbrella")
    plan.add("late", 2000, 600)
    plan.answers("calm", 8, rate=10, seconds=0.1)
    plan.answers("late", 60, rate=1)
    assert plan.order == ["late", "calm"]


def test_a_batch_without_any_room_is_raised_after_a_tenth_of_its_window() -> None:
    plan = Plan()
    plan.add("a", 100, 100)
    plan.now += 9
    assert plan.needs("a") == 0
    plan.now += 2
    assert plan.needs("a") > 0


def test_a_rate_that_ceases_raises_the_batch() -> None:
    plan = Plan()
    plan.add("a", 500, 3600)
    plan.answers("a", 100, rate=10)
    assert plan.needs("a") == 0
    plan.now += 600
    assert plan.needs("a") > 0


def test_what_is_not_planned_needs_nothing() -> None:
    plan = Plan()
    assert plan.needs("nothing") == 0
    plan.planner.ended("nothing", 1.0, plan.now)
    plan.planner.remove("nothing")
    assert plan.order == []
    assert not plan.planner.knows("nothing")


@pytest.mark.parametrize("true", [0.02, 1.0, 10.0, 1000.0])
def test_a_rate(true: float) -> None:
    rate = RecentRate(0.0)
    for number in range(1, 2001):
        rate.note(number / true)
        if number > 8:
            assert rate.value((number + 0.5) / true) == pytest.approx(true, rel=0.1)
    end = 2000 / true
    assert rate.value(end + 10 * 512 / true) < true / 5


def test_a_rate_follows_a_change_within_seconds() -> None:
    rate, now = RecentRate(0.0), 0.0
    for _ in range(1000):
        now += 0.1
        rate.note(now)
    for _ in range(40):
        now += 0.5
        rate.note(now)
    assert rate.value(now) == pytest.approx(2, rel=0.1)


def test_slow_items_are_no_reason_to_raise_a_batch_between_two_answers() -> None:
    plan = Plan()
    plan.add("a", 100, 20_000)
    for _ in range(50):
        plan.answers("a", 1, rate=1 / 100, seconds=100.0)
        for _ in range(9):
            plan.now += 10
            assert plan.needs("a") == 0
        plan.now -= 90


def test_a_new_batch_is_not_raised_before_its_rate_is_known() -> None:
    plan = Plan()
    plan.add("a", 2000, 300)
    plan.answers("a", 2, rate=1)
    assert plan.needs("a") == 0
    plan.answers("a", 30, rate=1)
    assert plan.needs("a") > 0
