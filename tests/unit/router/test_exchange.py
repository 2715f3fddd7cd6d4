"""A request on its way: where it goes, when it goes to another member, and that it ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nerite.autoscaling.figures import PoolDemand
from nerite.autoscaling.policy import ScalingPolicy
from nerite.balancing.member import AttemptEnd, Member, RoutedRequest
from nerite.balancing.policy import PoolPolicy
from nerite.cluster.settings import MemberSource, PlacementSettings, PoolSettings
from nerite.core.errors import NeriteError, Unavailable
from nerite.router.exchange import RoutedExchange
from nerite.router.pools import MemberIndex, PoolTable, RouterPool


class Call:
    def __init__(self, member: Member) -> None:
        self.member = member
        self.cancelled = False
        self.owed = True

    def cancel(self) -> None:
        self.cancelled = True


class Client:
    """A client's side that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.told: list[NeriteError] = []
        self.broken: list[NeriteError] = []
        self.ended = asyncio.Event()

    def send_to(self, pool: RouterPool, member: Member) -> Call:
        self.calls.append(Call(member))
        return self.calls[-1]

    def refuse(self, error: NeriteError) -> None:
        self.told.append(error)
        self.ended.set()

    def break_off(self, error: NeriteError) -> None:
        self.broken.append(error)
        self.ended.set()


def made_pool(name: str, *members: str, models: tuple[str, ...] = ("m",), **keys: Any) -> RouterPool:
    policy = PoolPolicy(retry_share=1.0, retry_floor=100.0)
    pool = RouterPool(PoolSettings(name, MemberSource(), balancing=policy, **keys))  # type: ignore[arg-type]
    pool.set_members([Member(each, f"{each}:80") for each in members])
    for each in members:
        pool.set_ready(each, True, models)
    return pool


def exchange(client: Client, *pools: RouterPool, attempts: int = 3, **request: Any) -> RoutedExchange:
    routed = RoutedRequest("m")._replace(**request)  # type: ignore[arg-type]
    return RoutedExchange(PoolTable(pools), client, routed, attempts=attempts)


def is_at_rest(*pools: RouterPool) -> bool:
    return all(not pool.under_way and not any(load.requests for load in pool.balancer.members) for pool in pools)


def test_an_answer() -> None:
    client, pool = Client(), made_pool("p", "a")
    made = exchange(client, pool)
    made.begin()
    assert not is_at_rest(pool)
    made.answer_begins()
    made.done(AttemptEnd.ANSWERED, "200")
    made.done(AttemptEnd.ANSWERED, "200")
    made.cancel()
    assert made.over
    assert is_at_rest(pool)
    assert pool.answers == {("a", "200"): 1}
    assert (client.told, client.broken) == ([], [])


@pytest.mark.parametrize(
    "fail",
    [
        lambda made: made.failed(AttemptEnd.LOST, "is gone"),
        lambda made: made.failed(AttemptEnd.LOST, "is gone", sent=False),
        lambda made: made.refused("503"),
    ],
)
def test_another_member_is_asked_before_the_first_byte(fail: Callable[[RoutedExchange], object]) -> None:
    client, pool = Client(), made_pool("p", "a", "b")
    made = exchange(client, pool)
    made.begin()
    fail(made)
    first, second = client.calls
    assert {first.member.name, second.member.name} == {"a", "b"}
    made.done(AttemptEnd.ANSWERED, "200")
    assert is_at_rest(pool)
    assert sum(pool.retries.values()) == 1


def test_no_other_member_is_asked_after_the_first_byte() -> None:
    client, pool = Client(), made_pool("p", "a", "b")
    made = exchange(client, pool)
    made.begin()
    made.answer_begins()
    assert not made.refused("503")
    made.failed(AttemptEnd.LOST, "is gone")
    assert len(client.calls) == 1
    (error,) = client.broken
    assert error.message == f"member '{client.calls[0].member.name}' of pool 'p' is gone"
    assert is_at_rest(pool)


def test_what_must_not_happen_twice_is_sent_again_only_if_nothing_was_sent() -> None:
    client, pool = Client(), made_pool("p", "a", "b")
    made = exchange(client, pool, repeatable=False)
    made.begin()
    assert not made.refused("503")
    made.failed(AttemptEnd.LOST, "cannot be reached", sent=False)
    assert len(client.calls) == 2
    made.failed(AttemptEnd.LOST, "is gone")
    assert len(client.calls) == 2
    assert client.told[0].http_status == 502
    assert is_at_rest(pool)


def test_attempts_are_limited() -> None:
    client, pool = Client(), made_pool("p", "a", "b", "c")
    made = exchange(client, pool, attempts=2)
    made.begin()
    made.failed(AttemptEnd.LOST, "is gone")
    made.failed(AttemptEnd.LOST, "is gone")
    assert len(client.calls) == 2
    assert len(client.told) == 1


def test_a_cancelled_request_is_cancelled_at_its_member() -> None:
    client, pool = Client(), made_pool("p", "a")
    made = exchange(client, pool)
    made.begin()
    made.cancel()
    assert client.calls[0].cancelled
    assert pool.answers == {("a", "cancelled"): 1}
    assert is_at_rest(pool)
    assert (client.told, client.broken) == ([], [])


@pytest.mark.parametrize("begun", [False, True])
def test_a_deadline_ends_a_request(begun: bool) -> None:
    async def run() -> None:
        client, pool = Client(), made_pool("p", "a", "b")
        made = RoutedExchange(PoolTable([pool]), client, RoutedRequest("m"), attempts=3, timeout=0.01)
        made.begin()
        if begun:
            made.answer_begins()
        await asyncio.wait_for(client.ended.wait(), 10)
        (error,) = client.broken if begun else client.told
        assert (error.http_status, error.grpc_status) == (504, 4)
        assert client.calls[0].cancelled
        assert is_at_rest(pool)

    asyncio.run(run())


def refusal(client: Client, *pools: RouterPool, level: str = "", **request: Any) -> NeriteError:
    made = RoutedExchange(PoolTable(pools), client, RoutedRequest("m")._replace(**request), level=level)  # type: ignore[arg-type]
    made.begin()
    assert made.over
    return client.told[0]


def test_refusals_name_the_pools() -> None:
    error = refusal(Client(), made_pool("p", "a"), made_pool("q", "b"), model="other")
    assert error.http_status == 404
    assert "'other'" in error.message
    assert "'p', 'q'" in error.message
    gone = made_pool("p", "a")
    gone.set_ready("a", False)
    assert refusal(Client(), gone).http_status == 503
    error = refusal(Client(), made_pool("p", "a", classes=("batch",)), level="interactive")
    assert error.http_status == 404
    assert "class 'interactive'" in error.message


def test_classes_choose_pools() -> None:
    client = Client()
    pools = made_pool("p", "a"), made_pool("q", "b", classes=("batch",))
    for level, expected in (("", "a"), ("batch", "b"), ("other", "a")):
        RoutedExchange(PoolTable(pools), client, RoutedRequest("m"), level=level).begin()
        assert client.calls[-1].member.name == expected


def test_a_pool_borrows_idle_members() -> None:
    client = Client()
    own, other = made_pool("batch", "a", classes=("batch",), borrows=True), made_pool("main", "b")
    own.set_ready("a", False)
    table = PoolTable([other, own])
    first = RoutedExchange(table, client, RoutedRequest("m"), level="batch")
    first.begin()
    assert client.calls[-1].member.name == "b"
    second = RoutedExchange(table, client, RoutedRequest("m"), level="batch")
    second.begin()
    assert len(client.calls) == 1
    assert client.told[0].http_status == 503
    first.cancel()
    assert is_at_rest(own, other)


def test_a_late_request_has_a_second_exchange_at_another_member() -> None:
    client, (pool, demand) = Client(), scaled_pool("a", "b")
    first = exchange(client, pool)
    assert first.again(client) is None
    first.begin()
    arrived = demand.arrived
    second = first.again(client)
    assert second is not None
    second.begin()
    assert demand.arrived == arrived
    assert {call.member.name for call in client.calls} == {"a", "b"}
    second.answer_begins()
    first.cancel()
    second.done(AttemptEnd.ANSWERED, "200")
    assert client.calls[0].cancelled
    assert pool.retries == {"hedged": 1}
    assert is_at_rest(pool)


def test_a_hedged_request_is_refused_once_when_both_of_its_exchanges_are() -> None:
    (client, other), pool = (Client(), Client()), made_pool("p", "a", "b")
    table = PoolTable([pool])
    first = RoutedExchange(table, client, RoutedRequest("m"))
    first.begin()
    second = first.again(other)
    assert second is not None
    second.begin()
    second.failed(AttemptEnd.LOST, "is gone")
    assert (first.over, second.over, table.refused.total()) == (False, True, 0)
    first.failed(AttemptEnd.LOST, "is gone, too")
    assert table.refused == {"502": 1}
    assert (len(client.told), len(other.told)) == (1, 1)
    assert is_at_rest(pool)


def test_an_answer_that_has_begun_is_not_hedged() -> None:
    client, pool = Client(), made_pool("p", "a", "b")
    made = exchange(client, pool)
    made.begin()
    made.answer_begins()
    assert made.again(client) is None
    made.done(AttemptEnd.ANSWERED, "200")
    assert made.again(client) is None


def held_pool(name: str = "p", *members: str, models: tuple[str, ...] = ("m",), **keys: Any) -> RouterPool:
    """Return a pool whose members, which are not ready yet, know some models."""
    pool = made_pool(name, *members, models=models, hold_requests=10, **keys)
    for each in members:
        pool.set_ready(each, False)
    return pool


def waiting(client: Client, table: PoolTable, *, level: str = "", **request: Any) -> RoutedExchange:
    routed = RoutedRequest("m")._replace(**request)  # type: ignore[arg-type]
    made = RoutedExchange(table, client, routed, level=level, attempts=3, waits=True)
    made.begin()
    return made


async def turn() -> None:
    """Let the loop turn."""
    await asyncio.sleep(0)


def test_requests_wait_for_a_member_in_order_of_their_class() -> None:
    async def play() -> None:
        pool = held_pool("p", "a")
        table = PoolTable([pool])
        order: list[str] = []

        class Named(Client):
            def __init__(self, name: str) -> None:
                super().__init__()
                self.name = name

            def send_to(self, pool: RouterPool, member: Member) -> Call:
                order.append(self.name)
                return super().send_to(pool, member)

        made = [
            waiting(Named(name), table, level=level)
            for name, level in (("b", "batch"), ("i", ""), ("j", "interactive"))
        ]
        assert all(each.waiting for each in made)
        assert pool.held == 3
        pool.set_ready("a", True, ("m",))
        await turn()
        assert order == ["i", "j", "b"]
        assert not any(each.waiting for each in made)
        for each in made:
            each.done(AttemptEnd.ANSWERED, "200")
        assert is_at_rest(pool)
        assert (pool.held, pool.holds) == (0, {"served": 3})

    asyncio.run(play())


def test_a_full_member_takes_those_that_wait_one_after_the_other() -> None:
    async def play() -> None:
        pool = held_pool("p", "a")
        pool.balancer.policy = replace(pool.balancer.policy, max_requests=1.0)
        table = PoolTable([pool])
        clients = [Client(), Client(), Client()]
        first, second = (waiting(client, table) for client in clients[:2])
        pool.set_ready("a", True, ("m",))
        await turn()
        assert [len(client.calls) for client in clients] == [1, 0, 0]
        third = waiting(clients[2], table)
        assert third.waiting, "it does not overtake the second"
        first.done(AttemptEnd.ANSWERED, "200")
        await turn()
        assert [len(client.calls) for client in clients] == [1, 1, 0]
        second.cancel()
        await turn()
        third.done(AttemptEnd.ANSWERED, "200")
        assert is_at_rest(pool)
        assert pool.held == 0

    asyncio.run(play())


@pytest.mark.parametrize("how", ["cancel", "deadline", "stop"])
def test_a_request_that_waits_ends_once(how: str) -> None:
    async def play() -> None:
        client, pool = Client(), held_pool("p", "a")
        table = PoolTable([pool])
        made = RoutedExchange(table, client, RoutedRequest("m"), timeout=0.01 if how == "deadline" else 0.0, waits=True)
        made.begin()
        assert made.waiting
        if how == "cancel":
            made.cancel()
        elif how == "stop":
            table.held.stop(Unavailable("the router stops", 1))
        else:
            async with asyncio.timeout(30):
                await client.ended.wait()
        pool.set_ready("a", True, ("m",))
        await turn()
        assert made.over
        assert client.calls == []
        assert [error.http_status for error in client.told] == {"cancel": [], "deadline": [504], "stop": [503]}[how]
        assert (pool.held, sum(pool.holds.values())) == (0, 1)

    asyncio.run(play())


def test_a_lost_request_waits_for_another_copy() -> None:
    async def play() -> None:
        client, pool = Client(), held_pool("p", "a", "b")
        pool.set_ready("a", True, ("m",))
        made = waiting(client, PoolTable([pool]))
        made.failed(AttemptEnd.LOST, "is gone")
        assert made.waiting
        pool.set_ready("a", False)
        await turn()
        assert made.waiting
        pool.set_ready("b", True, ("m",))
        await turn()
        assert [call.member.name for call in client.calls] == ["a", "b"]
        made.done(AttemptEnd.ANSWERED, "200")
        assert is_at_rest(pool)

    asyncio.run(play())


def test_what_does_not_wait() -> None:
    async def play() -> None:
        pool = held_pool("p", "a")
        table = PoolTable([pool])
        for request in ({"sequence": "s"}, {"model": ""}, {"model": "unheard"}):
            client = Client()
            assert waiting(client, table, **request).over
            assert [error.http_status for error in client.told] == [503]
        other = held_pool("q", "a", hold_timeout=60.0)
        made = RoutedExchange(PoolTable([other]), client := Client(), RoutedRequest("m"))
        made.begin()
        assert len(client.told) == 1, "it is no inference"
        waiting(client := Client(), table, level="idle")
        assert [error.http_status for error in client.told] == [503], "batches learn that there is no room"
        assert pool.held == other.held == 0

    asyncio.run(play())


@pytest.mark.parametrize(("level", "keys"), [("idle", {}), ("", {"hold_requests": 0})])
def test_a_model_that_nobody_waits_for_is_loaded_all_the_same(level: str, keys: dict[str, Any]) -> None:
    pool = made_pool("p", "a", models=("m",), placement=PlacementSettings(), **keys)
    pool.set_ready("a", True, ("m",), MemberIndex(frozenset("mn"), frozenset("m")))
    assert pool.model_demand is not None
    for model in ("m", "n", "unheard"):
        waiting(client := Client(), PoolTable([pool]), level=level, model=model)
        assert [error.http_status for error in client.told] == {"n": [503], "unheard": [404]}.get(model, [])
    assert set(pool.model_demand.take(1)) == {"m", "n"}


def test_a_member_that_does_not_have_the_model_any_more() -> None:
    async def play() -> None:
        placed = PlacementSettings(memory=1)
        client, pool = Client(), held_pool("p", "a", placement=placed)
        pool.set_ready("a", True, ("m",))
        table = PoolTable([pool])
        made = waiting(client, table)
        assert made.not_found("404")
        assert made.waiting
        pool.set_ready("a", True, (), MemberIndex(frozenset("m"), frozenset()))
        await turn()
        assert made.waiting
        pool.set_ready("a", True, ("m",), MemberIndex(frozenset("m"), frozenset("m")))
        await turn()
        assert len(client.calls) == 2
        made.done(AttemptEnd.ANSWERED, "200")
        assert is_at_rest(pool)
        version = waiting(Client(), table, version="7")
        assert not version.not_found("404"), "it may be the version that there is not"
        version.done(AttemptEnd.ANSWERED, "404")

    asyncio.run(play())


def scaled_pool(*members: str) -> tuple[RouterPool, PoolDemand]:
    pool = made_pool("p", *members, scaling=ScalingPolicy(least=0, latency=60.0))
    assert pool.demand is not None
    return pool, pool.demand


def test_autoscaling_is_told_of_a_request_once_whatever_member_answers() -> None:
    client, (pool, demand) = Client(), scaled_pool("a", "b")
    made = exchange(client, pool, prompt_tokens=400.0, answer_tokens=10.0)
    made.begin()
    arrived = demand.arrived
    assert arrived == 110.0, "a token of a prompt is a quarter of one of an answer"
    made.failed(AttemptEnd.LOST, "is gone")
    assert demand.arrived == arrived
    for _ in range(10):
        made.progress(1.0)
    made.done(AttemptEnd.ANSWERED, "200")
    assert demand.done == arrived
    assert (demand.promises.answers, demand.promises.late, demand.turned_away) == (1, 0, 0)


def test_autoscaling_is_told_once_of_a_request_that_loses_its_member_and_waits() -> None:
    async def play() -> None:
        client, pool = Client(), held_pool("p", "a", scaling=ScalingPolicy(least=0, latency=60.0))
        assert pool.demand is not None
        pool.set_ready("a", True, ("m",))
        made = waiting(client, PoolTable([pool]))
        arrived = pool.demand.arrived
        assert arrived > 0
        pool.set_ready("a", False)
        made.failed(AttemptEnd.LOST, "is gone")
        assert made.waiting
        pool.set_ready("a", True, ("m",))
        await turn()
        assert len(client.calls) == 2
        assert pool.demand.arrived == arrived
        made.done(AttemptEnd.ANSWERED, "200")

    asyncio.run(play())


def test_autoscaling_is_told_of_tensors_and_of_refusals() -> None:
    client, (pool, demand) = Client(), scaled_pool("a")
    made = exchange(client, pool, answer_tokens=1.0)
    made.begin()
    made.done(AttemptEnd.ANSWERED, "200")
    assert (demand.arrived, demand.done) == (1.0, 1.0)
    made = exchange(client, pool)
    made.begin()
    made.done(AttemptEnd.REFUSED, "503")
    assert demand.turned_away == 1
    pool.set_ready("a", False, ())
    exchange(client, pool).begin()
    assert demand.turned_away == 2
    exchange(client, pool, model="other").begin()
    assert demand.turned_away == 2, "the pool is known not to serve it"


def test_autoscaling_counts_what_came_too_late() -> None:
    async def main() -> None:
        client, (pool, demand) = Client(), scaled_pool("a")
        RoutedExchange(PoolTable([pool]), client, RoutedRequest("m"), timeout=0.01).begin()
        await client.ended.wait()
        assert (demand.promises.answers, demand.promises.late) == (1, 1)

    asyncio.run(main())


def test_a_router_of_pools_that_may_be_empty_is_ready() -> None:
    pool, _ = scaled_pool()
    assert PoolTable([pool]).ready
    assert not PoolTable([made_pool("p")]).ready
