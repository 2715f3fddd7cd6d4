"""Prompts, sessions, adapters and sequences that keep to members, within bounds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pools import SECOND, answered, drain, load_of, picked, pool, prompt, sent

from nerite.balancing.member import AttemptEnd, LoadReport, Member, RoutedRequest, ServerKind
from nerite.balancing.policy import PoolPolicy
from nerite.balancing.pool_balancer import NoMember, PoolBalancer

SYSTEM = b"You are a helpful assistant of a large bank. " * 100


def document(number: int) -> bytes:
    return SYSTEM + b"Document %d. " % number * 400


def sequence(name: str, **fields: Any) -> RoutedRequest:
    return RoutedRequest("stateful", sequence=name, **fields)


def refusal(balancer: PoolBalancer, request: RoutedRequest, now_ns: int = 0) -> NoMember:
    found = balancer.pick(request, now_ns)
    assert isinstance(found, NoMember), found
    return found


def test_a_prompt_goes_where_its_beginning_was() -> None:
    balancer = pool(4)
    homes = {}
    for number in range(12):
        attempt = sent(balancer, prompt(b"Document %d. " % number * 400))
        homes[number] = attempt.member.name
        answered(balancer, attempt)
    assert len(set(homes.values())) > 1
    for number, home in homes.items():
        choice = picked(balancer, prompt(b"Document %d. " % number * 400 + b"And what about question two? " * 20))
        assert (choice.member.name, choice.reason) == (home, "prefix")


def test_what_is_cached_is_no_work() -> None:
    balancer = pool(1)
    first = sent(balancer, prompt(document(1)))
    second = sent(balancer, prompt(document(1)))
    assert first.work == pytest.approx(0.25 * len(document(1)) / 4 + 100.0)
    assert 100.0 <= second.work < 100.0 + 0.25 * len(document(1)) / 4 / 5


def test_the_same_prompt_for_another_model_is_not_cached() -> None:
    balancer = pool(2)
    sent(balancer, prompt(document(1)))
    other = prompt(document(1))._replace(model="other", prefix=(1, 2, 3), prefix_tokens=(1.0, 2.0, 3.0))
    assert picked(balancer, other).reason == "least_cached"


def test_a_hot_prompt_spreads_over_the_members() -> None:
    balancer = pool(4)
    counts = Counter(sent(balancer, prompt(document(1))).member.name for _ in range(400))
    assert max(counts.values()) <= 1.25 * 100 + 10
    assert len(counts) == 4


def test_what_half_of_all_requests_ask_for_gets_half_of_the_members() -> None:
    """Before the member that has it is overloaded; and what is asked for as often as others stays where it is."""
    balancer = pool(4)
    homes: dict[int, set[str]] = {}
    for turn in range(200):
        attempts = [sent(balancer, prompt(document(1000 + turn)))]
        for number in (0, 1 + turn % 20, 0):
            attempts.append(sent(balancer, prompt(document(number))))
            homes.setdefault(number, set()).add(attempts[-1].member.name)
        for attempt in attempts:
            answered(balancer, attempt)
    assert len(homes.pop(0)) == 2
    assert {len(names) for names in homes.values()} == {1}, homes


@pytest.mark.parametrize("kind", [ServerKind.NERITE, ServerKind.VLLM])
def test_caches_fill_evenly_where_prompts_return(kind: ServerKind) -> None:
    """However long the answers are that members have under way."""
    balancer = pool(4, kind=kind)
    homes = Counter[str]()
    for number in range(60):
        text = SYSTEM[:2000] + b"Document %d. " % (100 + number) * 400
        attempt = sent(balancer, prompt(text, answer=200.0 if number % 3 else 10.0))
        homes[attempt.member.name] += 1
        for _ in range(3):
            answered(balancer, sent(balancer, prompt(text)))
        answered(balancer, attempt)
    assert set(homes.values()) == {15}


def test_a_member_that_has_restarted_gets_new_prompts_within_the_bound_of_load() -> None:
    balancer = pool(3)
    for number in range(30):
        answered(balancer, sent(balancer, prompt(document(number))))
    balancer.restarted("m1")
    fresh = [sent(balancer, prompt(document(100 + number))).member.name for number in range(12)]
    assert fresh[0] == "m1"
    assert len(set(fresh)) == 3


def test_a_beginning_that_all_have_does_not_attract() -> None:
    """Where only the system prompt is known, work decides, but for what the system prompt saves."""
    balancer = pool(4)
    for number in range(400):
        sent(balancer, prompt(document(number)))
    works = [load.work for load in balancer.members]
    assert max(works) <= 1.1 * min(works)


def test_routers_that_share_members_send_prompts_to_the_same_ones() -> None:
    routers = [pool(5) for _ in range(3)]
    common = prompt(SYSTEM)
    for place, router in enumerate(routers):
        for number in range(place):
            answered(router, sent(router, prompt(document(100 + number)), SECOND), SECOND)
        # Most requests are those of others, on all members alike.
        for _ in range(20):
            for name in ("m0", "m1", "m2", "m3", "m4"):
                router.report(name, LoadReport(waiting=0.0, running=50.0), SECOND)
        picked(router, common, 2 * SECOND)
        answered(router, sent(router, common, 2 * SECOND))
    homes = []
    for number in range(30):
        choices = [sent(router, prompt(document(number)), 2 * SECOND) for router in routers]
        homes.append(len({each.member.name for each in choices}))
        assert all(picked(router, prompt(document(number)), 2 * SECOND).reason == "prefix" for router in routers)
        for router, attempt in zip(routers, choices, strict=True):
            answered(router, attempt, 2 * SECOND)
    assert homes == [1] * 30
    session = RoutedRequest("llm", prompt_tokens=40.0, session="s")
    assert len({picked(router, session, 2 * SECOND).member.name for router in routers}) == 1


def test_without_prefix_affinity_work_alone_decides() -> None:
    balancer = pool(2, PoolPolicy(prefix=False))
    for _ in range(6):
        attempt = sent(balancer, prompt(document(1)))
        assert attempt.work > 1000.0 / 4
        answered(balancer, attempt)
    assert balancer.index_bytes == 0


def test_a_restarted_member_has_nothing_cached() -> None:
    balancer = pool(3)
    attempt = sent(balancer, prompt(document(1)))
    answered(balancer, attempt)
    assert picked(balancer, prompt(document(1))).reason == "prefix"
    balancer.restarted(attempt.member.name)
    assert picked(balancer, prompt(document(1))).reason == "least_work"


def test_a_member_that_left_has_nothing_cached_when_it_returns() -> None:
    balancer = pool(1)
    answered(balancer, sent(balancer, prompt(document(1))))
    balancer.set_members([])
    balancer.set_members([Member("m0", "10.0.0.0:8000")])
    balancer.set_ready("m0", True)
    assert picked(balancer, prompt(document(1))).reason == "least_work"


def test_a_session_stays_and_moves_when_its_member_has_too_much() -> None:
    balancer = pool(3)
    request = RoutedRequest("llm", prompt_tokens=40.0, answer_tokens=100.0, session="s")
    home = sent(balancer, request)
    answered(balancer, home)
    for _ in range(4):
        again = sent(balancer, request)
        assert again.member == home.member
        answered(balancer, again)
    sent(balancer, RoutedRequest("llm", answer_tokens=5000.0), subset=[home.member.name])
    moved = sent(balancer, request)
    assert moved.member != home.member
    answered(balancer, moved)
    assert picked(balancer, request) == (moved.member, picked(balancer, request).fallbacks, "session")


def test_an_adapter_stays_where_it_is_loaded() -> None:
    balancer = pool(3, PoolPolicy(adapter_tokens=256.0))
    request = RoutedRequest("llm", answer_tokens=10.0, lora="legal")
    first = sent(balancer, request)
    answered(balancer, first)
    second = sent(balancer, request)
    assert (first.work, second.work) == (266.0, 10.0)
    assert first.member == second.member
    names = {sent(balancer, request).member.name for _ in range(60)}
    assert names == {"m0", "m1", "m2"}, "an adapter that everybody wants is loaded on all"


def test_a_sequence_is_kept_on_its_member() -> None:
    balancer = pool(4)
    homes = {}
    for number in range(60):
        request = sequence(f"s{number}", sequence_start=True)
        attempt = sent(balancer, request)
        homes[number] = attempt.member.name
        answered(balancer, attempt)
    assert max(Counter(homes.values()).values()) < 30, "they are spread"
    drain(balancer, "m0")
    for number, home in homes.items():
        assert picked(balancer, sequence(f"s{number}")) == (load_of(balancer, home).member, (), "sequence")
    assert "m0" not in {picked(balancer, sequence(f"new{number}")).member.name for number in range(60)}
    assert balancer.sequences == 60
    for number in range(60):
        answered(balancer, sent(balancer, sequence(f"s{number}", sequence_end=True)))
    assert balancer.sequences == 0


def test_routers_agree_on_where_sequences_are() -> None:
    one, other = pool(5), pool(5)
    for number in range(50):
        begun = sent(one, sequence(f"s{number}", sequence_start=True))
        assert picked(other, sequence(f"s{number}")).member == begun.member


def test_a_lost_sequence_is_told() -> None:
    balancer = pool(2)
    home = sent(balancer, sequence("s", sequence_start=True)).member.name
    balancer.set_ready(home, False)
    text = f"sequence 's' of model 'stateful' is on member '{home}' of pool 'p', which "
    found = refusal(balancer, sequence("s"))
    assert (found.status, found.text) == (503, text + "is not ready: try again, or begin a new sequence")
    balancer.set_ready(home, True)
    assert picked(balancer, sequence("s")).member.name == home
    balancer.restarted(home)
    found = refusal(balancer, sequence("s"))
    assert (found.status, found.text) == (410, text + "was restarted: its state is lost, begin a new sequence")
    balancer.set_members([load.member for load in balancer.members if load.member.name != home])
    found = refusal(balancer, sequence("s"))
    assert (found.status, found.text) == (410, text + "has left the pool: its state is lost, begin a new sequence")
    again = sent(balancer, sequence("s", sequence_start=True))
    assert picked(balancer, sequence("s")).member == again.member


def test_a_sequence_does_not_go_on_elsewhere_after_its_member_has_failed() -> None:
    balancer = pool(3)
    home = sent(balancer, sequence("s", sequence_start=True)).member.name
    found = balancer.pick(sequence("s"), 0, tried=[home])
    assert isinstance(found, NoMember)
    assert found.text.endswith("which failed this request: try again, or begin a new sequence")


def test_sequences_are_bounded_and_idle_ones_forgotten() -> None:
    balancer = pool(2, PoolPolicy(max_sequences=3, sequence_idle=10.0))
    for number in range(3):
        sent(balancer, sequence(f"s{number}", sequence_start=True), number * SECOND)
    found = refusal(balancer, sequence("s3", sequence_start=True), 9 * SECOND)
    assert (found.status, found.text) == (429, "pool 'p' has 3 sequences, as many as max-sequences allows")
    sent(balancer, sequence("s0"), 9 * SECOND)
    sent(balancer, sequence("s3", sequence_start=True), 11 * SECOND)
    assert balancer.sequences == 3
    assert refusal(balancer, sequence("s4"), 11 * SECOND).status == 429


def test_a_tenants_sequence_is_not_anothers() -> None:
    """Who begins or ends one with the same name elsewhere moves nobody's."""
    balancer = pool(8)
    owners = ("alice", "bob", "default")
    places = {owner: sent(balancer, sequence("42", sequence_start=True, tenant=owner)).member for owner in owners}
    assert len(set(places.values())) > 1
    assert balancer.sequences == 3
    answered(balancer, sent(balancer, sequence("42", sequence_end=True, tenant="bob")))
    assert balancer.sequences == 2
    balancer.set_ready(places["alice"].name, False)
    assert refusal(balancer, sequence("42", tenant="alice")).status == 503
    assert picked(balancer, sequence("42", tenant="bob")).member != places["alice"]


def test_a_tenant_leaves_room_for_sequences_of_others() -> None:
    balancer = pool(2, PoolPolicy(max_sequences=4, sequence_idle=10.0))
    for number in range(3):
        sent(balancer, sequence(f"s{number}", sequence_start=True, tenant="bob"))
    found = refusal(balancer, sequence("s3", sequence_start=True, tenant="bob"))
    assert found.text == "pool 'p' has 3 sequences of tenant 'bob', the share of max-sequences for one"
    sent(balancer, sequence("s3", sequence_start=True, tenant="alice"))
    answered(balancer, sent(balancer, sequence("s0", sequence_end=True, tenant="bob")))
    sent(balancer, sequence("s3", sequence_start=True, tenant="bob"))
    sent(balancer, sequence("s4", sequence_start=True, tenant="bob"), 11 * SECOND)
    assert balancer.sequences == 1, "idle ones are forgotten, with their tenants"


def test_a_sequence_that_ends_without_an_answer_is_still_known() -> None:
    balancer = pool(2)
    home = sent(balancer, sequence("s", sequence_start=True)).member
    balancer.end(sent(balancer, sequence("s", sequence_end=True)), AttemptEnd.LOST, None, 0)
    assert picked(balancer, sequence("s", sequence_end=True)).member == home
