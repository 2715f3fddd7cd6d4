"""Members that have requests and send nothing."""

from __future__ import annotations

import pytest
from pools import SECOND

from nerite.balancing.member import AttemptEnd, Member, RoutedRequest
from nerite.balancing.pool_balancer import MemberAttempt, Pick, PoolBalancer

STREAM = RoutedRequest("m", prompt_tokens=10.0, answer_tokens=1000.0)


class Pool:
    """Two members, of which each has a stream that sends a part every 100 ms."""

    def __init__(self) -> None:
        self.now = SECOND
        self.balancer = PoolBalancer("p")
        self.balancer.set_members([Member(name, name) for name in ("a", "b")])
        for name in ("a", "b"):
            self.balancer.set_ready(name, True)
        self.streams = {name: self.begin(name) for name in ("a", "b")}

    def begin(self, name: str) -> MemberAttempt:
        (load,) = (each for each in self.balancer.members if each.member.name == name)
        return self.balancer.begin(STREAM, load.member, self.now)

    def go_on(self, seconds: float, *sending: str) -> None:
        end = self.now + int(seconds * SECOND)
        while self.now < end:
            self.now += SECOND // 10
            for name in sending:
                self.balancer.progress(self.streams[name], 1.0, self.now)
            self.pick()

    def pick(self) -> str:
        found = self.balancer.pick(STREAM, self.now)
        assert isinstance(found, Pick)
        return found.member.name

    def picks(self) -> set[str]:
        """Return who gets four requests that come now."""
        attempts, names = [], set()
        for _ in range(4):
            name = self.pick()
            names.add(name)
            attempts.append(self.begin(name))
        for attempt in attempts:
            self.balancer.end(attempt, AttemptEnd.CANCELLED, None, self.now)
        return names

    @property
    def stalled(self) -> set[str]:
        return {load.member.name for load in self.balancer.members if load.stalled}


@pytest.fixture
def pool() -> Pool:
    found = Pool()
    found.go_on(5, "a", "b")
    return found


def test_a_silent_member_gets_no_requests_until_it_sends_something(pool: Pool) -> None:
    assert pool.picks() == {"a", "b"}
    pool.go_on(0.5, "b")
    assert not pool.stalled
    pool.go_on(1, "b")
    assert (pool.stalled, pool.picks()) == ({"a"}, {"b"})
    pool.balancer.progress(pool.streams["a"], 1.0, pool.now)
    assert (pool.stalled, pool.picks()) == (set(), {"a", "b"})


def test_all_are_silent_so_all_get_requests(pool: Pool) -> None:
    pool.go_on(2)
    assert pool.stalled == {"a", "b"}
    assert pool.picks() == {"a", "b"}


def test_a_member_without_requests_is_not_stalled(pool: Pool) -> None:
    pool.balancer.end(pool.streams["a"], AttemptEnd.ANSWERED, None, pool.now)
    pool.go_on(5, "b")
    assert not pool.stalled
    pool.begin("a")
    pool.go_on(0.5, "b")
    assert not pool.stalled


def test_what_is_usual_is_learned() -> None:
    pool = Pool()
    for _ in range(64):
        pool.go_on(2)
        for name in ("a", "b"):
            pool.balancer.progress(pool.streams[name], 1.0, pool.now)
    pool.go_on(5)
    assert not pool.stalled
    pool.go_on(2)
    assert pool.stalled == {"a", "b"}


def test_one_stall_is_not_usual(pool: Pool) -> None:
    for _ in range(2):
        pool.go_on(20, "b")
        pool.go_on(1, "a", "b")
    pool.go_on(2, "b")
    assert pool.stalled == {"a"}


def test_an_ejected_member_does_not_get_requests_for_a_stalled_one(pool: Pool) -> None:
    for _ in range(5):
        pool.balancer.end(pool.begin("b"), AttemptEnd.LOST, None, pool.now)
    pool.go_on(2, "b")
    assert pool.stalled == {"a"}
    assert pool.picks() == {"a"}
