from hypothesis import given
from hypothesis import strategies as st

from nerite.scheduling.backoff import ExponentialBackoff


def test_the_first_failure_is_tried_again_at_once_the_next_ones_after_doubled_waits() -> None:
    backoff = ExponentialBackoff(first=0.1, limit=1.0)
    assert [backoff.failed(now) for now in range(7)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_after_a_quiet_while_it_begins_again() -> None:
    backoff = ExponentialBackoff(first=0.1, limit=1.0, quiet=60.0)
    assert [backoff.failed(now) for now in (5.0, 6.0, 7.0)] == [0.0, 0.1, 0.2]
    assert backoff.failed(67.0) == 0.4
    assert [backoff.failed(now) for now in (127.5, 128.0)] == [0.0, 0.1]


@given(st.lists(st.floats(0, 1000), max_size=200))
def test_waits_are_bounded_however_often_it_fails(pauses: list[float]) -> None:
    backoff = ExponentialBackoff(first=0.1, limit=30.0)
    now = 0.0
    for pause in pauses:
        now += pause
        assert 0.0 <= backoff.failed(now) <= 30.0


def test_a_thousand_failures_wait_the_limit() -> None:
    backoff = ExponentialBackoff()
    waits = [backoff.failed(0.0) for _ in range(2000)]
    assert waits[-1] == 30.0
    assert waits == sorted(waits)
