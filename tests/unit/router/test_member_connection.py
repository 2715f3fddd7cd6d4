"""Connections to members without sockets: whose they are, when they are kept, and how their ends are told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from nerite.router import member_connection
from nerite.router.member_connection import MemberConnection, MemberConnections
from nerite.router.response_body import MANY_CHUNKS, ChunkScanner
from nerite.router.response_head import MAX_RESPONSE_HEAD, ResponseHead, ResponseHeads

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"


class Transport:
    def __init__(self) -> None:
        self.sent = b""
        self.reading = True
        self.aborted = False
        self.options: dict[int, int] = {}

    def get_extra_info(self, name: str) -> Any:
        """Return the socket."""
        return self

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if level == socket.IPPROTO_TCP:
            self.options[option] = value

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, parts: list[bytes]) -> None:
        self.sent += b"".join(parts)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


class Taker:
    """Takes a response, and may do something when data comes."""

    def __init__(self, connection: MemberConnection, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.told: list[str] = []
        self.refused = asyncio.Event()
        self.data = b""
        self._connection = connection
        self._meanwhile = meanwhile

    def connected(self, connection: MemberConnection) -> None:
        self.told.append("connected")

    def unconnected(self, cause: str) -> None:
        self.told.append(cause)
        self.refused.set()

    def take_whole(self, head: ResponseHead, load: bytes, body: Any) -> None:
        self.data += bytes(body)
        self.told.append("whole")

    def take_head(self, head: ResponseHead, load: bytes) -> None:
        self.told.append("head")

    def take_data(self, data: Any, scanner: ChunkScanner | None) -> None:
        self.data += bytes(data)
        self._meanwhile()

    def take_end(self) -> None:
        self.told.append("end")

    def take_loss(self, cause: str, *, stale: bool) -> None:
        self.told.append(f"{cause}{' stale' if stale else ''}")


def opened(owner: MemberConnections) -> tuple[MemberConnection, Transport]:
    connection, transport = MemberConnection(owner), Transport()
    connection.connection_made(cast(Any, transport))
    owner.open += 1
    return connection, transport


def run(work: Callable[[MemberConnections], Coroutine[Any, Any, None]]) -> None:
    async def inside() -> None:
        await work(MemberConnections("127.0.0.1:1", ResponseHeads(), 2.0))

    asyncio.run(inside())


def test_a_response_that_ends_while_its_client_is_slow_leaves_the_connection_readable() -> None:
    async def work(owner: MemberConnections) -> None:
        connection, transport = opened(owner)
        taker = Taker(connection, lambda: connection.pause(True))
        connection.request(taker, [b"GET"])
        connection.data_received(OK + b"ab")
        assert not transport.reading
        connection.data_received(b"cd")
        assert (taker.told, taker.data) == (["head", "end"], b"abcd")
        assert transport.reading

    run(work)


def test_who_waits_is_told_that_no_connection_can_be_opened_whatever_the_reason() -> None:
    async def main() -> None:
        owner = MemberConnections("[::1%no\0scope]:1", ResponseHeads(), 2.0)
        taker = Taker(cast(Any, None))
        owner.acquire(taker)
        await asyncio.wait_for(taker.refused.wait(), 5)
        assert "cannot be reached" in taker.told[0]
        assert owner.open == 0

    asyncio.run(main())


def test_a_kept_connection_goes_to_who_waits() -> None:
    async def work(owner: MemberConnections) -> None:
        connection, transport = opened(owner)
        owner.release(connection)
        taker = Taker(connection)
        owner.acquire(taker)
        assert taker.told == ["connected"]
        connection.request(taker, [b"a", b"b"])
        assert transport.sent == b"ab"
        connection.data_received(OK + b"data")
        assert taker.told == ["connected", "whole"]
        again = Taker(connection)
        owner.acquire(again)
        assert again.told == ["connected"]

    run(work)


@pytest.mark.parametrize(
    ("response", "kept"),
    [
        (OK + b"data", True),
        (OK + b"data more", False),
        (OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"data", False),
    ],
)
def test_which_connections_are_kept(response: bytes, kept: bool) -> None:
    async def work(owner: MemberConnections) -> None:
        connection, transport = opened(owner)
        taker = Taker(connection)
        connection.request(taker, [b"a"])
        connection.data_received(response)
        assert taker.told == ["whole"]
        assert transport.aborted != kept

    run(work)


def test_what_nobody_has_asked_closes_the_connection() -> None:
    async def work(owner: MemberConnections) -> None:
        connection, transport = opened(owner)
        owner.release(connection)
        connection.data_received(OK + b"data")
        assert transport.aborted

    run(work)


def test_losses() -> None:
    async def work(owner: MemberConnections) -> None:
        first, _ = opened(owner)
        taker = Taker(first)
        first.request(taker, [b"a"])
        first.connection_lost(None)
        assert taker.told == ["closed the connection without an answer"]
        kept, _ = opened(owner)
        for _ in range(2):
            taker = Taker(kept)
            kept.request(taker, [b"a"])
            if not kept.served:
                kept.data_received(OK + b"data")
        kept.connection_lost(None)
        assert taker.told == ["closed the connection without an answer stale"]
        broken, _ = opened(owner)
        taker = Taker(broken)
        broken.request(taker, [b"a"])
        broken.data_received(OK + b"da")
        broken.connection_lost(ConnectionResetError(104, "Connection reset by peer"))
        assert taker.told[0] == "head"
        assert taker.told[1].startswith("closed the connection before the end of its answer (Connection reset")
        until, _ = opened(owner)
        taker = Taker(until)
        until.request(taker, [b"a"])
        until.data_received(b"HTTP/1.1 200 OK\r\n\r\nabc")
        until.connection_lost(None)
        assert (taker.told, taker.data) == (["head", "end"], b"abc")
        assert owner.open == 0

    run(work)


def test_an_abandoned_response_tells_nothing() -> None:
    async def work(owner: MemberConnections) -> None:
        connection, transport = opened(owner)
        taker = Taker(connection)
        connection.request(taker, [b"a"])
        connection.abandon()
        assert transport.aborted
        connection.connection_lost(None)
        assert taker.told == []

    run(work)


def test_a_retired_member_keeps_no_connection() -> None:
    async def work(owner: MemberConnections) -> None:
        idle, idle_transport = opened(owner)
        owner.release(idle)
        busy, busy_transport = opened(owner)
        busy.request(Taker(busy), [b"a"])
        owner.retire()
        assert idle_transport.aborted
        assert not busy_transport.aborted
        busy.data_received(OK + b"data")
        assert busy_transport.aborted

    run(work)


@pytest.mark.parametrize("pieces", [1, 1000])
def test_a_head_that_is_too_long(pieces: int) -> None:
    """However it comes."""

    async def work(owner: MemberConnections) -> None:
        connection, transport = opened(owner)
        taker = Taker(connection)
        connection.request(taker, [b"a"])
        head = OK.replace(b"\r\n\r\n", b"\r\nA: %b\r\n\r\n" % (b"a" * MAX_RESPONSE_HEAD)) + b"data"
        for at in range(0, len(head), len(head) // pieces):
            connection.data_received(head[at : at + len(head) // pieces])
            if transport.aborted:
                break
        assert taker.told == [f"sent a head of more than {MAX_RESPONSE_HEAD} bytes"]

    run(work)


def test_interim_responses() -> None:
    async def work(owner: MemberConnections) -> None:
        connection, _ = opened(owner)
        for _ in range(3):
            taker = Taker(connection)
            connection.request(taker, [b"a"])
            connection.data_received(b"HTTP/1.1 100 Continue\r\n\r\n" * 50 + OK + b"data")
            assert taker.told == ["whole"]
        connection.request(taker, [b"a"])
        connection.data_received(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 200)
        assert taker.told[1:] == ["sent more than 100 interim responses"]

    run(work)


def test_everybody_who_waits_is_told_that_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_connection, "MAX_CONNECTIONS", 2)

    async def work(owner: MemberConnections) -> None:
        takers = [Taker(cast(Any, None)) for _ in range(7)]
        for taker in takers:
            owner.acquire(taker)
        async with asyncio.timeout(5.0):
            for taker in takers:
                await taker.refused.wait()
        assert {len(taker.told) for taker in takers} == {1}
        assert owner.open == 0

    run(work)


def test_connections_that_are_lost_are_replaced_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_connection, "MAX_CONNECTIONS", 2)

    async def work(owner: MemberConnections) -> None:
        lost = [opened(owner)[0] for _ in range(2)]
        for connection in lost:
            connection.request(Taker(connection), [b"a"])
        takers = [Taker(cast(Any, None)) for _ in range(5)]
        for taker in takers:
            owner.acquire(taker)
        for connection in lost:
            connection.connection_lost(None)
        async with asyncio.timeout(5.0):
            for taker in takers:
                await taker.refused.wait()

    run(work)


@pytest.mark.parametrize("slow", [False, True])
def test_very_many_chunks_are_taken_in_several_turns(slow: bool) -> None:
    count = 5 * MANY_CHUNKS // 2
    body = b"1\r\nx\r\n2;a\r\nyz\r\n" * (count // 2) + b"0\r\n\r\n"

    async def work(owner: MemberConnections) -> None:
        connection, transport = opened(owner)
        turns: list[int] = []
        taker = Taker(connection, lambda: turns.append(len(taker.data)))
        connection.request(taker, [b"GET"])
        connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        assert not transport.reading and taker.told == ["head"]
        if slow:
            connection.pause(True)
            connection.pause(False)
            assert not transport.reading, "before the rest is taken"
        for _ in range(5):
            await asyncio.sleep(0)
        assert taker.told == ["head", "end"] and taker.data == body
        assert len(turns) == 3 and transport.reading and not transport.aborted
        connection.request(taker, [b"GET"])
        connection.data_received(OK + b"next")
        assert taker.told[2:] == ["whole"]

    run(work)


def test_a_client_that_leaves_before_the_rest_is_taken() -> None:
    async def work(owner: MemberConnections) -> None:
        connection, transport = opened(owner)
        taker = Taker(connection)
        connection.request(taker, [b"GET"])
        connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 9_999)
        connection.abandon()
        taken = len(taker.data)
        for _ in range(5):
            await asyncio.sleep(0)
        assert transport.aborted and len(taker.data) == taken < 50_000

    run(work)
