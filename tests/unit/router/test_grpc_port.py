"""The router's gRPC port between a channel of ours, as the client, and members made of ``h2``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from h2_member import Member as H2Member
from h2_member import Server, Sink, until

from nerite.balancing.member import Member
from nerite.balancing.policy import PoolPolicy
from nerite.cluster.settings import MemberSource, PoolSettings, RouterSettings
from nerite.http2 import encode_request
from nerite.router.grpc_channel import GrpcChannel
from nerite.router.grpc_member import GrpcMemberCall
from nerite.router.grpc_port import RouterGrpcPort
from nerite.router.http_members import HttpMembers
from nerite.router.pools import PoolTable, RouterPool
from nerite.transports.limits import TransportLimits
from nerite.wire import grpc_service as wire

_SERVICE = "/inference.GRPCInferenceService/"


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4) + message


INFER = framed(wire.ModelInferRequest(model_name="m").SerializeToString())


class Routed:
    """A router, its pool, and a channel to it."""

    def __init__(self, pool: RouterPool, port: RouterGrpcPort, channel: GrpcChannel, suspects: list[str]) -> None:
        self.pool = pool
        self.port = port
        self.channel = channel
        self.suspects = suspects

    def ask(self, method: str, *parts: bytes, end: bool = True, **fields: str) -> tuple[GrpcMemberCall, Sink]:
        sink = Sink()
        headers = {":method": "POST", ":scheme": "http", ":path": _SERVICE + method, ":authority": "router"}
        headers |= {"content-type": "application/grpc", "te": "trailers"}
        headers |= {name.replace("_", "-"): value for name, value in fields.items()}
        call = self.channel.start(encode_request((k.encode(), v.encode()) for k, v in headers.items()), sink)
        call.send(parts, end)
        return call, sink

    @property
    def under_way(self) -> float:
        return sum(load.requests for load in self.pool.balancer.members)


def routed(servers: list[Server], work: Callable[[Routed], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        listening = [
            await loop.create_server(lambda server=server: H2Member(server), "127.0.0.1", 0) for server in servers
        ]
        ports = [each.sockets[0].getsockname()[1] for each in listening]
        members = tuple(Member(f"m{at}", f"m{at}:1", f"127.0.0.1:{port}") for at, port in enumerate(ports))
        policy = PoolPolicy(retry_share=1.0, retry_floor=100.0)
        pool = RouterPool(PoolSettings("main", MemberSource(members=members), balancing=policy))
        pool.set_members(members)
        for member in members:
            pool.set_ready(member.name, True)
        suspects: list[str] = []
        health = cast(HttpMembers, SimpleNamespace(suspect=lambda pool, member, cause: suspects.append(member.name)))
        port = RouterGrpcPort(
            PoolTable([pool]), health, RouterSettings(**settings), ("x-session-id",), TransportLimits()
        )
        number = await port.open("127.0.0.1", 0)
        channel = GrpcChannel(f"127.0.0.1:{number}", 5.0)
        made = Routed(pool, port, channel, suspects)
        try:
            await work(made)
            await until(lambda: made.under_way == 0)
        finally:
            channel.abort("the test has ended")
            await until(lambda: port.open_connections == 0)
            port.stop_accepting()
            port.abort()
            for server in servers:
                for each in server.members:
                    each.transport.abort()
            for each in listening:
                each.close()

    asyncio.run(main())


def status_only(code: int, text: str = "") -> Callable[[H2Member, int], None]:
    def answer(member: H2Member, stream_id: int) -> None:
        fields = [(":status", "200"), ("grpc-status", str(code)), ("grpc-message", text)]
        member.h2.send_headers(stream_id, fields, end_stream=True)

    return answer


def refusing(member: H2Member, stream_id: int) -> None:
    member.h2.reset_stream(stream_id, 7)


def test_a_call_passes_unchanged() -> None:
    server = Server()

    async def work(router: Routed) -> None:
        _, sink = router.ask("ModelInfer", INFER, x_own="yes", grpc_timeout="5S")
        await sink.over.wait()
        assert (sink.told, sink.body) == ([200, b"0"], b"ok")
        assert server.bodies == {1: INFER}
        (headers,) = server.headers
        assert headers["x-own"] == "yes" and headers["grpc-timeout"] == "5S" and headers[":path"].endswith("ModelInfer")

    routed([server], work)


def test_a_large_call_both_ways() -> None:
    server = Server()
    body = bytes(range(256)) * 4_000
    server.answer = lambda member, stream_id: member.answer(stream_id, body[:60_000])

    async def work(router: Routed) -> None:
        message = wire.ModelInferRequest(model_name="m", raw_input_contents=[body]).SerializeToString()
        _, sink = router.ask("ModelInfer", framed(message)[:100_000], framed(message)[100_000:])
        await sink.over.wait()
        assert sink.body == body[:60_000] and server.bodies[1] == framed(message)

    routed([server], work)


def test_refusals_and_losses_go_to_another_member() -> None:
    good = Server()
    for answer in (status_only(14, "busy"), refusing, lambda member, stream_id: member.transport.abort()):
        bad = Server()
        bad.answer = answer

        async def work(router: Routed) -> None:
            for _ in range(6):
                _, sink = router.ask("ModelInfer", INFER)
                await sink.over.wait()
                assert sink.told == [200, b"0"]

        routed([bad, good], work)
        assert bad.headers


def test_calls_that_a_goaway_excludes_go_to_the_next_connection() -> None:
    server = Server(answers=False)

    async def work(router: Routed) -> None:
        calls = [router.ask(method, INFER, end=method == "ModelInfer") for method in ("ModelInfer", "ModelStreamInfer")]
        await until(lambda: sum(map(len, server.bodies.values())) == 2 * len(INFER))
        (first,) = server.members
        first.h2.close_connection(last_stream_id=0)
        first.flush()
        await until(lambda: len(server.headers) == 4)
        _, second = server.members
        for stream_id in (1, 3):
            second.answer(stream_id)
        second.flush()
        for _, sink in calls:
            await sink.over.wait()
            assert (sink.told, sink.body) == ([200, b"0"], b"ok")
        assert len(server.members) == 2 and not router.suspects

    routed([server], work)


def test_the_last_refusal_is_told() -> None:
    server = Server()
    server.answer = status_only(14, "busy")

    async def work(router: Routed) -> None:
        _, sink = router.ask("ModelInfer", INFER)
        await sink.over.wait()
        assert sink.told == [200] and router.pool.answers["m0", "UNAVAILABLE"] == 1

    routed([server], work)


def test_errors_of_models_are_answers() -> None:
    server, other = Server(), Server()
    server.answer = other.answer = status_only(3, "wrong shape")

    async def work(router: Routed) -> None:
        _, sink = router.ask("ModelInfer", INFER)
        await sink.over.wait()
        assert len(server.headers) + len(other.headers) == 1

    routed([server, other], work)


def test_a_sequence_is_sent_once() -> None:
    servers = [Server(), Server()]
    for server in servers:
        server.answer = lambda member, stream_id: member.h2.reset_stream(stream_id, 2)
    request = wire.ModelInferRequest(model_name="m")
    request.parameters["sequence_id"].int64_param = 3
    request.parameters["sequence_start"].bool_param = True

    async def work(router: Routed) -> None:
        _, sink = router.ask("ModelInfer", framed(request.SerializeToString()))
        await sink.over.wait()
        assert sum(len(server.headers) for server in servers) == 1

    routed(servers, work)


def test_a_stream_passes_piece_by_piece() -> None:
    server = Server(answers=False)

    async def work(router: Routed) -> None:
        call, sink = router.ask("ModelStreamInfer", INFER[:3], end=False)
        call.send((INFER[3:],), False)
        await until(lambda: server.bodies.get(1) == INFER)
        (member,) = server.members
        member.h2.send_headers(1, [(":status", "200")])
        member.h2.send_data(1, b"first")
        member.flush()
        await until(lambda: sink.body == b"first")
        call.send((INFER,), True)
        await until(lambda: server.ended == [(member, 1)])
        assert server.bodies[1] == INFER * 2
        member.h2.send_headers(1, [("grpc-status", "0")], end_stream=True)
        member.flush()
        await sink.over.wait()
        assert sink.told == [200, b"0"]

    routed([server], work)


def test_a_stream_begins_elsewhere_if_its_member_cannot_be_reached() -> None:
    good, bad = Server(answers=False), Server(greets=False)

    async def work(router: Routed) -> None:
        made = [router.ask("ModelStreamInfer", INFER, end=False) for _ in range(4)]
        await until(lambda: sum(len(body) for body in good.bodies.values()) == 4 * len(INFER))
        assert router.suspects == ["m1"] * len(router.suspects) and router.suspects
        for call, _ in made:
            call.cancel()
        await until(lambda: len(good.reset) == 4)

    routed([good, bad], work, connect_timeout=0.1)


def test_a_stream_whose_member_is_lost_ends() -> None:
    server = Server(answers=False)

    async def work(router: Routed) -> None:
        _, sink = router.ask("ModelStreamInfer", INFER, end=False)
        await until(lambda: bool(server.headers))
        (member,) = server.members
        member.h2.send_headers(1, [(":status", "200")])
        member.h2.send_data(1, b"first")
        member.flush()
        await until(lambda: sink.body == b"first")
        member.transport.abort()
        await sink.over.wait()
        assert sink.told == [200, b"14"]

    routed([server], work)


def test_deadlines_and_cancelled_calls_reach_the_member() -> None:
    server = Server(answers=False)

    async def work(router: Routed) -> None:
        _, late = router.ask("ModelInfer", INFER, grpc_timeout="50m")
        await late.over.wait()
        assert late.told == [200]
        await until(lambda: server.reset == [1])
        _, late = router.ask("ModelStreamInfer", INFER, end=False, grpc_timeout="50m")
        await late.over.wait()
        await until(lambda: server.reset == [1, 3])
        call, _ = router.ask("ModelInfer", INFER)
        await until(lambda: len(server.ended) == 2)
        call.cancel()
        await until(lambda: server.reset == [1, 3, 5])

    routed([server], work)


def test_the_routers_own_timeout() -> None:
    server = Server(answers=False)

    async def work(router: Routed) -> None:
        _, sink = router.ask("ModelInfer", INFER)
        await sink.over.wait()
        assert sink.told == [200]

    routed([server], work, timeout=0.05)


def test_lists_are_merged() -> None:
    servers = [Server(), Server()]
    rows = [[("a", "1", "READY"), ("b", "1", "UNAVAILABLE")], [("b", "1", "READY"), ("c", "2", "READY")]]
    for server, found in zip(servers, rows, strict=True):
        index = wire.RepositoryIndexResponse()
        for name, version, state in found:
            index.models.add(name=name, version=version, state=state)
        body = framed(index.SerializeToString())
        server.answer = lambda member, stream_id, body=body: member.answer(stream_id, body)

    async def work(router: Routed) -> None:
        _, sink = router.ask("RepositoryIndex", framed(b""))
        await sink.over.wait()
        merged = wire.RepositoryIndexResponse.FromString(sink.body[5:])
        assert [(row.name, row.version, row.state) for row in merged.models] == [
            ("a", "1", "READY"), ("b", "1", "READY"), ("c", "2", "READY")
        ]  # fmt: skip

    routed(servers, work)


def test_what_the_router_answers_itself() -> None:
    async def work(router: Routed) -> None:
        for method in ("ServerLive", "ServerReady"):
            _, sink = router.ask(method, framed(b""))
            await sink.over.wait()
            assert sink.body == framed(b"\x08\x01")
        router.pool.set_ready("m0", False)
        _, sink = router.ask("ServerReady", framed(b""))
        await sink.over.wait()
        assert sink.body == framed(b"")
        _, sink = router.ask("ModelReady", framed(wire.ModelReadyRequest(name="m").SerializeToString()))
        await sink.over.wait()
        assert sink.body == framed(b"") and sink.told == [200, b"0"]
        for method in ("LogSettings", "Unheard"):
            _, sink = router.ask(method, framed(b""))
            await sink.over.wait()
            assert sink.told == [200]

    routed([Server()], work)


def test_bodies_are_bounded() -> None:
    async def work(router: Routed) -> None:
        _, sink = router.ask("ModelInfer", framed(bytes(5_000)))
        await sink.over.wait()
        assert sink.told == [200] and not sink.body

    routed([Server()], work, max_body=1_000)
