"""The connection to Redis survives whatever fails for one of its commands, and is opened again whatever fails then."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

from nerite.redis.client import RedisClient
from nerite.redis.connection import RedisConnection, Reply


def broken(reply: Reply) -> None:
    raise ZeroDivisionError


def test_a_callback_that_raises_costs_no_other_command_its_reply() -> None:
    async def main() -> None:
        lost: list[Exception] = []
        replies: list[Reply] = []
        connection = RedisConnection(asyncio.get_running_loop(), 0, lambda _, reason: lost.append(reason))
        transport: Any = SimpleNamespace(
            set_write_buffer_limits=lambda high: None, is_closing=lambda: False, writelines=lambda parts: None
        )
        connection.connection_made(transport)
        for _ in range(2):
            connection.ask([b"PING"], broken)
            connection.ask([b"PING"], replies.append)
        connection.data_received(b"+PONG\r\n+PONG\r\n")
        assert replies == [b"PONG"]
        connection.connection_lost(None)
        assert [type(reply) for reply in replies] == [bytes, ConnectionResetError]
        assert len(lost) == 1

    asyncio.run(main())


def test_a_reply_that_never_ends_is_not_kept() -> None:
    """It ends the connection when it is larger than any reply may be, whatever size Redis has announced."""

    async def main(beginning: bytes, piece: bytes) -> None:
        replies: list[Reply] = []
        aborted: list[bool] = []
        connection = RedisConnection(asyncio.get_running_loop(), 0, lambda _, reason: None, 100_000)
        transport: Any = SimpleNamespace(
            set_write_buffer_limits=lambda high: None,
            is_closing=lambda: False,
            writelines=lambda parts: None,
            abort=lambda: aborted.append(True),
        )
        connection.connection_made(transport)
        for _ in range(3):
            connection.ask([b"GET", b"a"], replies.append)
        connection.data_received(b"$60000\r\n" + b"x" * 60_000 + b"\r\n")
        connection.data_received(b"$60000\r\n" + b"x" * 60_000 + b"\r\n")
        assert (len(replies), aborted) == (2, [])
        connection.data_received(beginning)
        sent = 0
        while not aborted:
            connection.data_received(piece)
            sent += len(piece)
        assert sent <= 100_000 + len(piece)
        connection.connection_lost(None)
        assert "a reply of more than 100000 bytes" in str(replies[-1])

    for beginning, piece in (
        (b"$3000000000\r\n", b"x" * 1000),
        (b"*1000000\r\n", b":1\r\n" * 250),
        (b"+", b"x" * 1000),
    ):
        asyncio.run(main(beginning, piece))


def test_a_client_connects_again_whatever_has_failed() -> None:
    async def main() -> None:
        attempts: list[int] = []
        third = asyncio.Event()

        def tls() -> None:
            attempts.append(1)
            if len(attempts) == 3:
                third.set()
            raise ZeroDivisionError

        settings: Any = SimpleNamespace(tls=tls, connect_timeout=1000, place="nowhere:1")
        client = RedisClient(settings, asyncio.get_running_loop(), logging.getLogger("test"), "the test goes on")
        await client.open()
        await asyncio.wait_for(third.wait(), 10)
        client.close()

    asyncio.run(main())
