"""Requests that arrive slowly, with a clock of the test's own."""

from __future__ import annotations

from nerite.transports.limits import PROGRESS, ArrivalTimeout


def test_nothing_arrives_for_as_long_as_it_likes() -> None:
    patience = ArrivalTimeout()
    assert not any(patience.exhausted(None, now, 60) for now in range(0, 1000, 10))


def test_a_request_that_stands_still() -> None:
    patience = ArrivalTimeout()
    assert [patience.exhausted((1, 100), now, 60) for now in (0, 59, 60)] == [False, False, True]


def test_a_byte_now_and_then_is_no_progress() -> None:
    patience = ArrivalTimeout()
    assert [patience.exhausted((1, now // 10), now, 60) for now in (0, 30, 59, 60)] == [False, False, False, True]


def test_a_slow_request_may_take_its_time() -> None:
    patience = ArrivalTimeout()
    assert not any(patience.exhausted((1, turn * PROGRESS), turn * 59.0, 60) for turn in range(20))


def test_each_request_has_the_whole_time() -> None:
    patience = ArrivalTimeout()
    assert not patience.exhausted((1, 100), 0, 60)
    assert not patience.exhausted((2, 100), 60, 60)
    assert not patience.exhausted(None, 90, 60)
    assert not patience.exhausted((3, 100), 130, 60)
    assert patience.exhausted((3, 200), 190, 60)


def test_what_is_thrown_away_counts_backwards() -> None:
    patience = ArrivalTimeout()
    assert not patience.exhausted((1, -100_000), 0, 60)
    assert not patience.exhausted((1, -50_000), 60, 60)
    assert patience.exhausted((1, -49_000), 120, 60)
