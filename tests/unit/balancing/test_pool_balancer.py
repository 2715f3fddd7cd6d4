"""Which member of a pool gets a request, by work, readiness and policy."""

from __future__ import annotations

from collections import Counter

import pytest
from pools import SECOND, answered, drain, load_of, members, picked, pool, sent

from nerite.balancing.member import AttemptEnd, LoadReport, Member, RoutedRequest, ServerKind
from nerite.balancing.policy import ChoicePolicy, EjectionPolicy, PoolPolicy
from nerite.balancing.pool_balancer import NoMember, PoolBalancer
from nerite.core.errors import InvalidArgument

TENSORS = RoutedRequest("m")


def text(answer: float, prompt: float = 0.0) -> RoutedRequest:
    return RoutedRequest("llm", prompt_tokens=prompt, answer_tokens=answer)


def refusal(balancer: PoolBalancer, request: RoutedRequest = TENSORS, **how: object) -> NoMember:
    found = balancer.pick(request, 0, **how)  # type: ignore[arg-type]
    assert isinstance(found, NoMember), found
    return found


def test_the_member_with_the_least_work_gets_the_request() -> None:
    balancer = pool(3)
    for answer in (100.0, 10.0, 50.0):
        sent(balancer, text(answer))
    assert sent(balancer, text(1.0)).work == 1.0
    assert sorted(load.work for load in balancer.members) == [11.0, 50.0, 100.0]
    assert picked(balancer, TENSORS).reason == "least_work"


def test_twice_the_capacity_gets_twice_the_requests() -> None:
    balancer = PoolBalancer("p")
    balancer.set_members([Member("small", "a:1"), Member("large", "b:1", capacity=2.0)])
    for name in ("small", "large"):
        balancer.set_ready(name, True)
    counts = Counter(sent(balancer, text(10.0)).member.name for _ in range(300))
    assert counts == {"small": 100, "large": 200}


def test_members_without_work_take_turns() -> None:
    balancer = pool(3)
    names = []
    for _ in range(6):
        attempt = sent(balancer, TENSORS)
        names.append(attempt.member.name)
        answered(balancer, attempt)
    assert sorted(names[:3]) == sorted(names[3:]) == ["m0", "m1", "m2"]


def test_an_answer_that_comes_makes_room() -> None:
    balancer = pool(2)
    first, second = sent(balancer, text(100.0)), sent(balancer, text(90.0))
    balancer.progress(first, 60.0, SECOND)
    assert first.work == 40.0
    assert picked(balancer, TENSORS).member == first.member
    balancer.progress(first, 1000.0, SECOND)
    assert 0 < first.work < 40.0, "an answer that is longer than expected still has something to come"
    answered(balancer, second)
    assert load_of(balancer, second.member.name).work == 0.0


def test_the_first_part_of_an_answer_ends_the_work_for_the_prompt() -> None:
    balancer = pool(1, PoolPolicy(prefill_weight=0.5))
    attempt = sent(balancer, text(100.0, prompt=1000.0))
    assert attempt.work == 600.0
    balancer.progress(attempt, 10.0, 0)
    assert attempt.work == 90.0


def test_answers_are_expected_to_be_as_long_as_those_before_and_no_longer_than_allowed() -> None:
    balancer = pool(1)
    for _ in range(20):
        attempt = sent(balancer, RoutedRequest("llm", prompt_tokens=10.0))
        balancer.progress(attempt, 300.0, 0)
        answered(balancer, attempt)
    assert sent(balancer, RoutedRequest("llm")).work == pytest.approx(300.0)
    assert sent(balancer, RoutedRequest("llm", answer_limit=64.0)).work == 64.0
    assert sent(balancer, RoutedRequest("another", answer_limit=64.0)).work == 1.0


def test_who_is_not_ready_or_does_not_serve_the_model_gets_nothing_and_who_drains_only_without_others() -> None:
    balancer = pool(4)
    balancer.set_ready("m0", False)
    drain(balancer, "m1")
    balancer.set_ready("m2", True, {"another"})
    assert picked(balancer, TENSORS).member.name == "m3"
    assert {picked(balancer, RoutedRequest("another")).member.name for _ in range(4)} == {"m2", "m3"}
    balancer.set_ready("m3", False)
    assert picked(balancer, TENSORS).member.name == "m1"
    balancer.set_ready("m1", False)
    assert refusal(balancer) == NoMember(503, "no member of pool 'p' is ready for model 'm'")


def test_discovery_says_who_drains() -> None:
    balancer = pool(2)
    first, second = members(2)
    balancer.set_members([first._replace(drain=True), second])
    assert {picked(balancer, TENSORS).member.name for _ in range(4)} == {second.name}
    balancer.set_members([first, second])
    assert {picked(balancer, TENSORS).member.name for _ in range(4)} == {first.name, second.name}


def test_a_member_that_its_description_drains_keeps_what_it_has() -> None:
    balancer = pool(2)
    attempt = sent(balancer, RoutedRequest("m", sequence="s", sequence_start=True))
    name = attempt.member.name
    balancer.set_members([each._replace(drain=each.name == name) for each in members(2)])
    assert {sent(balancer, TENSORS).member.name for _ in range(4)} == {"m0", "m1"} - {name}
    assert picked(balancer, RoutedRequest("m", sequence="s")).member.name == name
    answered(balancer, attempt)
    balancer.set_members(members(2))
    assert picked(balancer, TENSORS).member.name == name


def test_others_are_named_as_fallbacks_and_none_of_those_that_failed() -> None:
    balancer = pool(3)
    choice = picked(balancer, TENSORS)
    assert {choice.member, *choice.fallbacks} == set(members(3))
    again = picked(balancer, TENSORS, tried=[choice.member.name])
    assert choice.member not in (again.member, *again.fallbacks)
    assert refusal(balancer, tried=["m0", "m1", "m2"]).text == (
        "every ready member of pool 'p' has failed this request: m0, m1, m2"
    )


def test_a_subset_is_kept_to() -> None:
    balancer = pool(4)
    assert {picked(balancer, TENSORS, subset=["m1", "m3", "x"]).member.name for _ in range(9)} == {"m1", "m3"}
    found = refusal(balancer, subset=["x"])
    assert found == NoMember(503, "no member of the ones that were named of pool 'p' is ready for model 'm'")


def test_members_are_full_at_their_limit() -> None:
    balancer = pool(2, PoolPolicy(max_requests=2.0))
    attempts = [sent(balancer, TENSORS) for _ in range(4)]
    found = refusal(balancer)
    assert (found.status, found.text) == (429, "all ready members of pool 'p' are full: 2, by max-requests")
    answered(balancer, attempts[0])
    assert picked(balancer, TENSORS).member == attempts[0].member


def test_round_robin() -> None:
    balancer = pool(3, PoolPolicy(choice=ChoicePolicy.ROUND_ROBIN))
    names = [sent(balancer, text(1000.0 if turn % 3 else 1.0)).member.name for turn in range(7)]
    assert names == [*names[:3], *names[:3], names[0]]
    assert sorted(names[:3]) == ["m0", "m1", "m2"]


def test_the_load_of_other_servers_is_not_known_so_two_are_compared() -> None:
    balancer = pool(8, kind=ServerKind.VLLM)
    for member in members(7, kind=ServerKind.VLLM):
        balancer.begin(text(1000.0), member, 0)
    choices = [picked(balancer, TENSORS) for _ in range(200)]
    assert {choice.reason for choice in choices} == {"power_of_two"}
    # The one without work wins whenever it is drawn.
    assert 30 < sum(load_of(balancer, each.member.name).work == 0 for each in choices) < 75


@pytest.mark.parametrize("running", [0.0, 5.0])
def test_a_server_that_reports_its_load_is_known_for_a_while(running: float) -> None:
    balancer = pool(3, kind=ServerKind.VLLM)
    for number in range(3):
        balancer.report(f"m{number}", LoadReport(waiting=0.0, running=running), SECOND)
    reasons = [picked(balancer, TENSORS, seconds * SECOND).reason for seconds in range(2, 60)]
    assert (reasons[0], reasons[-1]) == ("least_work", "power_of_two")


def test_work_of_others_is_what_a_member_reports_beyond_ours() -> None:
    balancer = pool(2)
    ours = [sent(balancer, text(100.0)) for _ in range(4)]
    for _ in range(30):
        balancer.report("m0", LoadReport(waiting=6.0, running=2.0), SECOND)
        balancer.report("m1", LoadReport(waiting=0.0, running=2.0), SECOND)
    assert load_of(balancer, "m0").others == pytest.approx(600.0, rel=0.01)
    assert load_of(balancer, "m1").others == 0.0
    assert {sent(balancer, text(100.0), SECOND).member.name for _ in range(5)} == {"m1"}
    for attempt in ours:
        answered(balancer, attempt, SECOND)
    # Nobody confirms it: with time it counts less.
    picked(balancer, TENSORS, 11 * SECOND)
    assert load_of(balancer, "m0").others == pytest.approx(600.0 / 2**5, rel=0.01)


def test_a_report_without_counts_says_nothing_of_others() -> None:
    balancer = pool(1)
    balancer.report("m0", LoadReport(kv_used=0.9), SECOND)
    assert load_of(balancer, "m0").others == 0.0
    assert load_of(balancer, "m0").report.kv_used == 0.9


def test_what_is_under_way_at_a_member_that_left_goes_on() -> None:
    balancer = pool(2)
    attempts = [sent(balancer, text(50.0)) for _ in range(2)]
    balancer.set_members(members(1))
    for attempt in attempts:
        balancer.progress(attempt, 10.0, 0)
        answered(balancer, attempt)
        answered(balancer, attempt)
    assert [load.work for load in balancer.members] == [0.0]
    assert picked(balancer, TENSORS).member.name == "m0"


def test_a_member_at_another_address_is_another_one() -> None:
    balancer = pool(1)
    sent(balancer, text(50.0))
    balancer.set_members([Member("m0", "10.9.9.9:8000")])
    (load,) = balancer.members
    assert (load.work, load.ready, load.member.http) == (0.0, False, "10.9.9.9:8000")


def test_a_failing_member_is_left_out_until_it_may_try_again() -> None:
    balancer = pool(3, PoolPolicy(ejection=EjectionPolicy(consecutive_failures=3, base_ejection=5.0)))
    while not load_of(balancer, "m0").ejected:
        attempt = sent(balancer, TENSORS, SECOND)
        how = AttemptEnd.FAILED if attempt.member.name == "m0" else AttemptEnd.ANSWERED
        balancer.end(attempt, how, None, SECOND)
    assert {picked(balancer, TENSORS, 2 * SECOND).member.name for _ in range(6)} == {"m1", "m2"}
    # Better one that may fail than none.
    assert picked(balancer, TENSORS, 2 * SECOND, tried=["m1", "m2"]).member.name == "m0"
    assert {picked(balancer, TENSORS, 7 * SECOND).member.name for _ in range(6)} == {"m0", "m1", "m2"}


def test_refusals_and_cancellations_eject_nobody() -> None:
    balancer = pool(2)
    for _ in range(100):
        balancer.end(sent(balancer, TENSORS), AttemptEnd.REFUSED, None, 0)
        balancer.end(sent(balancer, TENSORS), AttemptEnd.CANCELLED, None, 0)
    assert balancer.outliers.ejections == 0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("load_factor", 0.5, "load-factor is 0.5: it must be from 1 to 100"),
        ("retry_share", 2.0, "retry-share is 2: it must be from 0 to 1"),
        ("prefill_weight", float("nan"), "prefill-weight is nan: it must be from 0 to 100"),
    ],
)
def test_settings_without_meaning_are_refused(field: str, value: float, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        PoolPolicy(**{field: value})  # type: ignore[arg-type]
