"""The dynamic batcher: single rules with their numbers, and any mix of them against a model."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from batcher_model import BatcherModel
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import request
from nerite.core.errors import Unavailable
from nerite.core.request import InferenceRequest
from nerite.scheduling.decider import DYNAMIC, BatchingRules, BatchReason, QueuePolicy
from nerite.scheduling.dynamic_batcher import DynamicBatcher

US = 1000
MS = 1_000_000


def batcher(max_batch_size: int = 8, **rules: Any) -> DynamicBatcher:
    return DynamicBatcher(BatchingRules(max_batch_size, **rules))


def offered(to: DynamicBatcher, *rows: int, now: int = 0, **fields: Any) -> list[InferenceRequest]:
    asked = [request(each, **fields) for each in rows]
    for each in asked:
        assert to.offer(each, now) is None
    return asked


def rows_of(batch: list[InferenceRequest] | None) -> list[int] | None:
    return None if batch is None else [each.header.batch_size for each in batch]


def test_without_a_delay_whatever_waits_runs() -> None:
    of = batcher()
    asked = offered(of, 1, 3, 2)
    assert of.take(0) == asked
    assert of.take(0) is None
    assert of.size == 0


def test_a_batch_is_never_larger_than_allowed() -> None:
    of = batcher(4)
    offered(of, 3, 2, 2, 4, 1)
    assert [rows_of(of.take(0)) for _ in range(5)] == [[3], [2, 2], [4], [1], None]


def test_a_full_batch_is_one_that_nobody_else_can_join() -> None:
    of = batcher(4, max_delay_us=5)
    offered(of, 1, 2)
    assert of.take_full(0) is None
    offered(of, 1, 3)
    assert rows_of(of.take_full(0)) == [1, 2, 1]
    assert of.take_full(0) is None
    offered(of, 2)
    assert rows_of(of.take_full(0)) == [3]
    assert rows_of(of.take(5 * US)) == [2]


def test_a_request_that_fits_no_batch_runs_alone() -> None:
    of = batcher(4)
    offered(of, 1, 9, 1)
    assert [rows_of(of.take(0)) for _ in range(4)] == [[1], [9], [1], None]


def test_a_request_of_no_rows_counts_as_one() -> None:
    of = batcher(4)
    offered(of, *[0] * 6)
    assert [rows_of(of.take(0)) for _ in range(3)] == [[0] * 4, [0] * 2, None]


def test_the_largest_preferred_beginning_runs_at_once() -> None:
    of = batcher(8, preferred_sizes=(2, 4), max_delay_us=1000)
    offered(of, 1, 1, 1, 1, 1)
    assert rows_of(of.take(0)) == [1, 1, 1, 1]
    assert of.size == 1
    assert of.take(0) is None


def test_a_preferred_size_that_is_passed_still_counts() -> None:
    of = batcher(8, preferred_sizes=(2, 7), max_delay_us=1000)
    offered(of, 2, 1)
    assert rows_of(of.take(0)) == [2]
    assert of.take(0) is None


def test_what_would_pass_every_preferred_size_waits_for_the_next_batch() -> None:
    of = batcher(8, preferred_sizes=(4,), max_delay_us=1000)
    offered(of, 3, 2)
    assert rows_of(of.take(0)) == [3]
    assert of.take(0) is None


def test_what_is_not_preferred_waits_as_long_as_the_delay() -> None:
    of = batcher(8, preferred_sizes=(4,), max_delay_us=1000)
    offered(of, 1)
    offered(of, 2, now=500 * US)
    assert of.take(500 * US) is None
    assert of.wake_at(True) == 1000 * US
    assert of.take(1000 * US - 1) is None
    assert rows_of(of.take(1000 * US)) == [1, 2]


def test_after_the_delay_everything_goes_preferred_or_not() -> None:
    of = batcher(8, preferred_sizes=(4,), max_delay_us=1000)
    offered(of, 2, 2, 1)
    assert rows_of(of.take(1000 * US)) == [2, 2, 1]


def test_after_the_delay_no_more_goes_than_fits() -> None:
    of = batcher(4, preferred_sizes=(2,), max_delay_us=1000)
    offered(of, 2, 1, 2)
    assert rows_of(of.take(1000 * US)) == [2, 1]


def test_without_preferred_sizes_the_largest_batch_is_it() -> None:
    of = batcher(4, max_delay_us=1000)
    offered(of, 3)
    assert of.take(0) is None
    offered(of, 1)
    assert rows_of(of.take(0)) == [3, 1]


def test_a_different_shape_ends_the_batch() -> None:
    of = batcher(8, max_delay_us=1000)
    first = offered(of, 1, 1, key="a")
    second = offered(of, 1, key="b")
    third = offered(of, 1, key="a")
    assert of.take(0) == first
    assert of.take(0) == second
    assert of.take(0) is None
    assert of.take(1000 * US) == third


def test_a_different_shape_behind_a_preferred_size_leaves_the_rest() -> None:
    of = batcher(8, preferred_sizes=(2, 8), max_delay_us=1000)
    offered(of, 2, 1, key="a")
    offered(of, 1, key="b")
    assert rows_of(of.take(0)) == [2]
    assert rows_of(of.take(0)) == [1]
    assert of.take(0) is None


def test_higher_priorities_go_first() -> None:
    of = batcher(1, levels=3, default_level=2)
    asked = {priority: offered(of, 1, priority=priority)[0] for priority in (3, 0, 1, 9, 2)}
    assert [of.take(0) for _ in range(5)] == [[asked[priority]] for priority in (1, 0, 9, 2, 3)]


def test_a_higher_priority_overtakes_what_is_gathered() -> None:
    of = batcher(4, preferred_sizes=(4,), max_delay_us=1000, levels=2, default_level=2)
    low = offered(of, 2)
    assert of.take(0) is None
    high = offered(of, 1, now=1, priority=1)
    assert of.take(1) is None
    assert of.take(1000 * US) == high + low


def test_a_middle_priority_goes_between_what_is_gathered() -> None:
    of = batcher(8, max_delay_us=1000, levels=3, default_level=3)
    low, high = offered(of, 1), offered(of, 1, priority=1)
    assert of.take(0) is None
    middle = offered(of, 1, priority=2)
    assert of.take(1000 * US) == high + middle + low


def test_the_delay_counts_from_the_oldest_of_any_priority() -> None:
    of = batcher(4, max_delay_us=1000, levels=2, default_level=2)
    offered(of, 1)
    offered(of, 1, now=900 * US, priority=1)
    assert of.take(900 * US) is None
    assert of.wake_at(True) == 1000 * US


def test_a_full_queue_refuses_with_tritons_text() -> None:
    of = batcher(8, levels=2, default_level=1, policies={1: QueuePolicy(max_size=2)}, max_delay_us=1)
    offered(of, 1, 1)
    refusal = of.offer(request(id="seven"), 0)
    assert isinstance(refusal, Unavailable)
    assert refusal.message == "[request id: seven] Exceeds maximum queue size"
    refusal = of.offer(request(), 0)
    assert refusal is not None
    assert refusal.message == "[request id: <id_unknown>] Exceeds maximum queue size"
    offered(of, 1, 1, 1, priority=2)
    assert of.size == 5


def test_what_is_gathered_still_takes_a_place_in_the_queue() -> None:
    of = batcher(8, default_policy=QueuePolicy(max_size=1), max_delay_us=1000)
    offered(of, 1)
    assert of.take(0) is None
    assert of.offer(request(), 0) is not None
    assert of.take(1000 * US) is not None
    offered(of, 1)


def test_expiry_is_exact() -> None:
    of = batcher(8, default_policy=QueuePolicy(timeout_us=100))
    asked = offered(of, 1)
    assert of.timed
    assert of.wake_at(True) == of.wake_at(False) == 100 * US
    assert of.expire(100 * US - 1) == []
    assert of.expire(100 * US) == asked
    assert (of.size, of.take(100 * US), of.wake_at(True)) == (0, None, None)


def test_an_override_only_shortens() -> None:
    policy = QueuePolicy(timeout_us=100, allow_override=True)
    of = batcher(8, default_policy=policy)
    short, long, none = (offered(of, 1, timeout_us=timeout)[0] for timeout in (10, 500, 0))
    assert of.expire(10 * US) == [short]
    assert of.expire(100 * US) == [long, none]


def test_an_override_of_no_timeout_never_counts() -> None:
    of = batcher(8, default_policy=QueuePolicy(allow_override=True))
    offered(of, 1, timeout_us=10)
    assert not of.timed
    assert of.wake_at(True) is None
    assert of.expire(10**15) == []


def test_what_is_late_goes_last_of_its_level() -> None:
    delay = QueuePolicy(timeout_us=100, delay_on_timeout=True)
    of = batcher(1, levels=2, default_level=1, default_policy=delay)
    late = offered(of, 1, 1)
    low = offered(of, 1, priority=2)
    assert of.expire(100 * US) == []
    in_time = offered(of, 1, now=100 * US)
    assert [of.take(100 * US) for _ in range(4)] == [in_time, [late[0]], [late[1]], low]
    assert of.wake_at(True) is None


def test_the_late_still_count_in_their_queue() -> None:
    of = batcher(8, default_policy=QueuePolicy(timeout_us=100, delay_on_timeout=True, max_size=1))
    offered(of, 1)
    of.expire(100 * US)
    assert of.offer(request(), 100 * US) is not None


def test_withdrawing_lets_the_rest_go_on() -> None:
    of = batcher(8, preferred_sizes=(2,), max_delay_us=1000)
    first, second = offered(of, 1, 4)
    third = offered(of, 2)[0]
    assert of.withdraw(second)
    assert not of.withdraw(second)
    assert of.size == 2
    assert of.take(0) == [first]
    assert of.take(0) == [third]
    assert not of.withdraw(first)
    assert not of.withdraw(request())


def test_withdrawing_what_is_gathered() -> None:
    of = batcher(8, max_delay_us=1000)
    first = offered(of, 1)[0]
    second = offered(of, 1, now=600 * US)[0]
    assert of.take(600 * US) is None
    assert of.withdraw(first)
    assert of.take(1000 * US) is None
    assert of.wake_at(True) == 1600 * US
    assert of.take(1600 * US) == [second]


def test_drain_gives_everything_in_order() -> None:
    of = batcher(8, max_delay_us=1000, levels=2, default_level=2, default_policy=QueuePolicy(timeout_us=100))
    low = offered(of, 1, 1)
    assert of.take(0) is None
    high = offered(of, 1, priority=1)
    assert of.drain() == high + low
    assert (of.size, of.take(10**12), of.wake_at(True), of.expire(10**12)) == (0, None, None, [])


def test_held_until_enough_wait_and_then_never_again() -> None:
    of = batcher(8, hold_until=3)
    asked = offered(of, 1, 1)
    assert of.take(0) is None
    asked += offered(of, 1)
    assert of.take(0) == asked
    assert of.take(0) is None
    last = offered(of, 1)
    assert of.take(0) == last


def test_without_a_free_instance_only_expiry_matters() -> None:
    """A batch that is overdue but cannot run must not keep anybody awake."""
    of = batcher(8, max_delay_us=1000)
    offered(of, 1)
    assert of.take(0) is None
    assert of.wake_at(True) == 1000 * US
    assert of.wake_at(False) is None
    timed = batcher(8, max_delay_us=1000, default_policy=QueuePolicy(timeout_us=5000))
    offered(timed, 1)
    assert timed.take(0) is None
    assert timed.wake_at(True) == 1000 * US
    assert timed.wake_at(False) == 5000 * US


def test_the_youngest_of_the_lowest_priority_gives_way() -> None:
    of = batcher(levels=3, default_level=2)
    high, default, low, younger = (request(priority=each) for each in (1, 0, 3, 3))
    for each in (low, high, younger, default):
        of.offer(each, 0)
    assert of.displace(request(priority=3)) is None
    assert of.displace(request()) is younger
    assert of.displace(request(priority=1)) is low
    assert of.displace(request(priority=2)) is None
    assert of.displace(request(priority=1)) is default
    assert of.displace(request(priority=1)) is None
    assert of.take(0) == [high]


def test_nobody_gives_way_without_priorities() -> None:
    of = batcher()
    offered(of, 1, priority=5)
    assert of.displace(request(priority=1)) is None


class Payload(bytearray):
    """Tensor bytes whose end can be watched."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("policy", [QueuePolicy(), QueuePolicy(timeout_us=60_000_000)])
@pytest.mark.parametrize("early", ["withdrawn", "taken", "expired"])
def test_requests_that_left_are_not_kept(policy: QueuePolicy, early: str) -> None:
    """An instance is busy for long, and callers give up and ask again: the memory of their tensors must come back."""
    if early == "expired":
        policy = QueuePolicy(timeout_us=10, delay_on_timeout=False)
    of = batcher(1, levels=2, default_level=1, default_policy=policy)
    offered(of, 1)
    live: weakref.WeakSet[Any] = weakref.WeakSet()
    now = 0
    most = 0
    for _ in range(1000):
        payload = Payload(4)
        live.add(payload)
        asked = request(priority=1 if early == "taken" else 2)
        asked.data = [payload]
        del payload
        of.offer(asked, now)
        if early == "withdrawn":
            assert of.withdraw(asked)
        elif early == "taken":
            assert of.take(now) is not None
        else:
            now += 11 * US
            of.expire(now)
        del asked
        most = max(most, len(live))
    assert most < 300


@pytest.mark.parametrize("policy", [QueuePolicy(), QueuePolicy(timeout_us=60_000_000)])
def test_an_empty_queue_keeps_no_request(policy: QueuePolicy) -> None:
    """No later request may come that would drop what callers gave up, whose tensors may be a client's GPU memory."""
    of = batcher(1, default_policy=policy)
    asked = offered(of, 1, 1, 1)
    live: weakref.WeakSet[Any] = weakref.WeakSet()
    for each in asked:
        each.data = [Payload(4)]
        live.add(each.data[0])
    del each
    while asked:
        assert of.withdraw(asked.pop())
    assert not live
    later = offered(of, 1)
    assert of.take(0) == later


# Any mix against the model.

POLICIES = st.builds(
    QueuePolicy,
    timeout_us=st.sampled_from((0, 0, 3, 10)),
    allow_override=st.booleans(),
    delay_on_timeout=st.booleans(),
    max_size=st.sampled_from((0, 0, 1, 3)),
)


@st.composite
def rules(draw: st.DrawFn) -> BatchingRules:
    max_batch_size = draw(st.integers(1, 6))
    levels = draw(st.sampled_from((0, 0, 1, 3)))
    return BatchingRules(
        max_batch_size,
        preferred_sizes=tuple(draw(st.lists(st.integers(1, max_batch_size), max_size=3, unique=True))),
        max_delay_us=draw(st.sampled_from((0, 5, 20))),
        levels=levels,
        default_level=draw(st.integers(1, levels)) if levels else 0,
        default_policy=draw(POLICIES),
        policies=draw(st.dictionaries(st.integers(1, levels), POLICIES)) if levels else {},
        hold_until=draw(st.sampled_from((0, 0, 0, 2, 4))),
    )


OFFERS = st.fixed_dictionaries(
    {
        "rows": st.sampled_from((1, 1, 1, 2, 3, 0)),
        "priority": st.integers(0, 4),
        "timeout_us": st.sampled_from((0, 0, 1, 4, 50)),
        "key": st.sampled_from((None, None, None, "other")),
    }
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), OFFERS),
        st.tuples(st.just("offer"), OFFERS),
        st.tuples(st.just("offer"), OFFERS),
        st.tuples(st.just("pass"), st.integers(0, 12)),
        st.tuples(st.just("pass until woken"), st.none()),
        st.tuples(st.just("take"), st.none()),
        st.tuples(st.just("take"), st.none()),
        st.tuples(st.just("take full"), st.none()),
        st.tuples(st.just("expire"), st.none()),
        st.tuples(st.just("withdraw"), st.integers(0, 40)),
        st.tuples(st.just("give way"), st.integers(0, 4)),
        st.tuples(st.just("drain"), st.none()),
    ),
    min_size=5,
    max_size=45,
)


@settings(max_examples=400)
@given(rules(), OPERATIONS)
def test_any_mix_of_rules_and_events(rules: BatchingRules, operations: list[tuple[str, Any]]) -> None:
    real, model = DynamicBatcher(rules), BatcherModel(rules)
    now = 0
    asked: list[InferenceRequest] = []
    left: list[InferenceRequest] = []
    for operation, argument in operations:
        if operation == "offer":
            each = request(argument.pop("rows") if "rows" in argument else 1, **argument)
            asked.append(each)
            refusal = real.offer(each, now)
            assert (refusal is None) == model.offer(each, now)
            if refusal is not None:
                left.append(each)
        elif operation == "pass":
            now += argument * US
        elif operation == "pass until woken":
            now = max(now, real.wake_at(True) or now)
        elif operation == "expire":
            refused = real.expire(now)
            assert refused == model.expire(now)
            left += refused
        elif operation == "take":
            # As the owner does it: first what is over, then what is next; and if there is nothing, when to ask again.
            refused = real.expire(now)
            assert refused == model.expire(now)
            ready = real.due(now)
            batch = real.take(now)
            expected, due = model.take(now)
            assert batch == expected
            assert ready == (batch is not None)
            left += refused + (batch or [])
            if batch is None:
                moments = [moment for moment in (due, model.next_deadline()) if moment is not None]
                assert real.wake_at(True) == min(moments, default=None)
        elif operation == "take full":
            batch = real.take_full(now)
            assert batch == model.take_full(now)
            left += batch or []
        elif operation == "withdraw" and asked:
            each = asked[argument % len(asked)]
            withdrawn = real.withdraw(each)
            assert withdrawn == model.withdraw(each)
            if withdrawn:
                left.append(each)
        elif operation == "give way":
            least = real.displace(request(priority=argument))
            assert least is model.displace(request(priority=argument))
            if least is not None:
                left.append(least)
        elif operation == "drain":
            drained = real.drain()
            assert drained == model.drain()
            left += drained
        assert real.size == len(model.waiting)
        assert real.wake_at(False) == model.next_deadline()
    left += real.drain()
    assert len(left) == len(asked)
    assert set(map(id, left)) == set(map(id, asked))


def test_each_batch_has_a_reason() -> None:
    of = batcher(4, preferred_sizes=(2,), max_delay_us=1000)
    offered(of, 1, 1)
    assert rows_of(of.take(0)) == [1, 1]
    offered(of, 1)
    assert of.take(0) is None, "nothing is counted where nothing begins"
    assert rows_of(of.take(1000 * US)) == [1]
    offered(of, 3, 2)
    assert rows_of(of.take(0)) == [3]
    at_once = batcher(4)
    offered(at_once, 1)
    assert rows_of(at_once.take(0)) == [1]
    assert of.releases == {BatchReason.PREFERRED: 1, BatchReason.DELAY: 1, BatchReason.FULL: 1, BatchReason.FREE: 0}
    assert at_once.releases == {**dict.fromkeys(DYNAMIC, 0), BatchReason.FREE: 1}


def test_how_many_wait_by_priority() -> None:
    of = batcher(4, levels=3, default_level=2)
    offered(of, 1, 1, priority=1)
    offered(of, 1)
    assert of.waiting == {1: 2, 2: 1}
    assert of.take(0) is not None
    assert of.waiting == {1: 0, 2: 0}
    assert batcher().waiting == {0: 0}
