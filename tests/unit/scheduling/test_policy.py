from hypothesis import given
from hypothesis import strategies as st

from nerite.scheduling.decider import BatchingRules, QueuePolicy


def test_a_queue_without_a_policy_keeps_everything_for_ever() -> None:
    assert QueuePolicy() == QueuePolicy(timeout_us=0, allow_override=False, delay_on_timeout=False, max_size=0)
    assert QueuePolicy().timeout_for(5) == 0


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_an_override_only_shortens_a_timeout_that_there_is(default: int, asked: int) -> None:
    allowed = QueuePolicy(timeout_us=default, allow_override=True).timeout_for(asked)
    assert allowed == (asked if 0 < asked < default else default)
    assert QueuePolicy(timeout_us=default).timeout_for(asked) == default


def test_a_priority_out_of_range_is_the_default() -> None:
    rules = BatchingRules(8, levels=3, default_level=2)
    assert [rules.level_of(priority) for priority in (0, 1, 2, 3, 4, 2**63)] == [2, 1, 2, 3, 2, 2]


def test_without_levels_every_priority_is_the_same() -> None:
    assert {BatchingRules(8).level_of(priority) for priority in (0, 1, 5)} == {0}


def test_a_level_without_a_policy_has_the_default_one() -> None:
    default, own = QueuePolicy(max_size=1), QueuePolicy(max_size=2)
    rules = BatchingRules(8, levels=2, default_level=1, default_policy=default, policies={2: own})
    assert rules.policy_of(1) is default
    assert rules.policy_of(2) is own
