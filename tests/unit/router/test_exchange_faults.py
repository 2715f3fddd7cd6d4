"""Requests with exceptions that nothing foresaw, planted in each place: each ends once, and all it has comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from h2_member import Member as H2Member
from h2_member import Server, Sink
from test_exchange import Call, Client, is_at_rest, made_pool
from test_grpc_channel import BLOCK
from test_member_connection import OK, Taker, Transport, opened, run

from nerite.admission.policy import AdmissionPolicy
from nerite.balancing.member import AttemptEnd, RoutedRequest
from nerite.core.request import Caller
from nerite.router import exchange as exchange_module
from nerite.router.admission import AdmissionRequest, RouterAdmission
from nerite.router.exchange import RoutedExchange
from nerite.router.grpc_channel import GrpcChannel
from nerite.router.member_connection import MemberConnection, MemberConnections
from nerite.router.pools import PoolTable
from nerite.router.silence import SilenceWatch


class Fault(Exception):
    """What nothing foresaw."""


def fails(*_: object, **__: object) -> Any:
    raise Fault


class Account:
    """The account of a request, which fails when it is told something."""

    request_id = ""
    first_ns = prompt_tokens = cached_tokens = answer_tokens = parts = 0

    def __init__(self, *failing: str) -> None:
        for name in ("sent", "ended"):
            setattr(self, name, fails if name in failing else lambda *_, **__: None)


class World:
    """An exchange with admission control in front of a pool that lends a member to another one."""

    def __init__(self) -> None:
        self.own = made_pool("own", borrows=True)
        self.lending = made_pool("lending", "a", "b", lends=8.0, preempts=True)
        self.table = PoolTable([self.own, self.lending])
        self.gate = RouterAdmission(AdmissionPolicy(), asyncio.get_running_loop())
        self.client = Client()
        self.asks = AdmissionRequest(Caller("acme"), "m", True, 1)
        self.exchange = RoutedExchange(
            self.table, self.client, RoutedRequest("m"), attempts=3, gate=self.gate, asks=self.asks, level="idle"
        )

    def at_rest(self) -> bool:
        pools = (self.own, self.lending)
        counted = [(pool.exchanges, pool.lent, pool.yielding, pool.idle) for pool in pools]
        return is_at_rest(*pools) and not any(map(any, counted)) and self.gate.waiting == self.running == 0

    @property
    def running(self) -> int:
        return sum(each["running"] for each in self.gate.quota()["models"])


def failing_client(world: World) -> None:
    world.client.send_to = fails  # type: ignore[method-assign]


def failing_choice(world: World) -> None:
    world.table.choose = fails  # type: ignore[method-assign]


def failing_account(world: World) -> None:
    world.exchange.account = cast(Any, Account("sent"))


def failing_gate(world: World) -> None:
    world.gate.submit = fails  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [failing_client, failing_choice, failing_account, failing_gate])
def test_a_request_that_cannot_be_sent_ends_and_gives_back_what_it_has(plant: Callable[[World], None]) -> None:
    async def work() -> None:
        world = World()
        plant(world)
        world.exchange.begin()
        (error,) = world.client.told
        assert error.http_status == 500 and "incident" in error.message
        assert world.exchange.over and world.at_rest() and not world.gate.waiting
        other = Client()
        world.client.__dict__.pop("send_to", None)
        for mended in (world.table, world.gate):
            mended.__dict__.pop("choose", None)
            mended.__dict__.pop("submit", None)
        again = RoutedExchange(world.table, other, RoutedRequest("m"), gate=world.gate, asks=world.asks)
        again.begin()
        assert world.running == 1
        again.done(AttemptEnd.ANSWERED, "200")
        assert world.at_rest() and not other.told

    asyncio.run(work())


def test_a_second_attempt_that_cannot_be_sent() -> None:
    async def work() -> None:
        for plant in (failing_client, failing_choice):
            world = World()
            world.exchange.begin()
            plant(world)
            world.exchange.failed(AttemptEnd.LOST, "is gone")
            (error,) = world.client.told
            assert error.http_status in (500, 502)
            assert world.exchange.over and world.at_rest()

    asyncio.run(work())


def test_a_call_that_cannot_be_cancelled_and_a_client_that_cannot_be_told() -> None:
    async def work() -> None:
        class Stubborn(Call):
            def cancel(self) -> None:
                raise Fault

        world = World()
        world.client.send_to = lambda pool, member: Stubborn(member)  # type: ignore[method-assign]
        world.exchange.begin()
        world.exchange.abandon(Fault())
        assert world.client.told and world.exchange.over and world.at_rest()
        world = World()
        world.client.refuse = fails  # type: ignore[method-assign]
        world.exchange.begin()
        world.exchange.abandon(Fault())
        assert world.exchange.over and world.at_rest()

    asyncio.run(work())


def test_an_account_that_cannot_be_closed_keeps_nothing() -> None:
    async def work() -> None:
        world = World()
        world.exchange.account = cast(Any, Account("ended"))
        world.exchange.begin()
        with pytest.raises(Fault):
            world.exchange.done(AttemptEnd.ANSWERED, "200")
        assert world.exchange.over and world.at_rest()

    asyncio.run(work())


def test_one_exchange_that_fails_keeps_no_other_from_being_admitted() -> None:
    async def work() -> None:
        world = World()
        failing_client(world)
        world.exchange.admitted("standard", 0)
        world.exchange.rejected(Fault())  # type: ignore[arg-type]
        assert len(world.client.told) == 1 and world.at_rest()

    asyncio.run(work())


# Connections.


def test_a_waiter_that_fails_costs_neither_the_response_before_it_nor_the_count() -> None:
    async def work(owner: MemberConnections) -> None:
        class Broken(Taker):
            def connected(self, connection: MemberConnection) -> None:
                super().connected(connection)
                raise Fault

        connection, transport = opened(owner)
        first = Taker(connection)
        connection.request(first, [b"a"])
        broken, last = Broken(connection), Taker(connection)
        owner.acquire(broken)
        owner.acquire(last)
        connection.data_received(OK + b"body")
        assert first.told == ["whole"]
        assert transport.aborted and any("could not be asked: internal error" in each for each in broken.told)
        connection.connection_lost(None)
        await last.refused.wait()  # nothing listens; it was tried
        assert owner.open == 0

    run(work)


def test_a_connection_that_is_made_when_its_time_is_over_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(owner: MemberConnections) -> None:
        made: list[MemberConnection] = []

        async def connect(factory: Callable[[], MemberConnection], *_: object, **__: object) -> None:
            made.append(factory())
            made[0].connection_made(cast(Any, Transport()))
            raise TimeoutError

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect, raising=False)
        taker = Taker(cast(Any, None))
        owner.acquire(taker)
        await taker.refused.wait()
        assert made[0].closed
        made[0].connection_lost(None)
        assert owner.open == 0

    run(work)


def test_a_call_that_cannot_begin_keeps_no_other_from_it() -> None:
    async def main() -> None:
        server = Server()
        listening = await asyncio.get_running_loop().create_server(lambda: H2Member(server), "127.0.0.1", 0)
        channel = GrpcChannel(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", 5.0)
        sinks = [Sink() for _ in range(3)]
        calls = [channel.start(BLOCK, sink) for sink in sinks]
        calls[1].block = cast(Any, None)
        for call in calls:
            call.send((b"",), True)
        async with asyncio.timeout(10):
            for sink in sinks:
                await sink.over.wait()
        assert [sink.told[-1] for sink in (sinks[0], sinks[2])] == [b"0", b"0"]
        why, unprocessed = sinks[1].told
        assert "could not be asked: internal error" in str(why) and unprocessed
        channel.abort("the test has ended")
        listening.close()

    asyncio.run(main())


# Silence.


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10**12
        monkeypatch.setattr(exchange_module, "monotonic_ns", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Silence:
    """A request at a member with an idle timeout of 10 s, at which the watch looks every second."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.pool, self.client = made_pool("p", "a", "b", idle_timeout=10.0), Client()
        self.watch = SilenceWatch([self.pool])
        self.exchange = RoutedExchange(PoolTable([self.pool]), self.client, RoutedRequest("m"), attempts=3)
        self.exchange.begin()

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.now += 10**9
            self.watch.look(self.clock.now)


def test_a_member_that_sends_nothing_is_given_up(clock: Clock) -> None:
    made = Silence(clock)
    made.wait(9)
    assert not made.exchange.over
    made.wait(1)
    (error,), (call,) = made.client.told, made.client.calls
    assert (error.http_status, error.grpc_status) == (504, 4)
    assert error.message == (
        f"member '{call.member.name}' of pool 'p' has sent nothing for 10 s, the idle-timeout of the pool"
    )
    assert call.cancelled and is_at_rest(made.pool) and not made.pool.exchanges
    assert made.pool.answers[call.member.name, "lost"] == 1


def test_a_stream_is_broken_off_when_it_falls_silent(clock: Clock) -> None:
    made = Silence(clock)
    made.wait(8)
    made.exchange.answer_begins()
    for _ in range(5):
        made.wait(8)
        made.exchange.heard = True
    made.wait(10)
    assert not made.exchange.over
    made.wait(1)
    (error,) = made.client.broken
    assert error.grpc_status == 4 and made.client.calls[0].cancelled and is_at_rest(made.pool)


def test_who_owes_nothing_may_be_silent(clock: Clock) -> None:
    """The client does not read, or keeps a stream open on which it asks for nothing."""
    made = Silence(clock)
    made.client.calls[0].owed = False
    made.wait(100)
    made.client.calls[0].owed = True
    made.wait(9)
    assert not made.exchange.over
    made.wait(1)
    assert made.exchange.over


def test_one_request_that_fails_keeps_no_other_from_ending(clock: Clock) -> None:
    made, other = Silence(clock), Silence(clock)
    made.pool.exchanges[other.exchange] = None
    made.client.refuse = fails  # type: ignore[method-assign]
    made.wait(10)
    assert made.exchange.over and other.exchange.over and is_at_rest(made.pool, other.pool)
    assert made.watch.loop.failures
