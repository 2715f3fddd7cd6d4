"""What a front relays to the core, and how the replies come back: HTTP, gRPC, connections, and what fronts are told."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest
from front_channel import LARGE, MOST_CONNECTIONS, Ends, tell, tensor, values
from google.protobuf.message import Message

from nerite.core.errors import NeriteError, NotFound, Overloaded
from nerite.core.execution_observer import TraceContext
from nerite.core.request import CancelReason, RequestHeader
from nerite.core.tensor import Buffer
from nerite.fronts.balancer import Move
from nerite.fronts.messages import DrainStep, RelayedPiece
from nerite.fronts.relay import FrontRouting, GrpcRelay
from nerite.fronts.shared_state import SharedState
from nerite.transports.http.head import RequestHead, parse_head
from nerite.transports.http.infer_request import HttpTarget
from nerite.transports.http.reply import Reply
from nerite.transports.limits import ByteReservation, BytesInFlight
from nerite.transports.listeners import TargetOf
from nerite.wire import grpc_service

STATUS = "/inference.GRPCInferenceService/"
CHANGING = ["/v2/repository/models/m/load", "/v2/systemsharedmemory/region/r/register", "/v2/logging"]


class Work:
    """What answers a relayed request, for a while."""

    id = "an id"
    header = RequestHeader("é", "3", ())

    def __init__(self) -> None:
        self.told: list[object] = []

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        self.told.append(why)

    def pause(self, paused: bool) -> None:
        self.told.append(paused)


class Handler:
    """The core's handler of HTTP requests. It keeps exchanges, which a test answers."""

    def __init__(self) -> None:
        self.exchanges: list[Any] = []
        self.bodies: list[bytes] = []
        self.refusal: Reply | None = None
        self.failure: Exception | None = None

    def begin(self, head: RequestHead) -> Reply | None:
        return self.refusal

    def handle(self, exchange: Any, head: RequestHead, body: memoryview) -> None:
        if self.failure is not None:
            raise self.failure
        assert exchange.head is head
        exchange.request = Work()
        self.exchanges.append(exchange)
        self.bodies.append(bytes(body))


class Client:
    """A connection of the front: what the reply goes to."""

    request: Any = None
    protocol = "HTTP"
    began_ns = 0

    def __init__(self, *, secure: bool = False, outer_span: TraceContext | None = None) -> None:
        self.secure = secure
        self.outer_span = outer_span
        self.told: list[tuple[str, list[bytes]]] = []

    def send(self, parts: Sequence[Buffer]) -> None:
        self.request = None
        self.told.append(("send", values(parts)))

    def open(self, first: bytes, data: bytes = b"") -> None:
        self.told.append(("open", [first, data]))

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        self.told.append(("chunk", values(pieces)))

    def close_reply(self) -> None:
        self.request = None
        self.told.append(("close", []))


class FrontRouter:
    """The front's router. It refuses what is in ``locked``, by category, and routes each inference to ``INFERENCE``."""

    def __init__(self, **locked: Reply) -> None:
        self._locked = locked

    def locked(self, category: str, head: RequestHead) -> Reply | None:
        return self._locked.get(category)

    def of_route(self, route: Any, head: RequestHead) -> HttpTarget:
        return INFERENCE


class FrontOpenAi:
    """The front's OpenAI endpoints. They route all requests to ``OPENAI``."""

    def __init__(self, target: HttpTarget) -> None:
        self._target = target

    def target(self, head: RequestHead) -> HttpTarget:
        return self._target


INFERENCE = HttpTarget(encoding="inference")
OPENAI = HttpTarget(encoding="openai")
KEYLESS = Reply(403, b"no key")


def wrapped(target_of: TargetOf) -> TargetOf:
    """Mark the targets of a routing."""
    return lambda head: target_of(head)._replace(accepts="wrapped")


def routing_of(ends: Ends, openai: HttpTarget = OPENAI, **locked: Reply) -> FrontRouting:
    router: Any = FrontRouter(**locked)
    endpoints: Any = FrontOpenAi(openai)
    return FrontRouting(router, endpoints, ends.front, wrapped)


def head_of(path: str = "/v2", method: str = "GET", *lines: str) -> RequestHead:
    return parse_head("\r\n".join((f"{method} {path} HTTP/1.1", "Host: é", *lines, "", "")).encode("latin-1"))


async def relayed(ends: Ends, client: Client, head: RequestHead, body: bytes = b"") -> Handler:
    """Have a client's request relayed; return the core's handler."""
    if ends.owner.http_handler is None:
        ends.owner.http_handler = Handler()
    target = routing_of(ends).target(head)
    assert target.call is not None
    assert target.accepts == "", "the core has wrapped its routing"
    connection: Any = client
    target.call(connection, head, memoryview(body))
    await ends.settle()
    handler: Handler = ends.owner.http_handler
    return handler


INFER = "/v2/models/m/infer"
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "expected"), [(INFER, INFERENCE), ("/v2/models/m/generate", INFERENCE), (CHAT, OPENAI)]
)
def test_inferences_stay_in_the_front(path: str, expected: HttpTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        routing = routing_of(ends)
        assert routing.target(head_of(path, "POST")) == expected._replace(accepts="wrapped")
        for head in (head_of(path), head_of(path, "POST", "Endpoint-Load-Metrics-Format: text")):
            assert routing.target(head).call is not None, "the core answers"

    tell(monkeypatch, story)


def test_requests_without_a_key_are_refused_by_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        refused = HttpTarget(refusal=KEYLESS, accepts="wrapped")
        routing = routing_of(ends, HttpTarget(refusal=KEYLESS), logging=KEYLESS)
        assert routing.target(head_of("/v2/logging", "POST")) == refused
        assert routing.target(head_of("/v1/models")) == refused
        assert routing.target(head_of("/v2/models/m/stats")).call is not None

    tell(monkeypatch, story)


@pytest.mark.parametrize("size", [0, 5, LARGE])
@pytest.mark.parametrize("secure", [False, True])
def test_a_request_and_its_reply(size: int, secure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        client = Client(secure=secure, outer_span=TraceContext(5, 6, "s"))
        head = head_of("/v2/models/%C3%A9?x=1", "POST", f"Content-Length: {size}", "X-Twice: a", "x-twice: b")
        handler = await relayed(ends, client, head, tensor(size))
        (exchange,) = handler.exchanges
        assert handler.bodies == [tensor(size)]
        assert (exchange.secure, exchange.outer_span) == (secure, client.outer_span)
        assert (exchange.head.method, exchange.head.path, exchange.head.fields) == (head.method, head.path, head.fields)
        assert ends.front.in_flight == len(ends.core.exchanges) == 1
        work = client.request
        exchange.send([b"HTTP/1.1 200 OK\r\n\r\n", tensor(LARGE, 3)])
        exchange.send([b"again"])
        await ends.settle()
        assert client.told == [("send", [b"HTTP/1.1 200 OK\r\n\r\n", tensor(LARGE, 3)])]
        assert (work.id, work.header.model_name, work.header.model_version) == ("an id", "é", "3"), "for the access log"
        assert ends.front.in_flight == len(ends.core.exchanges) == 0
        await relayed(ends, Client(), head_of())
        assert handler.exchanges[1].outer_span is None

    tell(monkeypatch, story)


def test_a_reply_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        client = Client()
        (exchange,) = (await relayed(ends, client, head_of())).exchanges
        exchange.open(b"HTTP/1.1 200 OK\r\n\r\n", b"1")
        exchange.send_chunk(b"2")
        exchange.send_pieces([b"3", tensor(LARGE)])
        await ends.settle()
        assert len(client.told) == 3
        exchange.close_reply()
        exchange.send_chunk(b"late")
        await ends.settle()
        assert client.told == [
            ("open", [b"HTTP/1.1 200 OK\r\n\r\n", b"1"]),
            ("chunk", [b"2"]),
            ("chunk", [b"3", tensor(LARGE)]),
            ("close", []),
        ]
        assert ends.front.in_flight == len(ends.core.exchanges) == 0

    tell(monkeypatch, story)


def test_a_refusal_of_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        handler = ends.owner.http_handler = Handler()
        handler.refusal = Reply(404, b"no")
        client = Client()
        await relayed(ends, client, head_of())
        assert handler.exchanges == []
        assert client.told[0][1][0].startswith(b"HTTP/1.1 404 ")

    tell(monkeypatch, story)


def test_an_unforeseen_exception_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        handler = ends.owner.http_handler = Handler()
        handler.failure = ValueError("unforeseen")
        client = Client()
        await relayed(ends, client, head_of())
        assert client.told[0][1][0].startswith(b"HTTP/1.1 500 ")
        assert len(ends.core.exchanges) == 0

    tell(monkeypatch, story)


@pytest.mark.parametrize("why", CancelReason)
def test_a_client_that_goes_cancels_the_work(why: CancelReason, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        client = Client()
        (exchange,) = (await relayed(ends, client, head_of())).exchanges
        work = exchange.request
        share = ByteReservation(BytesInFlight(100))
        share.take(10)
        exchange.hold(share)
        client.request.cancel(why)
        client.request.cancel(why)
        await ends.settle()
        assert (work.told, exchange.gone, share.size) == ([why], True, 0)
        exchange.send([b"nobody waits"])
        await ends.settle()
        assert client.told == []
        assert ends.front.in_flight == len(ends.core.exchanges) == 0

    tell(monkeypatch, story)


def test_a_client_that_does_not_read_pauses_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        client = Client()
        (exchange,) = (await relayed(ends, client, head_of())).exchanges
        assert exchange.writable
        client.request.pause(True)
        await ends.settle()
        assert not exchange.writable
        client.request.pause(False)
        await ends.settle()
        assert (exchange.writable, exchange.request.told) == (True, [True, False])

    tell(monkeypatch, story)


def test_a_lost_front_cancels_its_relayed_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        (exchange,) = (await relayed(ends, Client(), head_of())).exchanges
        work = exchange.request
        ends.sockets[1].shutdown(socket.SHUT_RDWR)
        await ends.settle()
        assert work.told == [CancelReason.DISCONNECTED]
        assert len(ends.core.exchanges) == 0

    tell(monkeypatch, story)


@pytest.mark.parametrize("path", CHANGING)
def test_what_changed_is_published_before_the_reply_waits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        ends.owner.waiting = []
        client = Client()
        (exchange,) = (await relayed(ends, client, head_of(path, "POST", "Content-Length: 0"))).exchanges
        assert ends.owner.told == []
        exchange.send([b"done"])
        await ends.settle()
        assert ends.owner.told == ["publish"]
        assert client.told == []
        ends.owner.waiting.pop()()
        await ends.settle()
        assert client.told == [("send", [b"done"])]

    tell(monkeypatch, story)


def test_what_changes_nothing_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        (exchange,) = (await relayed(ends, Client(), head_of("/v2/models/m/stats"))).exchanges
        exchange.send([b"done"])
        assert ends.owner.told == []

    tell(monkeypatch, story)


def grpc_call(ends: Ends, method: str, request: Message) -> list[Message | NeriteError]:
    """Relay a gRPC message; return what will have been answered."""
    answers: list[Message | NeriteError] = []
    assert GrpcRelay(ends.front).handler(f"{STATUS}{method}", "alice")(request, answers.append) is None
    return answers


@pytest.mark.parametrize("name", ["m", "x" * LARGE])
def test_grpc_messages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        answers = grpc_call(ends, "ModelReady", grpc_service.ModelReadyRequest(name=name))
        await ends.settle()
        ((path, owner, content, answer),) = ends.owner.administered
        assert (path, owner) == (f"{STATUS}ModelReady", "alice")
        assert grpc_service.ModelReadyRequest.FromString(content).name == name
        answer(grpc_service.ModelReadyResponse(ready=True))
        await ends.settle()
        assert answers == [grpc_service.ModelReadyResponse(ready=True)]
        assert ends.owner.told == []
        assert ends.front.in_flight == 0

    tell(monkeypatch, story)


@pytest.mark.parametrize("error", [NotFound("no é"), Overloaded("later", 7)])
def test_grpc_errors(error: NeriteError, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        answers = grpc_call(ends, "ModelReady", grpc_service.ModelReadyRequest())
        await ends.settle()
        ends.owner.administered[0][-1](error)
        await ends.settle()
        (answer,) = answers
        assert isinstance(answer, NeriteError)
        assert type(answer) is type(error)
        assert (answer.message, answer.retry_after) == (error.message, error.retry_after)

    tell(monkeypatch, story)


def test_grpc_changes_are_published_and_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        ends.owner.waiting = []
        answers = grpc_call(ends, "RepositoryModelLoad", grpc_service.RepositoryModelLoadRequest(model_name="m"))
        await ends.settle()
        ends.owner.administered[0][-1](grpc_service.RepositoryModelLoadResponse())
        await ends.settle()
        assert (ends.owner.told, answers) == (["publish"], [])
        ends.owner.waiting.pop()()
        await ends.settle()
        assert answers == [grpc_service.RepositoryModelLoadResponse()]

    tell(monkeypatch, story)


def test_a_reply_that_nobody_waits_for_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        ends.core.relayed(77, RelayedPiece.SEND, [tensor(LARGE)])
        await ends.settle()
        assert ends.events.told[1:] == []
        await ends.pass_time(1.0)
        assert ends.live == [0, 0]

    tell(monkeypatch, story)


def test_connections_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        client, accepted = socket.socketpair()
        with client, accepted:
            assert ends.core.hand_over(accepted.fileno(), 1, 0)
            assert ends.core.hand_over(accepted.fileno(), 0, 500)
        await ends.settle()
        assert ends.core.connections == [1, 1]
        assert [(port, limit) for _, port, limit in ends.events.adopted] == [(1, 0), (0, 500)]
        for connection, port, _ in ends.events.adopted:
            connection.close()
            ends.front.closed(port)
        await ends.settle()
        assert ends.core.connections == [0, 0]

    tell(monkeypatch, story)


def test_a_front_takes_connections_when_it_is_ready_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        assert not ends.core.accepts
        ends.front.ready()
        await ends.settle()
        assert ends.core.accepts
        ends.loop.remove_reader(ends.sockets[1])  # the front stands still
        accepting = []
        for _ in range(4):
            ends.core.measure()
            await ends.settle()
            accepting.append(ends.core.accepts)
        assert accepting == [True, True, False, False]
        assert not ends.core.responsive

    tell(monkeypatch, story)


def test_a_front_that_has_not_taken_over_many_connections_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        ends.front.ready()
        await ends.settle()
        client, accepted = socket.socketpair()
        with client, accepted:
            handed_over = 0
            while ends.core.accepts and handed_over < 100:
                assert ends.core.hand_over(accepted.fileno(), 1, 0)
                handed_over += 1
        assert handed_over == 64
        for _ in range(handed_over):
            await ends.settle()
        assert ends.core.accepts, "the front has told that it took them over"
        assert ends.core.connections == [0, 64]
        for connection, _, _ in ends.events.adopted:
            connection.close()

    tell(monkeypatch, story)


def test_a_front_without_room_takes_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        ends.front.ready()
        await ends.settle()
        ends.core.connections = [MOST_CONNECTIONS - 1, 0]
        assert ends.core.accepts
        ends.core.connections = [MOST_CONNECTIONS - 1, 1]
        assert not ends.core.accepts
        ends.front.closed(1)
        await ends.settle()
        assert ends.core.accepts

    tell(monkeypatch, story)


def test_a_connection_that_cannot_be_handed_over_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        assert not ends.core.hand_over(-1, 1, 0)
        assert ends.core.connections == [0, 0]

    tell(monkeypatch, story)


def test_what_fronts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        change = SharedState(regions=[("r", "/k", 1, 2)], keys={"f": (b"k",)})
        ends.core.send_change(5, change)
        for step in DrainStep:
            ends.core.drain(step)
        ends.core.retire(Move(0, 0.25, 0.5))
        await ends.settle()
        assert ends.events.told == [("start", "a start"), ("change", 5, change), *DrainStep, (0.25, 0.5)]

    tell(monkeypatch, story)


def test_what_the_core_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(ends: Ends) -> None:
        assert not ends.core.ready
        ends.front.acknowledge(3)
        ends.front.ready()
        ends.front.log(["INFO", "é", {"a": None}])
        ends.core.ask_figures()
        await ends.settle()
        assert (ends.core.ready, ends.core.acknowledged, ends.core.figures) == (True, 3, {"bytes": 7})
        assert ends.owner.told == ["acknowledged", "ready", ["INFO", "é", {"a": None}], {"bytes": 7}]

    tell(monkeypatch, story)
