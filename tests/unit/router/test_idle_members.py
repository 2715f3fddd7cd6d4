"""Where requests of the class idle may go: to members that have room, by what the router knows of them."""

from __future__ import annotations

import pytest

from nerite.balancing.member import AttemptEnd, LoadReport, Member, RoutedRequest, ServerKind
from nerite.cluster.settings import MemberSource, PoolSettings
from nerite.core.errors import NotFound, Unavailable
from nerite.router.idle_members import has_others, idle_members
from nerite.router.pools import PoolChoice, PoolTable, RouterPool

TEXT = RoutedRequest("m")
TENSORS = RoutedRequest("m", answer_tokens=1.0)


def pool_of(name: str, *members: Member, classes: tuple[str, ...] = ()) -> RouterPool:
    pool = RouterPool(PoolSettings(name, MemberSource(members=members), classes=classes))
    pool.set_members(members)
    for member in members:
        pool.set_ready(member.name, True, ["m"])
    return pool


def member(name: str, kind: ServerKind = ServerKind.VLLM, capacity: float = 1.0) -> Member:
    return Member(name, f"{name}:8000", kind=kind, capacity=capacity)


def begin(pool: RouterPool, each: Member, request: RoutedRequest = TEXT, *, idle: bool = False) -> None:
    pool.balancer.begin(request, each, 0)
    if idle:
        pool.idle[each.name] += 1


def room(pool: RouterPool, request: RoutedRequest = TEXT) -> set[str]:
    return idle_members(pool.balancer.members, pool.idle, request)


def test_members_that_others_use_have_no_room() -> None:
    used, free = member("used"), member("free")
    pool = pool_of("main", used, free)
    begin(pool, used)
    assert room(pool) == {"free"}
    assert room(pool, RoutedRequest("unknown")) == set()


@pytest.mark.parametrize(("request_", "most"), [(TEXT, 8), (TENSORS, 1)])
def test_few_at_once_where_nobody_would_stop_them(request_: RoutedRequest, most: int) -> None:
    one = member("one")
    pool = pool_of("main", one)
    for _ in range(most):
        assert room(pool, request_) == {"one"}
        begin(pool, one, request_, idle=True)
    assert room(pool, request_) == set()


def test_a_language_model_of_nerite_refuses_what_it_has_no_room_for() -> None:
    one = member("one", ServerKind.NERITE)
    pool = pool_of("main", one)
    begin(pool, one)
    assert room(pool, TEXT) == {"one"}
    assert room(pool, TENSORS) == set()
    pool.balancer.report("one", LoadReport(waiting=1), 0)
    assert room(pool, TEXT) == set()


@pytest.mark.parametrize("report", [LoadReport(waiting=2), LoadReport(waiting=0, kv_used=0.9)])
def test_what_a_member_reports(report: LoadReport) -> None:
    one = member("one")
    pool = pool_of("main", one)
    pool.balancer.report("one", report, 0)
    assert room(pool) == set()


def test_idle_requests_go_to_pools_of_other_classes_first_and_anywhere_with_room() -> None:
    day, night = member("day"), member("night")
    main, batch = pool_of("main", day), pool_of("batch", night, classes=("batch",))
    table = PoolTable([main, batch])

    def chosen() -> str:
        choice = table.choose(TEXT, "idle", 0)
        assert isinstance(choice, PoolChoice), choice
        return choice.member.name

    assert chosen() == "night"
    begin(batch, night)
    assert chosen() == "day"
    begin(main, day)
    assert isinstance(table.choose(TEXT, "idle", 0), Unavailable)
    assert not table.may_have_room(TEXT)
    assert table.may_have_room(RoutedRequest("unknown")), "the answer is an error then"
    assert isinstance(table.choose(RoutedRequest("unknown"), "idle", 0), NotFound)


def test_a_pool_that_lists_idle_gets_all_of_it() -> None:
    main, spare = pool_of("main", member("day")), pool_of("spare", member("spare"), classes=("idle",))
    begin(spare, member("spare"))
    assert isinstance(PoolTable([main, spare]).choose(TEXT, "idle", 0), Unavailable)


def test_who_else_uses_the_members_of_a_model() -> None:
    one = member("one")
    pool = pool_of("main", one)
    loads = list(pool.balancer.members)
    attempt = pool.balancer.begin(TEXT, one, 0)
    assert has_others(loads, ["m"], 0)
    assert not has_others(loads, ["m"], 1)
    assert not has_others(loads, ["other"], 0)
    pool.balancer.end(attempt, AttemptEnd.ANSWERED, None, 1)
    assert not has_others(loads, ["m"], 0)
    pool.balancer.report("one", LoadReport(running=4), 2)
    assert has_others(loads, ["m"], 0)
