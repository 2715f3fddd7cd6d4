"""The token bucket: exact over years, never above its burst."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nerite.admission.token_bucket import TokenBucket

S = 1_000_000_000
MINUTE = 60 * S
YEAR = 365 * 24 * 60 * MINUTE


def test_it_is_full_at_first_and_fills_again() -> None:
    bucket = TokenBucket(60, 100, 0)
    assert bucket.level(0) == 100
    bucket.take(100, 0)
    assert bucket.level(S - 1) == 0
    assert bucket.level(S) == 1
    assert bucket.level(MINUTE) == 60
    assert bucket.level(YEAR) == 100


def test_it_says_when_there_will_be_enough() -> None:
    bucket = TokenBucket(90, 90, 0)
    assert bucket.until(90, 0) == 0
    bucket.take(90, 0)
    assert bucket.until(3, 0) == 2 * S
    assert bucket.until(91, 0) is None
    assert TokenBucket(7, 7, 0).until(0, 0) == 0


def test_what_was_used_beyond_is_owed() -> None:
    bucket = TokenBucket(60, 10, 0)
    bucket.take(40, 0)
    assert bucket.level(0) == -30
    assert bucket.until(1, 0) == 31 * S


def test_a_clock_that_stands_or_steps_back_gives_nothing() -> None:
    bucket = TokenBucket(60, 10, S)
    bucket.take(10, S)
    assert bucket.level(0) == 0
    assert bucket.level(2 * S) == 1


def test_another_policy_forgives_nothing() -> None:
    bucket = TokenBucket(60, 100, 0)
    bucket.take(70, 0)
    bucket.change(60, 50, 0)
    assert bucket.level(0) == -20
    bucket.change(120, 200, 0)
    assert bucket.level(0) == 130
    assert bucket.level(S) == 132


@given(st.integers(1, 10**7), st.integers(1, 10**4))
def test_it_loses_nothing_however_often_it_is_asked(per_minute: int, asked: int) -> None:
    often, once = TokenBucket(per_minute, 10**14, 0), TokenBucket(per_minute, 10**14, 0)
    for bucket in (often, once):
        bucket.take(10**14, 0)
    for step in range(0, asked, 97):
        often.level(step * 7_919)
    assert often.level(YEAR + asked) == once.level(YEAR + asked) == per_minute * (YEAR + asked) // MINUTE


@given(
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.lists(st.tuples(st.sampled_from(["take", "give"]), st.integers(0, 10**6), st.integers(0, MINUTE))),
)
def test_it_never_has_more_than_its_burst(per_minute: int, burst: int, acts: list[tuple[str, int, int]]) -> None:
    bucket, now = TokenBucket(per_minute, burst, 0), 0
    for what, count, passed in acts:
        now += passed
        if what == "take":
            bucket.take(count, now)
        else:
            bucket.give_back(count, now)
        assert bucket.level(now) <= burst
        wait = bucket.until(1, now)
        assert wait is not None
        assert TokenBucket.level(bucket, now + wait) >= 1
        now += wait
