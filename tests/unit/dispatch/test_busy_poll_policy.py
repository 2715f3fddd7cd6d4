"""When one waits awake."""

from __future__ import annotations

import pytest

from nerite.backends import machine
from nerite.dispatch.busy_poll import BusyPollPolicy, limit_of

LIMIT = 400.0


@pytest.fixture
def poll_policy() -> BusyPollPolicy:
    return BusyPollPolicy(LIMIT)


def wait(poll_policy: BusyPollPolicy, now: float, length: float, kind: bool = False) -> tuple[float, float]:
    """Wait that long; return for how much of it one was awake, and when it was over."""
    poll_policy.began(now, kind)
    awake = 0.0
    while awake < length and poll_policy.polls(now + awake):
        awake += 1
    poll_policy.ended(now + length)
    return awake, now + length


def test_after_a_short_wait_the_next_one_is_awake(poll_policy: BusyPollPolicy) -> None:
    awake, now = wait(poll_policy, 0, 10)
    assert awake == 0
    for length in (1, 10, LIMIT - 1):
        awake, now = wait(poll_policy, now, length)
        assert awake == length


def test_in_the_end_one_sleeps_and_from_then_on(poll_policy: BusyPollPolicy) -> None:
    _, now = wait(poll_policy, 0, 10)
    awake, now = wait(poll_policy, now, LIMIT * 10)
    assert awake == LIMIT
    awake, now = wait(poll_policy, now, LIMIT * 10)
    assert awake == 0
    # One short wait, and it is worth it again.
    awake, now = wait(poll_policy, now, 10)
    assert awake == 0
    awake, now = wait(poll_policy, now, 10)
    assert awake == 10


def test_rare_events_cost_nothing(poll_policy: BusyPollPolicy) -> None:
    now = 0.0
    for _ in range(100):
        awake, now = wait(poll_policy, now, LIMIT)
        assert awake == 0


def test_waits_of_two_kinds_are_told_apart(poll_policy: BusyPollPolicy) -> None:
    """A client that asks again at once, and a model that takes its time."""
    now = 0.0
    spent = []
    for _ in range(3):
        _, now = wait(poll_policy, now, 10, kind=False)
        awake, now = wait(poll_policy, now, LIMIT * 5, kind=True)
        spent.append(awake)
    assert spent == [0, 0, 0]
    assert wait(poll_policy, now, 10, kind=False)[0] == 10


def test_never() -> None:
    poll_policy = BusyPollPolicy(0.0)
    now = 0.0
    for _ in range(3):
        awake, now = wait(poll_policy, now, 0)
        assert awake == 0


@pytest.mark.parametrize(("usable", "quota", "microseconds"), [(2, 0, 400), (1, 0, 0), (2, 2, 0)])
def test_by_default_nobody_is_kept_from_working(
    monkeypatch: pytest.MonkeyPatch, usable: int, quota: int, microseconds: int
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: usable)
    monkeypatch.setattr(machine, "core_quota", lambda: quota)
    assert limit_of(-1) == microseconds / 1e6
    assert limit_of(50) == 50e-6
    assert limit_of(0) == 0.0
