"""Pools of members for tests."""

from __future__ import annotations

from typing import Any, Final

from nerite.balancing.member import AttemptEnd, Member, RoutedRequest
from nerite.balancing.member_load import MemberLoad
from nerite.balancing.policy import PoolPolicy
from nerite.balancing.pool_balancer import MemberAttempt, Pick, PoolBalancer
from nerite.balancing.prefix_hashes import prefix_hashes, prefix_tokens

SECOND: Final = 1_000_000_000


def members(count: int, **fields: Any) -> list[Member]:
    return [Member(f"m{number}", f"10.0.0.{number}:8000", **fields) for number in range(count)]


def pool(count: int = 3, policy: PoolPolicy | None = None, **fields: Any) -> PoolBalancer:
    """A pool with ready members m0, m1, ..."""
    balancer = PoolBalancer("p", policy)
    balancer.set_members(members(count, **fields))
    for number in range(count):
        balancer.set_ready(f"m{number}", True)
    return balancer


def drain(balancer: PoolBalancer, name: str) -> None:
    """Have discovery say that a member drains."""
    balancer.set_members([load.member._replace(drain=load.member.name == name) for load in balancer.members])


def load_of(balancer: PoolBalancer, name: str) -> MemberLoad:
    return next(load for load in balancer.members if load.member.name == name)


def prompt(text: bytes, answer: float = 100.0, **fields: Any) -> RoutedRequest:
    """A request with a prompt of a language model."""
    hashes = prefix_hashes(text, "llm")
    return RoutedRequest(
        "llm",
        prompt_tokens=len(text) / 4,
        answer_tokens=answer,
        prefix=hashes,
        prefix_tokens=prefix_tokens(len(hashes)),
        **fields,
    )


def picked(balancer: PoolBalancer, request: RoutedRequest, now_ns: int = 0, **how: Any) -> Pick:
    found = balancer.pick(request, now_ns, **how)
    assert isinstance(found, Pick), found
    return found


def sent(balancer: PoolBalancer, request: RoutedRequest, now_ns: int = 0, **how: Any) -> MemberAttempt:
    """Pick a member, and begin there."""
    return balancer.begin(request, picked(balancer, request, now_ns, **how).member, now_ns)


def answered(balancer: PoolBalancer, attempt: MemberAttempt, now_ns: int = 0) -> None:
    balancer.end(attempt, AttemptEnd.ANSWERED, None, now_ns)
