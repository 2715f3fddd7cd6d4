"""Pools that lend members: up to which load, what stays in reserve, and who has to leave for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.autoscaling.policy import ScalingPolicy
from nerite.balancing.member import AttemptEnd, Member, RoutedRequest
from nerite.balancing.policy import PoolPolicy
from nerite.cluster.settings import MemberSource, PoolSettings
from nerite.core.errors import NeriteError
from nerite.router.exchange import MOST_PREEMPTIONS, RoutedExchange
from nerite.router.pools import PoolTable, RouterPool

PATIENCE = 5.0


class Call:
    def __init__(self, place: tuple[str, str], *, idle: bool) -> None:
        self.place = place
        self.idle = idle
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Client:
    """A client's side that keeps what it is told."""

    def __init__(self) -> None:
        self.exchange: RoutedExchange
        self.calls: list[Call] = []
        self.told: list[NeriteError] = []
        self.sent = asyncio.Event()
        self.ended = asyncio.Event()

    def send_to(self, pool: RouterPool, member: Member) -> Call:
        self.calls.append(Call((pool.name, member.name), idle=self.exchange.idle_class))
        self.sent.set()
        return self.calls[-1]

    def refuse(self, error: NeriteError) -> None:
        self.told.append(error)
        self.ended.set()

    def break_off(self, error: NeriteError) -> None:
        self.told.append(error)

    @property
    def places(self) -> list[tuple[str, str]]:
        """Where it was sent, as pool and member."""
        return [call.place for call in self.calls]


def made_pool(name: str, *members: str, most: float = 0.0, **keys: Any) -> RouterPool:
    policy = PoolPolicy(retry_share=1.0, retry_floor=100.0, max_requests=most)
    pool = RouterPool(PoolSettings(name, MemberSource(), balancing=policy, classes=(name,), **keys))
    pool.set_members([Member(each, f"{each}:80") for each in members])
    for each in members:
        pool.set_ready(each, True, ("m",))
    return pool


class Router:
    """Sends requests to pools."""

    def __init__(self, *pools: RouterPool) -> None:
        self.table = PoolTable(pools)

    def send(self, level: str, attempts: int = 3, timeout: float = 0.0, **request: Any) -> Client:
        client = Client()
        routed = RoutedRequest("m")._replace(**request)
        client.exchange = RoutedExchange(self.table, client, routed, level=level, attempts=attempts, timeout=timeout)
        client.exchange.begin()
        return client

    def places(self, level: str, count: int) -> list[tuple[str, str]]:
        """Return where so many requests go."""
        return [place for _ in range(count) for place in self.send(level).places]

    @property
    def at_rest(self) -> bool:
        return all(
            not (pool.under_way or pool.lent_requests or pool.yielding)
            and not any(load.requests for load in pool.balancer.members)
            for pool in self.table.pools
        )


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


async def sent(client: Client, times: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(client.calls) < times:
            client.sent.clear()
            await client.sent.wait()


def test_a_member_takes_requests_of_others_up_to_what_it_lends() -> None:
    router = Router(made_pool("own", "a", lends=2), made_pool("batch", "b", most=1, borrows=True))
    assert router.places("batch", 4) == [("batch", "b"), ("own", "a"), ("own", "a")]
    assert router.table.refused == {"429": 1}


def test_its_own_requests_count() -> None:
    router = Router(made_pool("own", "a", lends=2), made_pool("batch", "b", most=1, borrows=True))
    router.send("own")
    assert router.places("batch", 3) == [("batch", "b"), ("own", "a")]


def test_lending_is_by_capacity_and_for_nobody_at_0() -> None:
    lender = made_pool("own", "a", lends=0)
    router = Router(lender, made_pool("batch", "b", most=1, borrows=True))
    assert router.places("batch", 2) == [("batch", "b")]
    large = made_pool("own", "a", lends=1)
    large.set_members([Member("a", "a:80", capacity=3.0)])
    router = Router(large, made_pool("batch", "b", most=1, borrows=True))
    assert router.places("batch", 6) == [("batch", "b"), *[("own", "a")] * 3]


def test_the_reserve_stays_free() -> None:
    lender = made_pool("own", "a", "c", "d", lends=2, reserve=2)
    router = Router(lender, made_pool("batch", "b", most=1, borrows=True))
    found = router.places("batch", 5)
    assert found[0] == ("batch", "b")
    assert len(found) == 3
    assert len(set(found[1:])) == 1, "one member has both"
    lender.set_ready(found[1][1], False)
    assert router.places("batch", 1) == [], "two are left, and both stay"


def test_both_borrow() -> None:
    router = Router(
        made_pool("own", "a", most=1, borrows=True, lends=1), made_pool("batch", "b", most=1, borrows=True, lends=1)
    )
    assert router.places("own", 3) == [("own", "a"), ("batch", "b")]
    assert router.places("batch", 1) == []


def test_sequences_stay_with_their_pools() -> None:
    router = Router(made_pool("own", "a"), made_pool("batch", "b", most=1, borrows=True))
    router.send("batch")
    (error,) = router.send("batch", sequence="s", repeatable=False).told
    assert error.http_status == 429


def test_a_lent_request_is_of_the_idle_class_while_it_can_be_sent_again() -> None:
    router = Router(made_pool("own", "a", lends=9), made_pool("batch", "b", most=1, borrows=True))
    assert not router.send("batch").calls[0].idle, "it is at home"
    assert router.send("batch").calls[0].idle
    assert not router.send("batch", streams=True).calls[0].idle
    assert not router.send("batch", repeatable=False).calls[0].idle
    assert not router.send("batch", attempts=1).calls[0].idle


def test_an_own_request_stops_one_that_has_borrowed(loop: asyncio.AbstractEventLoop) -> None:
    async def work() -> None:
        own = made_pool("own", "a", lends=2, preempts=True)
        router = Router(own, made_pool("batch", "b", most=1, borrows=True))
        home, first, second = (router.send("batch") for _ in range(3))
        assert first.places == second.places == [("own", "a")]
        mine = router.send("own")
        assert mine.places == [("own", "a")]
        assert second.calls[0].cancelled and not first.calls[0].cancelled, "the newest leaves"
        assert (own.preempted, own.retries["preempted"], own.answers["a", "preempted"]) == (1, 1, 1)
        home.exchange.done(AttemptEnd.ANSWERED, "200")
        await sent(second, 2)
        assert second.places[1] == ("batch", "b")
        for each in (first, second, mine):
            each.exchange.answer_begins()
            each.exchange.done(AttemptEnd.ANSWERED, "200")
        assert router.at_rest

    loop.run_until_complete(work())


def test_where_there_is_room_nothing_is_stopped(loop: asyncio.AbstractEventLoop) -> None:
    async def work() -> None:
        own = made_pool("own", "a", lends=2, preempts=True)
        router = Router(own, made_pool("batch", "b", most=1, borrows=True))
        router.send("batch")
        lent = router.send("batch")
        router.send("own")
        assert not lent.calls[0].cancelled
        assert own.preempted == 0

    loop.run_until_complete(work())


@pytest.mark.parametrize("request_", [{"repeatable": False}, {"begun": True}])
def test_what_cannot_be_sent_again_is_not_stopped(loop: asyncio.AbstractEventLoop, request_: dict[str, bool]) -> None:
    async def work() -> None:
        own = made_pool("own", "a", lends=1, preempts=True)
        router = Router(own, made_pool("batch", "b", most=1, borrows=True))
        router.send("batch")
        begun = request_.pop("begun", False)
        lent = router.send("batch", **request_)
        if begun:
            lent.exchange.answer_begins()
        router.send("own")
        assert not lent.calls[0].cancelled
        assert own.preempted == 0

    loop.run_until_complete(work())


@pytest.mark.parametrize("preempts", [True, False])
def test_work_that_leaves_does_not_drive_own_requests_away(loop: asyncio.AbstractEventLoop, preempts: bool) -> None:
    async def work() -> None:
        own = made_pool("own", "a", "c", lends=3, reserve=1, preempts=preempts)
        router = Router(own, made_pool("batch", "b", most=1, borrows=True))
        places = [router.send("batch", prompt_tokens=4000.0).places for _ in range(4)]
        ((_, lent),) = {place for each in places[1:] for place in each}
        free = "c" if lent == "a" else "a"
        first, second = (router.send("own", prompt_tokens=400.0).places[0][1] for _ in range(2))
        assert first == free
        assert second == (lent if preempts else free)
        assert own.preempted == int(preempts)

    loop.run_until_complete(work())


def test_a_full_pool_stops_what_it_has_lent_for_its_own(loop: asyncio.AbstractEventLoop) -> None:
    async def work() -> None:
        own = made_pool("own", "a", most=2, lends=2, preempts=True)
        router = Router(own, made_pool("batch", "b", most=1, borrows=True))
        router.send("batch")
        lent = [router.send("batch") for _ in range(2)]
        assert [each.places for each in lent] == [[("own", "a")]] * 2
        assert router.places("own", 3) == [("own", "a")] * 2
        assert [each.calls[0].cancelled for each in lent] == [True, True]
        assert own.preempted == 2

    loop.run_until_complete(work())


def test_a_pool_that_comes_first_stops_work_of_the_members_that_it_borrows(loop: asyncio.AbstractEventLoop) -> None:
    async def work() -> None:
        own = made_pool("own", "a", most=1, borrows=True, preempts=True, lends=0)
        batch = made_pool("batch", "b", most=2)
        router = Router(own, batch)
        work = [router.send("batch") for _ in range(2)]
        assert router.places("own", 2) == [("own", "a"), ("batch", "b")]
        assert [each.calls[0].cancelled for each in work] == [False, True]
        assert batch.preempted == 1
        other = router.send("own")
        assert other.places == [("batch", "b")]
        assert router.send("own").told[0].http_status == 429, "who comes first is not stopped"

    loop.run_until_complete(work())


def test_a_request_leaves_so_often_and_no_more(loop: asyncio.AbstractEventLoop) -> None:
    async def work() -> None:
        own = made_pool("own", "a", lends=1, preempts=True)
        batch = made_pool("batch", "b", most=1, borrows=True)
        router = Router(own, batch)
        home = router.send("batch")
        lent = router.send("batch")
        for times in range(1, MOST_PREEMPTIONS + 1):
            assert lent.places == [("own", "a")] * times
            mine = router.send("own")
            assert lent.calls[-1].cancelled
            mine.exchange.done(AttemptEnd.ANSWERED, "200")
            if times < MOST_PREEMPTIONS:
                await sent(lent, times + 1)
        await asyncio.sleep(0.1)
        assert len(lent.calls) == MOST_PREEMPTIONS, "it waits for its own pool"
        home.exchange.done(AttemptEnd.ANSWERED, "200")
        await sent(lent, MOST_PREEMPTIONS + 1)
        assert lent.places[-1] == ("batch", "b")
        lent.exchange.cancel()
        assert router.at_rest

    loop.run_until_complete(work())


def test_a_member_that_refuses_a_lent_request_is_tried_again_later(loop: asyncio.AbstractEventLoop) -> None:
    async def work() -> None:
        own = made_pool("own", "a", lends=1)
        router = Router(own, made_pool("batch", "b", most=1, borrows=True))
        router.send("batch")
        lent = router.send("batch")
        assert lent.exchange.refused("503")
        await sent(lent, 2)
        assert lent.places == [("own", "a")] * 2
        assert (lent.told, own.answers["a", "503"]) == ([], 1)
        lent.exchange.done(AttemptEnd.ANSWERED, "200")

    loop.run_until_complete(work())


def test_one_that_waits_for_room_ends_with_its_client_or_its_deadline(loop: asyncio.AbstractEventLoop) -> None:
    async def work() -> None:
        own = made_pool("own", "a", lends=2, preempts=True)
        router = Router(own, made_pool("batch", "b", most=1, borrows=True))
        router.send("batch")
        gone, late = router.send("batch"), router.send("batch", timeout=0.05)
        router.places("own", 2)
        assert gone.calls[0].cancelled and late.calls[0].cancelled
        gone.exchange.cancel()
        assert gone.exchange.over
        async with asyncio.timeout(PATIENCE):
            await late.ended.wait()
        assert [error.http_status for error in late.told] == [504]
        assert (len(gone.calls), len(late.calls)) == (1, 1)

    loop.run_until_complete(work())


@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["own", "batch", "answer", "begin", "refuse", "lose", "cancel", "turn"]), st.integers(0, 9)
        ),
        max_size=60,
    ),
    lends=st.integers(0, 3),
    reserve=st.integers(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_whatever_happens_every_request_ends_once(actions: list[tuple[str, int]], lends: int, reserve: int) -> None:
    async def work() -> None:
        own = made_pool("own", "a", "c", most=2, lends=lends, reserve=reserve, preempts=True, borrows=True)
        batch = made_pool("batch", "b", most=2, borrows=True)
        router = Router(own, batch)
        clients: list[Client] = []
        for action, number in actions:
            alive = [each for each in clients if not each.exchange.over]
            if action in ("own", "batch"):
                clients.append(router.send(action, attempts=1 + number % 3))
            elif action == "turn":
                await asyncio.sleep(0)
            elif alive:
                chosen = alive[number % len(alive)]
                exchange = chosen.exchange
                call = chosen.calls[-1] if chosen.calls else None
                if action == "cancel":
                    exchange.cancel()
                elif call is None or call.cancelled:
                    pass  # it waits for room: nothing can come from a member
                elif action == "answer":
                    exchange.done(AttemptEnd.ANSWERED, "200")
                elif action == "begin":
                    exchange.answer_begins()
                elif action == "lose":
                    call.cancel()  # nothing comes from it any more
                    exchange.failed(AttemptEnd.LOST, "is gone")
                elif exchange.refused("503"):
                    call.cancel()
                else:
                    exchange.done(AttemptEnd.REFUSED, "503")
            lent = sum(load.requests for load in own.balancer.members) - own.under_way
            assert lent == 0
            assert own.lent_requests <= own.under_way
        for each in clients:
            each.exchange.cancel()
        assert router.at_rest
        assert all(each.exchange.over and len(each.told) <= 1 for each in clients)

    asyncio.run(work())


def test_the_demand_of_a_pool_is_that_of_its_own_requests() -> None:
    lender = made_pool("own", "a", lends=2, scaling=ScalingPolicy(least=1, latency=60.0))
    router = Router(lender, made_pool("batch", "b", most=1, borrows=True))
    demand = lender.demand
    assert demand is not None
    router.send("batch")
    lent = router.send("batch")
    assert (lent.places, demand.arrived) == ([("own", "a")], 0)
    lent.exchange.done(AttemptEnd.ANSWERED, "200")
    assert demand.done > 0, "its members have done the work"
    assert demand.promises.answers == 0, "nobody has promised it"
    router.send("own").exchange.done(AttemptEnd.ANSWERED, "200")
    assert demand.arrived > 0
    assert demand.promises.answers == 1


def test_a_request_that_waits_goes_on_when_another_pool_has_room_to_lend() -> None:
    async def play() -> None:
        lender = made_pool("own", "a", lends=1)
        borrower = made_pool("batch", borrows=True, hold_requests=1, serves=("m",))
        router = Router(lender, borrower)
        first = router.send("own")
        held = Client()
        held.exchange = RoutedExchange(router.table, held, RoutedRequest("m"), level="batch", attempts=3, waits=True)
        held.exchange.begin()
        assert held.exchange.waiting
        first.exchange.done(AttemptEnd.ANSWERED, "200")
        await sent(held, 1)
        assert held.places == [("own", "a")]
        held.exchange.done(AttemptEnd.ANSWERED, "200")
        assert router.at_rest
        assert borrower.held == 0

    asyncio.run(play())
