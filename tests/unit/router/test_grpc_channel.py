"""Connections to a member on demand, the calls on them, and how these end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import h2.exceptions
from h2_member import Member, Server, Sink, until

from nerite.http2 import encode_request
from nerite.router.grpc_channel import GrpcChannel
from nerite.router.grpc_member import GrpcMemberCall

BLOCK = encode_request([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"a")])


def with_server(server: Server, work: Callable[[GrpcChannel], Awaitable[None]], timeout: float = 5.0) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: Member(server), "127.0.0.1", 0)
        channel = GrpcChannel(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}", timeout)
        try:
            await work(channel)
        finally:
            channel.abort("the test has ended")
            for member in server.members:
                member.transport.abort()
            listening.close()
            await until(lambda: channel.connections == 0)

    asyncio.run(main())


def start(channel: GrpcChannel, *parts: bytes, end: bool = True) -> tuple[GrpcMemberCall, Sink]:
    sink = Sink()
    call = channel.start(BLOCK, sink)
    call.send(parts, end)
    return call, sink


def test_calls_share_a_connection() -> None:
    server = Server()

    async def work(channel: GrpcChannel) -> None:
        sinks = [start(channel, b"question")[1] for _ in range(50)]
        for sink in sinks:
            await sink.over.wait()
        assert {(*sink.told, sink.body) for sink in sinks} == {(200, b"0", b"ok")}
        assert channel.connections == 1

    with_server(server, work)


def test_a_member_that_says_goodbye_at_once_takes_no_calls() -> None:
    """It is not asked again and again."""
    server = Server(leaves=True)

    async def work(channel: GrpcChannel) -> None:
        sinks = [start(channel, b"question")[1] for _ in range(3)]
        for sink in sinks:
            await sink.over.wait()
            why, unprocessed = sink.told
            assert unprocessed
            assert str(why).endswith("it ended the connection with NO_ERROR")
        assert len(server.members) == 1

    with_server(server, work)


def test_more_connections_when_streams_run_out() -> None:
    server = Server(answers=False, MAX_CONCURRENT_STREAMS=2)

    async def work(channel: GrpcChannel) -> None:
        sinks = [start(channel, b"question")[1] for _ in range(5)]
        await until(lambda: len(server.ended) == 5)
        assert channel.connections == 3
        for member, stream_id in server.ended:
            member.answer(stream_id)
            member.flush()
        for sink in sinks:
            await sink.over.wait()

    with_server(server, work)


def test_calls_wait_for_room_on_the_last_connection() -> None:
    server = Server(answers=False, MAX_CONCURRENT_STREAMS=1)

    async def work(channel: GrpcChannel) -> None:
        made = [start(channel, b"question") for _ in range(20)]
        await until(lambda: len(server.ended) == 16)
        assert channel.connections == 16
        made[-1][0].cancel()
        made[0][0].cancel()
        await until(lambda: len(server.ended) == 17)
        answered = 0
        while answered < 19:
            await until(lambda count=answered: len(server.ended) > count)
            member, stream_id = server.ended[answered]
            answered += 1
            with suppress(h2.exceptions.ProtocolError):  # the one that was cancelled
                member.answer(stream_id)
                member.flush()
        for _, sink in made[1:-1]:
            await sink.over.wait()
        assert made[0][1].told == [] and made[-1][1].told == []

    with_server(server, work)


def test_goaway_and_a_new_connection() -> None:
    server = Server()

    async def work(channel: GrpcChannel) -> None:
        await start(channel, b"one")[1].over.wait()
        server.members[0].h2.close_connection()
        server.members[0].flush()
        await until(lambda: channel.connections == 0)
        _, sink = start(channel, b"two")
        await sink.over.wait()
        assert sink.told == [200, b"0"] and len(server.members) == 2

    with_server(server, work)


def test_nobody_listens() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        listening.close()
        await listening.wait_closed()
        channel = GrpcChannel(address, 5.0)
        _, sink = start(channel, b"x")
        assert sink.told == []
        await sink.over.wait()
        why, unprocessed = sink.told
        assert unprocessed is True and address in why
        channel.close()

    asyncio.run(main())


def test_every_call_is_told_that_no_connection_can_be_opened_whatever_the_reason() -> None:
    async def main() -> None:
        channel = GrpcChannel("no\0host:1", 5.0)  # refused with an exception that is no error of the system
        for _ in range(2):
            sinks = [start(channel, b"x")[1] for _ in range(2)]
            for sink in sinks:
                await asyncio.wait_for(sink.over.wait(), 5)
                assert "cannot be reached" in str(sink.told[0]) and sink.told[1] is True
        channel.close()

    asyncio.run(main())


def test_a_sink_that_raises_does_not_keep_the_loss_from_other_calls() -> None:
    class Broken(Sink):
        def call_lost(self, why: str, unprocessed: bool) -> None:
            raise ZeroDivisionError

    async def main() -> None:
        channel = GrpcChannel("", 5.0)
        channel.start(BLOCK, Broken())
        _, sink = start(channel, b"x")
        await asyncio.wait_for(sink.over.wait(), 5)
        channel.close()

    asyncio.run(main())


def test_a_member_without_a_port_for_grpc() -> None:
    async def main() -> None:
        channel = GrpcChannel("", 5.0)
        _, sink = start(channel, b"x")
        await sink.over.wait()
        assert "grpc-port" in str(sink.told[0]) and sink.told[1] is True
        channel.close()

    asyncio.run(main())


def test_a_member_that_says_nothing() -> None:
    async def work(channel: GrpcChannel) -> None:
        _, sink = start(channel, b"x")
        await sink.over.wait()
        assert "within 0.2 s" in str(sink.told[0]) and sink.told[1] is True

    with_server(Server(greets=False), work, timeout=0.2)


def test_a_lost_connection_is_told_to_all_its_calls() -> None:
    server = Server(answers=False)

    async def work(channel: GrpcChannel) -> None:
        sinks = [start(channel, b"x")[1] for _ in range(3)]
        await until(lambda: len(server.ended) == 3)
        server.members[0].transport.abort()
        for sink in sinks:
            await sink.over.wait()
            assert "connection" in str(sink.told[0]) and sink.told[1] is False

    with_server(server, work)


def test_a_cancelled_call_is_reset_and_told_nothing() -> None:
    server = Server(answers=False)

    async def work(channel: GrpcChannel) -> None:
        call, sink = start(channel, b"x")
        await until(lambda: len(server.ended) == 1)
        call.cancel()
        call.cancel()
        await until(lambda: server.reset == [1])
        waiting, other = start(channel, b"y")
        waiting.cancel()
        assert sink.told == [] and other.told == []

    with_server(server, work)


def test_a_member_that_does_not_read_is_full_until_it_does() -> None:
    server = Server(answers=False)
    server.reads = False

    async def work(channel: GrpcChannel) -> None:
        call, sink = start(channel, b"x", end=False)
        await until(lambda: channel.connections == 1)
        sent = 0
        while not call.full:
            call.send((bytes(10_000),), False)
            sent += 10_000
            await asyncio.sleep(0)
        assert sent < 100_000
        before = sink.writable
        await until(lambda: server.received == 65_535)
        server.members[0].h2.increment_flow_control_window(100_000)
        server.members[0].h2.increment_flow_control_window(100_000, 1)
        server.members[0].flush()
        await until(lambda: sink.writable > before)
        assert not call.full

    with_server(server, work)


def test_a_paused_call_stops_the_member() -> None:
    server = Server(answers=False)

    async def work(channel: GrpcChannel) -> None:
        call, sink = start(channel, b"x")
        await until(lambda: len(server.ended) == 1)
        call.pause(True)
        member, stream_id = server.ended[0]
        member.h2.send_headers(stream_id, [(":status", "200")])
        sent = 0
        steady = 0
        while steady < 20:
            window = member.h2.local_flow_control_window(stream_id)
            steady = 0 if window else steady + 1
            if window:
                size = min(window, 16_384)
                member.h2.send_data(stream_id, bytes(size))
                sent += size
                member.flush()
            await asyncio.sleep(0.001)
        assert sent < 5 << 20
        call.pause(False)
        await until(lambda: member.h2.local_flow_control_window(stream_id) > 0)
        await until(lambda: len(sink.body) == sent)

    with_server(server, work)
