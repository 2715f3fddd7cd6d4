"""What holds whatever happens: sums are right, bounds hold, every request ends once, speeds are found."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pools import SECOND, load_of, members, pool, prompt, sent

from nerite.balancing.member import AttemptEnd, LoadReport, RoutedRequest
from nerite.balancing.policy import ChoicePolicy, PoolPolicy
from nerite.balancing.pool_balancer import MemberAttempt, NoMember, Pick, PoolBalancer

POLICIES = st.builds(
    PoolPolicy,
    choice=st.sampled_from(ChoicePolicy),
    prefix=st.booleans(),
    load_factor=st.sampled_from([1.0, 1.25, 3.0]),
    max_requests=st.sampled_from([0.0, 2.0]),
)
REQUESTS = st.builds(
    lambda size, which, answer, session, sequence: prompt(b"%d" % which * size, answer)._replace(
        session=session, sequence=sequence, sequence_end=bool(sequence) and size % 2 == 0
    ),
    st.integers(0, 3000),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.1, 1.0, 333.3]),
    st.sampled_from(["", "a"]),
    st.sampled_from(["", "", "s"]),
)


class Pool(RuleBasedStateMachine):
    """Requests begin, go on and end, while members come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.balancer = pool(3)
        self.open: list[MemberAttempt] = []
        self.ended: list[MemberAttempt] = []
        self.now = 0

    @rule(policy=POLICIES)
    @precondition(lambda self: not self.open)
    def begin_again(self, policy: PoolPolicy) -> None:
        self.balancer = pool(3, policy)
        self.ended = []

    @rule(request=REQUESTS, tried=st.sets(st.sampled_from(["m0", "m1"])))
    def send(self, request: RoutedRequest, tried: set[str]) -> None:
        found = self.balancer.pick(request, self.now, tried=tried)
        if isinstance(found, Pick):
            assert found.member.name not in tried
            assert found.member not in found.fallbacks
            self.open.append(self.balancer.begin(request, found.member, self.now))
        else:
            assert isinstance(found, NoMember)
            assert found.status in (410, 429, 503)

    @rule(place=st.integers(0, 99), tokens=st.floats(0, 1000))
    @precondition(lambda self: self.open)
    def progress(self, place: int, tokens: float) -> None:
        self.balancer.progress(self.open[place % len(self.open)], tokens, self.now)

    @rule(place=st.integers(0, 99), how=st.sampled_from(AttemptEnd), running=st.sampled_from([None, 0.0, 9.0]))
    @precondition(lambda self: self.open)
    def end(self, place: int, how: AttemptEnd, running: float | None) -> None:
        attempt = self.open.pop(place % len(self.open))
        report = None if running is None else LoadReport(running=running)
        self.balancer.end(attempt, how, report, self.now)
        self.ended.append(attempt)

    @rule()
    @precondition(lambda self: self.ended)
    def end_twice(self) -> None:
        before = [(load.work, load.requests) for load in self.balancer.members]
        self.balancer.progress(self.ended[-1], 10.0, self.now)
        self.balancer.end(self.ended[-1], AttemptEnd.FAILED, None, self.now)
        assert [(load.work, load.requests) for load in self.balancer.members] == before

    @rule(count=st.integers(0, 4))
    def discover(self, count: int) -> None:
        self.balancer.set_members(members(count))

    @rule(number=st.integers(0, 3), ready=st.booleans())
    def check(self, number: int, ready: bool) -> None:
        self.balancer.set_ready(f"m{number}", ready)

    @rule(number=st.integers(0, 3))
    def restart(self, number: int) -> None:
        self.balancer.restarted(f"m{number}")

    @rule(seconds=st.sampled_from([0.01, 1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)

    @invariant()
    def counts_are_exact(self) -> None:
        for load in self.balancer.members:
            mine = [each for each in self.open if each.load is load]
            assert load.requests == len(mine)
            assert load.work == pytest.approx(sum(each.work for each in mine), abs=1e-6)
            assert load.work >= 0
            assert load.others >= 0
            assert load.score >= 0
            if not mine:
                assert load.work == 0

    def teardown(self) -> None:
        for attempt in self.open:
            self.balancer.end(attempt, AttemptEnd.CANCELLED, None, self.now)
        assert [(load.work, load.requests) for load in self.balancer.members] == [(0.0, 0)] * len(
            list(self.balancer.members)
        )


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(500, 8000)), min_size=1, max_size=120))
@settings(max_examples=60, deadline=None)
def test_affinity_gives_nobody_more_than_the_bound(prompts: list[tuple[int, int]]) -> None:
    """A member that gets a request for its prefix has at most 1.25 x the mean, or the least and 3 x what is saved."""
    balancer = pool(4)
    for which, size in prompts:
        request = prompt(b"%d" % which * size, 20.0)
        before = {load.member.name: load.score for load in balancer.members}
        found = balancer.pick(request, 0)
        assert isinstance(found, Pick)
        if found.reason == "prefix":
            saved = 3 * request.prompt_tokens * 0.25
            bound = max(1.25 * sum(before.values()) / 4, min(before.values()) + saved)
            assert before[found.member.name] <= bound + 1e-9
        balancer.begin(request, found.member, 0)


def serve(balancer: PoolBalancer, slowness: dict[str, float], seconds: int, start: int = 0) -> Counter[str]:
    """Members that share their time between requests, so many milliseconds for each token. Returns who got how many."""
    chance = random.Random(3)
    under_way: dict[str, list[MemberAttempt]] = {name: [] for name in slowness}
    counts: Counter[str] = Counter()
    request = RoutedRequest("llm", answer_tokens=50.0)
    for step in range(100 * seconds):
        now = start * SECOND + step * SECOND // 100
        if chance.random() < 0.5:
            attempt = sent(balancer, request, now)
            under_way[attempt.member.name].append(attempt)
            counts[attempt.member.name] += step > 50 * seconds
        for name, attempts in under_way.items():
            tokens = 10 / slowness[name] / max(1, len(attempts))
            for attempt in list(attempts):
                balancer.progress(attempt, tokens, now)
                if attempt.tokens >= 50.0:
                    attempts.remove(attempt)
                    balancer.end(attempt, AttemptEnd.ANSWERED, None, now)
    for attempts in under_way.values():
        for attempt in attempts:
            balancer.end(attempt, AttemptEnd.CANCELLED, None, now)
    return counts


def test_a_slow_member_gets_as_little_as_it_can_do() -> None:
    balancer = pool(3)
    counts = serve(balancer, {"m0": 0.6, "m1": 0.6, "m2": 4.0}, 200)
    assert counts["m2"] < 0.25 * counts["m0"]
    assert load_of(balancer, "m2").factor < 0.5
    # A second is enough for 2.5 tokens in a millisecond of the slow one.
    assert load_of(balancer, "m0").rate > 2 * load_of(balancer, "m2").rate > 0


def test_a_member_that_has_become_fast_again_gets_its_part() -> None:
    balancer = pool(3)
    serve(balancer, {"m0": 0.6, "m1": 0.6, "m2": 4.0}, 100)
    counts = serve(balancer, {"m0": 0.6, "m1": 0.6, "m2": 0.6}, 200, start=101)
    assert counts["m2"] > 0.7 * counts["m0"]


def test_members_that_are_alike_get_alike() -> None:
    counts = serve(pool(3), {"m0": 1.0, "m1": 1.0, "m2": 1.0}, 200)
    assert max(counts.values()) < 1.15 * min(counts.values())
