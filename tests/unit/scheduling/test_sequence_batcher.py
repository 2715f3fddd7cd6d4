"""The sequence batcher: its rules one by one, and any mix of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sequence_owner import US, Owner, asked, half

from doubles import request
from nerite.core.errors import Unavailable
from nerite.core.model_calls import ChildRequest
from nerite.scheduling.decider import BatchingRules, BatchReason
from nerite.scheduling.sequence import SequenceRequest, SequenceRules
from nerite.scheduling.sequence_batcher import MAX_REMEMBERED

DIRECT = SequenceRules("model", 2, 1000)
OLDEST = SequenceRules("model", 2, 1000, BatchingRules(8))
BOTH = pytest.mark.parametrize("rules", [DIRECT, OLDEST], ids=["direct", "oldest"])


def changed(rules: SequenceRules, **fields: Any) -> SequenceRules:
    return SequenceRules(**{name: getattr(rules, name) for name in SequenceRules.__slots__} | fields)


@BOTH
def test_requests_of_a_sequence_run_in_order_and_one_by_one(rules: SequenceRules) -> None:
    of = Owner(rules, 2)
    sent = [asked(5, start=True), asked(5), asked(5, end=True)]
    for each in sent:
        of.offer(each)
    ran = []
    while started := of.choose():
        assert len(started) == 1
        ((instance, batch),) = started.items()
        ran += batch
        of.finish(instance)
    assert ran == sent
    of.check_all_answered()


@BOTH
def test_numbers_and_texts_are_different_ids(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    of.offer(asked(5, start=True))
    assert of.offer(asked("5")) is not None
    of.offer(asked("5", start=True))
    assert len(of.choose()["model_0"]) == 2


@BOTH
def test_who_never_began_is_told_just_that(rules: SequenceRules) -> None:
    refusal = Owner(rules, 1).offer(asked("x"))
    assert refusal is not None
    assert refusal.message == (
        "inference request for sequence x to model 'model' must specify the START flag on the first request of the "
        "sequence"
    )


@BOTH
def test_sequences_spread_over_the_instances(rules: SequenceRules) -> None:
    of = Owner(rules, 2)
    for number in (1, 2, 3):
        of.offer(asked(number, start=True))
    assert [len(batch) for batch in of.choose().values()] == [2, 1]


@BOTH
def test_the_backlog_is_served_in_order(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    for number in range(1, 6):
        of.offer(asked(number, start=True, end=True))
    ran = []
    while started := of.choose():
        ran.append([each.sequence.id for each in started["model_0"] if each])
        of.finish("model_0")
    assert ran == [[1, 2], [3, 4], [5]]


@BOTH
def test_a_request_in_the_backlog_may_say_how_long(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    of.offer(asked(1, start=True, timeout_us=10))
    of.offer(asked(2, start=True))
    of.choose()
    of.finish("model_0")
    of.offer(asked(3, start=True))
    of.offer(asked(3, timeout_us=500))
    assert of.batcher.wake_at() == 500 * US
    of.now = 500 * US - 1
    of.expire()
    of.now += 1
    of.expire()
    assert of.batcher.size == 0
    refusal = of.offer(asked(3))
    assert refusal is not None
    assert refusal.message.endswith(" (sequence 3 ended: one of its requests timed out waiting for a slot)")
    of.check_all_answered()


@BOTH
def test_a_sequence_that_rests_too_long_is_over(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    of.offer(asked(1, start=True))
    of.choose()
    of.now = 5000 * US
    assert of.batcher.wake_at() is None, "what runs is not idle"
    of.finish("model_0")
    assert of.batcher.wake_at() == 6000 * US
    of.now = 6000 * US
    refusal = of.offer(asked(1))
    assert refusal is not None
    assert "it received no request for 1000 µs (max_sequence_idle_microseconds)" in refusal.message
    assert not of.batcher.holds("model_0")


@BOTH
def test_the_backlog_is_never_idle(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    for number in (1, 2, 3):
        of.offer(asked(number, start=True))
    of.choose()
    of.now = 10_000 * US
    of.expire()
    of.finish("model_0")
    of.now += 1000 * US
    of.expire()
    assert [each.sequence.id for each in of.choose()["model_0"] if each] == [3]


@BOTH
def test_start_on_a_live_sequence_begins_it_anew_in_its_place(rules: SequenceRules) -> None:
    of = Owner(rules, 2)
    for each in (asked(1, start=True), asked(1, start=True), asked(1, end=True)):
        of.offer(each)
    for _ in range(3):
        assert list(of.choose()) == ["model_0"]
        of.finish("model_0")
    of.check_all_answered()


@BOTH
def test_start_after_end_waits_until_the_end_has_run(rules: SequenceRules) -> None:
    of = Owner(rules, 2)
    for each in (asked(1, start=True, end=True), asked(1, start=True, end=True), asked(1, start=True)):
        of.offer(each)
    of.cancel(of.accepted[1])
    assert list(of.choose()) == ["model_0"]
    assert of.choose() == {}
    of.finish("model_0")
    assert list(of.choose()["model_0"]) == of.accepted[2:]


@BOTH
def test_cancelling_a_request_that_waits_ends_its_sequence(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    for each in (asked(1, start=True), asked(1), asked(1, end=True)):
        of.offer(each)
    of.choose()
    of.cancel(of.accepted[1])
    assert of.batcher.size == 0
    assert of.batcher.holds("model_0"), "the first one runs"
    of.finish("model_0")
    assert not of.batcher.holds("model_0")
    of.check_all_answered()


@BOTH
def test_cancelling_a_request_that_runs_ends_nothing(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    of.offer(asked(1, start=True))
    of.offer(asked(1))
    of.choose()
    of.cancel(of.accepted[0])
    of.finish("model_0")
    assert of.choose() == {"model_0": of.accepted[1:]}


@BOTH
def test_an_instance_that_dies_takes_its_sequences_with_it_and_no_others(rules: SequenceRules) -> None:
    of = Owner(rules, 2)
    for number in (1, 2, 3, 4, 5):
        of.offer(asked(number, start=True))
        of.offer(asked(number))
    of.choose()
    assert len(of.running["model_0"]) == 2
    of.die("model_0")
    assert [each.message for each in map(of.offer, [asked(1), asked(3)]) if each] == [
        f"inference request for sequence {number} to model 'model' must specify the START flag on the first request of "
        f"the sequence (sequence {number} ended: model_0 died)"
        for number in (1, 3)
    ]
    of.finish("model_1")
    assert {each.sequence.id for each in of.choose()["model_1"] if each} == {2, 4}
    of.come("model_0")
    assert {each.sequence.id for each in of.choose()["model_0"] if each} == {5}
    assert of.offer(asked(1, start=True)) is None


@BOTH
def test_a_sequence_that_had_not_begun_survives_its_instance(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    of.offer(asked(1, start=True))
    of.die("model_0")
    of.come("model_1")
    assert of.choose() == {"model_1": of.accepted}


@BOTH
def test_an_instance_that_leaves_finishes_its_sequences_and_begins_none(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    of.offer(asked(1, start=True))
    of.choose()
    of.come("model_1")
    of.retire("model_0")
    of.finish("model_0")
    assert of.batcher.holds("model_0")
    of.offer(asked(2, start=True))
    of.offer(asked(1, end=True))
    assert set(of.choose()) == {"model_0", "model_1"}
    of.finish("model_0")
    assert of.up == {"model_1"}


@BOTH
def test_what_is_drained_is_over(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    for number in (1, 2, 3):
        of.offer(asked(number, start=True, end=True))
    of.offer(asked(1, start=True))
    of.drain()
    of.check_all_answered()
    assert of.choose() == {}
    assert of.offer(asked(1)) is not None


def test_nothing_starts_before_enough_waits() -> None:
    """The hooks that Triton's tests rely on."""
    of = Owner(changed(DIRECT, hold_until=3, hold_until_backlog=1), 1)
    of.offer(asked(1, start=True))
    of.offer(asked(2, start=True))
    of.offer(asked(2))
    assert of.batcher.choose(0) is None
    of.offer(asked(3, start=True))
    assert len(of.choose()["model_0"]) == 2
    of.finish("model_0")
    assert of.choose()["model_0"][-1] is of.accepted[2], "once is enough"


@BOTH
def test_a_request_may_run_again(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    each = asked(1, start=True, end=True)
    of.offer(each)
    of.choose()
    of.batcher.ended("model_0", [], 7, again=[each])
    assert (of.batcher.size, each.starts, each.queued_ns) == (1, False, 7)
    assert of.batcher.choose(7) == ("model_0", [each])
    of.batcher.ended("model_0", [each], 8)
    assert not of.batcher.holds("model_0")


@BOTH
def test_a_request_that_waits_to_run_again_is_told_that_its_instance_died(rules: SequenceRules) -> None:
    of = Owner(rules, 1)
    each = asked(1, start=True, end=True)
    of.offer(each)
    of.choose()
    of.batcher.ended("model_0", [], 7, again=[each])
    ((told, error),) = of.batcher.remove_instance("model_0", "model_0 died")
    assert told is each
    assert type(error) is Unavailable
    assert error.message == ("inference request to model 'model' was interrupted: model_0 died; send it again")
    assert of.batcher.size == 0


def test_direct_has_a_place_for_each_sequence() -> None:
    of = Owner(changed(DIRECT, slots=4), 1)
    for number in (1, 2, 3):
        of.offer(asked(number, start=True))
    of.choose()
    of.finish("model_0")
    second = asked(2)
    of.offer(second)
    assert of.choose() == {"model_0": [None, second]}
    of.finish("model_0")
    first, third = asked(1, end=True), asked(3)
    of.offer(first)
    of.offer(third)
    assert of.choose() == {"model_0": [first, None, third]}


def test_direct_keeps_other_shapes_back_but_not_for_ever() -> None:
    of = Owner(changed(DIRECT, slots=2), 1)
    small, large = asked(1, start=True, key="small"), asked(2, start=True, key="large")
    of.offer(large)
    of.now += 1
    of.offer(small)
    of.now += 1
    of.offer(asked(2, key="large"))
    assert of.choose() == {"model_0": [large]}
    of.finish("model_0")
    assert of.choose() == {"model_0": [None, small]}


def test_direct_waits_for_enough_slots_and_not_too_long() -> None:
    of = Owner(changed(DIRECT, slots=4, max_delay_us=100, min_utilization=0.5), 1)
    of.offer(asked(1, start=True))
    assert of.choose() == {}
    assert of.batcher.wake_at() == 100 * US
    of.offer(asked(2, start=True))
    assert len(of.choose()["model_0"]) == 2
    of.finish("model_0")
    of.offer(asked(2))
    of.now += 100 * US
    assert len(of.choose()["model_0"]) == 2
    of.finish("model_0")
    of.offer(asked(1))
    assert of.choose() == {}
    of.cancel(of.accepted[-1])
    assert of.batcher.wake_at() == of.now + 1000 * US, "only the other sequence, which rests"
    assert of.batcher.releases == {BatchReason.SLOTS: 1, BatchReason.DELAY: 1, BatchReason.FREE: 0}


def test_oldest_prefers_sizes_and_does_not_wait_too_long() -> None:
    batching = BatchingRules(4, preferred_sizes=(2,), max_delay_us=100)
    of = Owner(changed(OLDEST, slots=4, batching=batching), 1)
    for number in (1, 2, 3):
        of.offer(asked(number, start=True))
    assert len(of.choose()["model_0"]) == 2
    of.finish("model_0")
    assert of.choose() == {}
    assert of.batcher.wake_at() == 100 * US
    of.now = 100 * US
    assert [each.sequence.id for each in of.choose()["model_0"] if each] == [3]
    assert of.batcher.releases == {
        BatchReason.PREFERRED: 1,
        BatchReason.FULL: 0,
        BatchReason.DELAY: 1,
        BatchReason.FREE: 0,
    }


def test_why_batches_begin_is_counted_of_all_instances_those_that_died_too() -> None:
    for rules in (DIRECT, OLDEST):
        of = Owner(changed(rules, slots=1), 2)
        for number in (1, 2):
            of.offer(asked(number, start=True))
        assert len(of.choose()) == 2
        of.die("model_0")
        assert of.batcher.releases[BatchReason.FREE] == sum(of.batcher.releases.values()) == 2


def test_at_a_stop_nobody_waits_for_sequences_that_may_never_end() -> None:
    of = Owner(changed(DIRECT, slots=1), 1)
    of.offer(asked(1, start=True))
    of.choose()
    of.finish("model_0")
    of.offer(asked(2, start=True))
    of.offer(asked(2))
    assert of.batcher.expire(0) == []
    of.batcher.server_stops()
    refused = of.batcher.expire(0)
    assert [each for each, _ in refused] == of.accepted[1:]
    assert {(type(error), error.retry_after) for _, error in refused} == {(Unavailable, 1)}
    assert refused[0][1].message == (
        "Server is stopping, scheduler for model has stopped accepting new inference requests\n"
        "    Model 'model' has no free slot for sequence 2: send it to another server."
    )
    assert of.batcher.size == 0
    refusal = of.batcher.offer(asked(2), 0)
    assert refusal is not None
    assert refusal.message.endswith("(sequence 2 ended: the server stops)")
    assert of.batcher.offer(asked(1), 0) is None, "what has its slot goes on"


def test_at_a_stop_a_sequence_whose_end_is_in_sight_makes_room() -> None:
    of = Owner(changed(DIRECT, slots=1), 1)
    for number in (1, 2, 3):
        of.offer(asked(number, start=True))
    of.choose()
    of.offer(asked(1, end=True))
    of.stop()
    ran = []
    while "model_0" in of.running or of.choose():
        ran += [each.sequence.id for each in of.running["model_0"]]
        of.finish("model_0")
    assert ran == [1, 1, 2], "2 has no end: 3 is refused"
    of.check_all_answered()


def test_at_a_stop_what_another_request_needs_may_wait() -> None:
    of = Owner(changed(DIRECT, slots=1), 1)
    of.offer(asked(1, start=True))
    of.choose()
    parent = request()
    child = SequenceRequest(ChildRequest(parent, asked(2, start=True).header, [], parent.sink, 0))
    of.batcher.offer(child, 0)
    of.batcher.server_stops()
    assert of.batcher.expire(0) == []
    of.batcher.ended("model_0", of.accepted, 0)
    assert of.batcher.expire(of.rules.max_idle_us * US) == []
    assert of.batcher.choose(of.rules.max_idle_us * US) == ("model_0", [child])


def test_at_a_stop_the_next_with_an_id_is_refused_too() -> None:
    of = Owner(changed(DIRECT, slots=1), 1)
    for number in (1, 2, 2):
        of.offer(asked(number, start=True, end=number == 2))
    of.stop()
    of.expire()
    assert (of.batcher.lives(1), of.batcher.lives(2)) == (True, False)
    of.choose()
    of.finish("model_0")
    of.check_all_answered()


def test_at_a_stop_instances_that_are_down_are_waited_for() -> None:
    of = Owner(changed(DIRECT, slots=1), 1)
    of.die("model_0")
    of.offer(asked(1, start=True))
    of.stop()
    of.expire()
    of.come("model_0")
    assert of.choose().keys() == {"model_0"}


def test_not_everything_that_ever_ended_is_remembered() -> None:
    of = Owner(changed(DIRECT, slots=1), 1)
    for number in range(1, MAX_REMEMBERED + 2):
        each = asked(number, start=True)
        assert of.batcher.offer(each, 0) is None
        assert of.batcher.withdraw(each) == [each]
    first, last = (of.batcher.offer(asked(number), 0) for number in (1, MAX_REMEMBERED + 1))
    assert first is not None
    assert last is not None
    assert (first.message.endswith("of the sequence"), last.message.endswith("was cancelled)")) == (True, True)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("offer"),
            st.fixed_dictionaries(
                {"sequence_id": st.integers(1, 5)},
                optional={
                    "start": st.booleans(),
                    "end": st.booleans(),
                    "timeout_us": st.sampled_from([50, 300]),
                    "key": st.sampled_from(["a", "b"]),
                    "tenant": st.sampled_from(["alice", "bob"]),
                },
            ),
        ),
        st.tuples(st.just("begin"), st.integers(1, 5)),
        st.tuples(st.just("choose"), st.none()),
        st.tuples(st.just("finish"), st.integers(0, 2)),
        st.tuples(st.just("pass"), st.sampled_from([1, 40, 100, 900])),
        st.tuples(st.just("wake"), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.just("die"), st.integers(0, 2)),
        st.tuples(st.just("come"), st.none()),
        st.tuples(st.just("retire"), st.integers(0, 2)),
        st.tuples(st.just("drain"), st.none()),
        st.tuples(st.just("stop"), st.none()),
    ),
    min_size=5,
    max_size=60,
)
RULES = st.builds(
    lambda slots, batching, delay, share, share_of: SequenceRules(
        *("model", slots, 1000, batching),
        max_delay_us=delay if batching is None else 0,
        min_utilization=share,
        share_of=share_of,
    ),
    st.integers(1, 3),
    st.sampled_from([None, None, BatchingRules(2), BatchingRules(4, preferred_sizes=(2,), max_delay_us=60)]),
    st.sampled_from([0, 0, 80]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([None, half]),
)


@settings(max_examples=600)
@given(RULES, st.integers(1, 3), OPERATIONS)
@example(
    SequenceRules("model", 1, 1000),
    3,
    [
        ("stop", None), ("begin", 1), ("die", 0), ("die", 0), ("offer", {"sequence_id": 1, "end": True}), ("begin", 1),
        ("retire", 0), ("begin", 1),
    ],
)  # fmt: skip
def test_any_mix_of_rules_and_events(rules: SequenceRules, instances: int, operations: list[tuple[str, Any]]) -> None:
    of = Owner(rules, instances)
    made = instances
    for operation, argument in operations:
        up = sorted(of.up)
        if operation == "offer":
            of.offer(asked(**argument))
        elif operation == "begin":
            of.offer(asked(argument, start=True))
        elif operation == "choose":
            of.choose()
        elif operation == "finish" and of.running:
            of.finish(sorted(of.running)[argument % len(of.running)])
            of.choose()
        elif operation == "pass":
            of.now += argument * US
        elif operation == "wake":
            of.choose()
            of.wake()
            of.choose()
        elif operation == "cancel" and of.accepted:
            of.cancel(of.accepted[argument % len(of.accepted)])
        elif operation == "die" and up:
            of.die(up[argument % len(up)])
        elif operation == "come" and len(up) < 3:
            of.come(f"model_{made}")
            made += 1
        elif operation == "retire" and up:
            of.retire(up[argument % len(up)])
        elif operation == "drain":
            of.drain()
        elif operation == "stop":
            of.stop()
        of.check()
    # What is left ends by itself, if only somebody runs it and time passes.
    of.come(f"model_{made}")
    for _ in range(400):
        of.choose()
        for instance in sorted(of.running):
            of.finish(instance)
        if not of.batcher.size and not of.running and of.batcher.wake_at() is None:
            break
        of.wake()
    assert not any(of.batcher.holds(instance) for instance in of.up)
    of.check_all_answered()
