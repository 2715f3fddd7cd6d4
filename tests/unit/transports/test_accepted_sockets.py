"""Sockets that a port accepts and passes on, and connections that another process hands over."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from nerite.transports.limits import TransportLimits
from nerite.transports.tcp import AcceptingPort, AdoptedPort

REFUSAL = b"no more"


class TimedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes when a test says so."""

    now = 1000.0

    def time(self) -> float:
        return self.now


def run(story: Callable[[TimedLoop], Coroutine[Any, Any, None]]) -> None:
    async def told() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TimedLoop)
        await story(loop)

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        runner.run(told())


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


class Taker:
    """Takes sockets as long as ``takes`` is true."""

    def __init__(self) -> None:
        self.takes = True
        self.offered: list[socket.socket] = []
        self.taken: list[socket.socket] = []

    def take(self, accepted: socket.socket) -> bool:
        self.offered.append(accepted)
        if self.takes:
            self.taken.append(accepted)
        return self.takes


class Listening:
    """A port, and clients that connect to it."""

    def __init__(self) -> None:
        self.taker = Taker()
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        self.port = AcceptingPort([listening], self.taker.take)
        self.clients: list[socket.socket] = []

    def connect(self, count: int = 1) -> None:
        for _ in range(count):
            self.clients.append(socket.create_connection(("127.0.0.1", self.port.number)))

    def peers(self) -> list[int]:
        """Return the places of the clients whose sockets were taken."""
        places = {client.getsockname(): place for place, client in enumerate(self.clients)}
        return [places[taken.getpeername()] for taken in self.taker.taken]

    def close(self) -> None:
        if self.port.sockets[0].fileno() >= 0:
            self.port.close()
        for each in (*self.clients, *self.taker.taken):
            each.close()


def run_with_port(story: Callable[[TimedLoop, Listening], Coroutine[Any, Any, None]]) -> None:
    async def told(loop: TimedLoop) -> None:
        fixture = Listening()
        try:
            await story(loop, fixture)
        finally:
            fixture.close()

    run(told)


def test_connections_that_cannot_be_taken_wait_in_their_order() -> None:
    async def story(loop: TimedLoop, fixture: Listening) -> None:
        taker = fixture.taker
        fixture.connect()
        await settle()
        taker.takes = False
        fixture.connect(3)
        await settle()
        assert fixture.peers() == [0]
        assert len(taker.offered) == 2, "the others wait in the backlog"
        for turns in range(1, 4):
            loop.now += 0.02
            await settle()
            assert len(taker.offered) == 2 + turns
        assert len(set(taker.offered[1:])) == 1, "the same one is offered again"
        taker.takes = True
        loop.now += 0.02
        await settle()
        assert fixture.peers() == [0, 1, 2, 3]

    run_with_port(story)


def test_a_port_that_is_closed_closes_the_connection_that_waits() -> None:
    async def story(loop: TimedLoop, fixture: Listening) -> None:
        fixture.taker.takes = False
        fixture.connect()
        await settle()
        (held,) = fixture.taker.offered
        fixture.port.close()
        assert held.fileno() == -1
        assert fixture.clients[0].recv(1) == b""
        loop.now += 1
        await settle()
        assert len(fixture.taker.offered) == 1

    run_with_port(story)


class Connection(asyncio.Protocol):
    """A connection whose protocol has begun."""

    served = 0
    busy = False

    def __init__(self, port: Adopted) -> None:
        self._port = port

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._port.begun += 1
        self._port.bounds.connections.add(self, 0)

    def connection_lost(self, error: Exception | None) -> None:
        self._port.bounds.connections.remove(self)
        self._port.closed += 1

    def retire(self) -> None:
        self._transport.abort()

    def drain(self) -> None:
        raise AssertionError("nobody drains")


class Adopted:
    """A port whose connections are handed over."""

    def __init__(self) -> None:
        self.bounds = TransportLimits()
        self.begun = self.closed = 0
        self.port = AdoptedPort(lambda: Connection(self), self.bounds, REFUSAL, None, self._closed)

    def _closed(self) -> None:
        self.closed += 1

    def adopt(self, limit: int = 0) -> socket.socket:
        """Hand over a connection; return the client's socket."""
        client, accepted = socket.socketpair()
        client.setblocking(False)
        self.port.adopt(accepted, limit)
        return client


def test_a_connection_that_has_just_begun_makes_room_for_the_next() -> None:
    async def story(_loop: TimedLoop) -> None:
        adopted = Adopted()
        first, second = adopted.adopt(), adopted.adopt(limit=1)
        with first, second:
            await settle()
            assert (adopted.begun, adopted.closed) == (1, 1)
            assert first.recv(1) == b""
            assert len(adopted.bounds.connections) == 1
            assert adopted.bounds.closed["displaced"] == 1
            with adopted.adopt(limit=1) as third:
                await settle()
                assert second.recv(1) == b""
                assert (adopted.begun, adopted.closed) == (2, 2)
                for each in list(adopted.bounds.connections):
                    each.retire()
                await settle()
                assert third.recv(1) == b""
                assert (len(adopted.bounds.connections), adopted.closed) == (0, 3)

    run(story)


def test_without_an_idle_connection_the_next_is_refused() -> None:
    async def story(loop: TimedLoop) -> None:
        adopted = Adopted()
        with adopted.adopt() as first:
            await settle()
            (connection,) = adopted.bounds.connections
            assert isinstance(connection, Connection)
            connection.busy = True
            with adopted.adopt(limit=1) as second:
                await settle()
                assert second.recv(100) == REFUSAL
                assert (adopted.begun, adopted.closed) == (1, 1)
                assert adopted.bounds.closed["refused"] == 1
                loop.now += 2
                connection.retire()
                await settle()
                assert first.recv(1) == b""

    run(story)
