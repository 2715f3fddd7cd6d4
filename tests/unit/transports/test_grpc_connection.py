"""One gRPC connection, with the ``h2`` package as its client."""

from __future__ import annotations

import random
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import hyperframe.frame
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import FakeLoop, FakeTransport, Incident
from nerite.config.options import KeepaliveOptions
from nerite.core.errors import Exhausted, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.http2 import Limits, RequestHeaders
from nerite.transports.grpc import messages
from nerite.transports.grpc.connection import WAITING_CALL, GrpcCall, GrpcConnection, GrpcShared
from nerite.transports.grpc.keepalive import KeepaliveRules
from nerite.transports.grpc.stream import StreamTarget
from nerite.transports.limits import TransportLimits

OK = InferenceResponse(None)


class FakeTarget:
    """Echoes each message; a path with ``later`` begins an inference that waits, one with ``refuse`` is refused."""

    def __init__(self, path: str, service: FakeService) -> None:
        self.refusal = messages.of_error(InvalidArgument("refused")) if "refuse" in path else None
        self.timeout: float | None = None
        self.max_message = service.max_message
        self.stream: StreamTarget | None = None
        self._path = path
        self._service = service

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        self._service.buffers.append((bytes(beginning), size))
        return memoryview(bytearray(size))

    def start_known(self, call: GrpcCall, framed: bytes | memoryview) -> bool:
        if "known" not in self._path:
            return False
        call.reply(messages.HEAD, [messages.framed(b"known " + bytes(framed))])
        return True

    def start(self, call: GrpcCall, message: memoryview) -> None:
        assert not message.readonly
        self._service.started.append((self._path, bytes(message)))
        if "mistake" in self._path:
            if "waiting" in self._path:
                call.request = InferenceRequest(RequestHeader("m", "", []), [], call, 0)
                self._service.waiting.append(call.request)
            if "answered" in self._path:
                call.reply(messages.HEAD, [messages.framed(b"answered")])
            raise RuntimeError("a mistake of ours")
        if "later" in self._path:
            call.request = InferenceRequest(RequestHeader("m", "", []), [bytes(message[5:])], call, 0)
            self._service.waiting.append(call.request)
        elif "fail" in self._path:
            call.fail(messages.of_error(InvalidArgument("failed")))
        else:
            call.reply(messages.HEAD, [messages.framed(bytes(message[5:]))])

    def too_large(self, size: int) -> NeriteError:
        return Exhausted(f"{size} is too large")

    def answer(self, call: GrpcCall, request: InferenceRequest, response: InferenceResponse) -> None:
        call.reply(messages.HEAD, [messages.framed(b"".join((b"inferred ", *request.data)))])


class FakeService:
    def __init__(self) -> None:
        self.started: list[tuple[str, bytes]] = []
        self.waiting: list[InferenceRequest] = []
        self.buffers: list[tuple[bytes, int]] = []
        self.max_message = 2**31 - 1

    def target(self, headers: RequestHeaders) -> FakeTarget:
        if b"nowhere" in headers.path:
            raise RuntimeError("a mistake of ours")
        target = headers.memo = FakeTarget(headers.path.decode(), self)
        timeout = headers.get(b"grpc-timeout")
        target.timeout = messages.timeout_seconds(timeout) if timeout else None
        return target


class Peer:
    """A connection, and a client that keeps what it is told by stream."""

    kind = GrpcConnection

    def __init__(self, **keepalive: Any) -> None:
        self.loop = FakeLoop()
        self.service = FakeService()
        self.bounds = TransportLimits()
        self.shared = GrpcShared(self.service, Limits(), KeepaliveRules(KeepaliveOptions(**keepalive)), self.bounds)
        self.connection = self.kind(self.shared, self.loop)  # type: ignore[arg-type]
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.client.initiate_connection()
        self.client.increment_flow_control_window(2**30)
        self.client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
        self.headers: dict[int, dict[bytes, bytes]] = {}
        self.data: dict[int, bytes] = {}
        self.ended: list[int] = []
        self.events: list[Any] = []

    def flush(self, step: int = 10**9) -> None:
        """Send what the client has to say, and hear what the server says to it."""
        data = self.client.data_to_send()
        for at in range(0, len(data), step):
            self.send(data[at : at + step])
        self.hear()

    def send(self, data: bytes) -> None:
        while data and not self.transport.closed:
            buffer = self.connection.get_buffer(-1)
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            data = data[size:]
            self.connection.buffer_updated(size)

    def hear(self) -> None:
        self.loop.settle()
        for event in self.client.receive_data(self.transport.taken()):
            self.events.append(event)
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                self.headers.setdefault(event.stream_id, {}).update(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                self.data[event.stream_id] = self.data.get(event.stream_id, b"") + event.data
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.append(event.stream_id)

    def call(self, path: str, *pieces: bytes, end: bool = True, **metadata: str) -> int:
        """Begin a call, its body in these pieces; return the stream."""
        stream_id = self.client.get_next_available_stream_id()
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"here")]
        fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
        fields += [(name.replace("_", "-").encode(), value.encode()) for name, value in metadata.items()]
        self.client.send_headers(stream_id, fields)
        for piece in pieces:
            for at in range(0, len(piece), 16384):
                self.client.send_data(stream_id, piece[at : at + 16384])
        if end:
            self.client.end_stream(stream_id)
        return stream_id

    def status(self, stream_id: int) -> tuple[int, bytes]:
        """gRPC status and message of a call that is over."""
        assert stream_id in self.ended
        fields = self.headers[stream_id]
        assert fields[b":status"] == b"200"
        return int(fields[b"grpc-status"]), fields.get(b"grpc-message", b"")

    def reply(self, stream_id: int) -> bytes:
        """The message of a call that went well."""
        assert self.status(stream_id) == (0, b"")
        data = self.data[stream_id]
        assert data[0] == 0
        assert int.from_bytes(data[1:5]) == len(data) - 5
        return data[5:]


def message(body: bytes) -> bytes:
    return b"\0" + len(body).to_bytes(4) + body


@pytest.fixture
def peer() -> Peer:
    return Peer()


def test_what_is_known_is_answered_without_being_kept() -> None:
    peer = Peer()
    calls = [peer.call("/known", end=False) for _ in range(3)]
    for number, call in enumerate(calls):
        peer.client.send_data(call, messages.framed(b"%d" % number), end_stream=True)
    peer.flush()
    assert [peer.reply(call) for call in calls] == [b"known " + messages.framed(b"%d" % number) for number in range(3)]
    assert peer.service.started == []
    # In pieces it is not even looked for.
    split = peer.call("/known", b"\0\0\0", b"\0\1x")
    peer.flush()
    assert peer.service.started == [("/known", messages.framed(b"x"))]
    assert peer.reply(split) == b"x"


def test_answers_of_one_turn_leave_in_one_write() -> None:
    peer = Peer()
    calls = [peer.call("/later", messages.framed(b"%d" % number)) for number in range(3)]
    peer.flush()
    writes = peer.transport.writes
    for waiting in peer.service.waiting[:2]:
        waiting.respond(OK)
    assert peer.transport.writes == writes
    peer.hear()
    assert peer.transport.writes == writes + 1
    assert [call in peer.ended for call in calls] == [True, True, False]
    # Nobody else is waited for: the last one goes at once.
    peer.service.waiting[2].respond(OK)
    assert peer.transport.writes == writes + 2


def test_many_answers_leave_in_several_writes() -> None:
    """The client begins with the first while the others are written."""
    peer = Peer()
    calls = [peer.call("/later", messages.framed(b"x")) for _ in range(20)]
    peer.flush()
    writes = peer.transport.writes
    for waiting in peer.service.waiting:
        waiting.respond(OK)
    assert peer.transport.writes == writes + 3
    peer.hear()
    assert set(calls) <= set(peer.ended)
    assert peer.transport.writes == writes + 3


def test_a_call(peer: Peer) -> None:
    stream = peer.call("/echo", message(b"hello"))
    peer.flush()
    assert peer.service.started == [("/echo", message(b"hello"))]
    assert peer.reply(stream) == b"hello"
    assert peer.headers[stream][b"content-type"] == b"application/grpc"
    assert peer.connection.calls == {}


def test_an_empty_message(peer: Peer) -> None:
    stream = peer.call("/echo", message(b""))
    peer.flush()
    assert peer.reply(stream) == b""


@pytest.mark.parametrize("end", [True, False])
def test_a_message_in_frames_cut_anywhere(end: bool) -> None:
    """``end``: an empty frame ends the stream. Without it, the last piece does."""
    whole = message(b"hello")
    for at in range(1, len(whole)):
        for other in range(at, len(whole)):
            pieces = [piece for piece in (whole[:at], whole[at:other], whole[other:]) if piece]
            peer = Peer()
            stream = peer.call("/echo", *pieces[: None if end else -1], end=end)
            if not end:
                peer.client.send_data(stream, pieces[-1], end_stream=True)
            peer.flush()
            assert peer.reply(stream) == b"hello"


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(["/echo", "/later", "/fail", "/refuse"]), st.integers(0, 2000)), max_size=6),
    st.sampled_from((1, 9, 100, 10**9)),
    st.integers(0, 2**32),
)
def test_any_calls_cut_anywhere_answered_in_any_order(calls: list[tuple[str, int]], step: int, seed: int) -> None:
    peer = Peer()
    rng = random.Random(seed)
    streams = []
    for number, (path, size) in enumerate(calls):
        body = bytes([number]) * size
        whole = message(body)
        cut = rng.randrange(len(whole) + 1)
        streams.append((path, body, peer.call(path, whole[:cut], whole[cut:])))
        if rng.random() < 0.5:
            peer.flush(step)
    peer.flush(step)
    rng.shuffle(peer.service.waiting)
    for waiting in peer.service.waiting:
        waiting.respond(OK)
    peer.hear()
    for path, body, stream in streams:
        if path == "/echo":
            assert peer.reply(stream) == body
        elif path == "/later":
            assert peer.reply(stream) == b"inferred " + body
        else:
            text = b"failed" if path == "/fail" else b"refused"
            assert peer.status(stream) == (3, text)
    assert peer.connection.calls == {}
    assert not peer.transport.closed


def test_calls_that_are_answered_at_once_leave_in_one_write(peer: Peer) -> None:
    peer.flush()
    streams = [peer.call("/echo", message(b"%d" % number)) for number in range(50)]
    writes = peer.transport.writes
    peer.flush()
    assert peer.transport.writes == writes + 1
    assert [peer.reply(stream) for stream in streams] == [b"%d" % number for number in range(50)]


def test_a_large_message_is_collected_where_the_target_says(peer: Peer) -> None:
    peer.flush()
    body = random.Random(1).randbytes(3_000_000)
    stream = peer.call("/echo", message(body)[:100_000], end=False)
    peer.flush()
    assert [size for _, size in peer.service.buffers] == [len(body) + 5]
    assert body.startswith(peer.service.buffers[0][0])
    for at in range(100_000, len(body) + 5, 16384):
        peer.client.send_data(stream, message(body)[at : at + 16384])
        peer.flush()
    peer.client.end_stream(stream)
    peer.flush()
    assert peer.reply(stream) == body


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"\0\0\0"],
        [b"\0\0\0\0\5abc"],
        [b"\0\0\0\0\5abcdef"],
        [message(b"a") + message(b"b")],
        [message(b"a"), message(b"b")],
        [b"\0\0\0\0\5abc", b"defgh"],
    ],
)
def test_calls_that_do_not_carry_one_message(peer: Peer, pieces: list[bytes]) -> None:
    stream = peer.call("/echo", *pieces)
    after = peer.call("/echo", message(b"after"))
    peer.flush()
    code, text = peer.status(stream)
    assert code == 13
    assert text == b"the call does not carry exactly one message"
    assert peer.service.started == [("/echo", message(b"after"))]
    assert peer.reply(after) == b"after"
    assert peer.connection.calls == {after: peer.connection.calls[after]} if peer.connection.calls else True


def test_a_call_without_a_body(peer: Peer) -> None:
    stream_id = peer.client.get_next_available_stream_id()
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/echo"), (b":authority", b"here")]
    peer.client.send_headers(stream_id, fields, end_stream=True)
    peer.flush()
    assert peer.status(stream_id)[0] == 13


def test_a_refused_call_needs_no_message(peer: Peer) -> None:
    stream = peer.call("/refuse", end=False)
    peer.flush()
    assert peer.status(stream) == (3, b"refused")
    assert peer.service.started == []
    assert peer.connection.calls == {}


# Giving up


def waiting(peer: Peer, **metadata: str) -> tuple[int, InferenceRequest, list[InferenceRequest]]:
    """A call whose inference waits: stream, request, and the list it will be in when it is cancelled."""
    stream = peer.call("/later", message(b"x"), **metadata)
    peer.flush()
    request = peer.service.waiting[-1]
    told: list[InferenceRequest] = []
    request.on_cancel = told.append
    return stream, request, told


def test_a_mistake_of_ours_costs_one_call_and_nothing_else(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    other, request, told = waiting(peer)
    at_once = peer.call("/mistake", message(b"x"))
    in_pieces = peer.call("/mistake", message(b"x" * 100_000))
    unknown = peer.call("/nowhere", message(b"x"))
    answered = peer.call("/mistake/answered", message(b"x"))
    working = peer.call("/mistake/waiting", message(b"x"))
    peer.flush()
    for stream in (at_once, in_pieces, unknown, working):
        assert peer.status(stream) == (messages.INTERNAL, Incident())
    assert peer.reply(answered) == b"answered"
    assert len(caplog.records) == 5
    assert peer.service.waiting[-1].cancelled
    request.respond(OK)
    peer.hear()
    assert peer.status(other)[0] == 0
    assert told == []


def test_a_client_that_gives_up_cancels_its_inference(peer: Peer) -> None:
    stream, request, told = waiting(peer)
    peer.client.reset_stream(stream, 8)
    peer.flush()
    assert told == [request]
    request.respond(OK)
    peer.hear()
    assert stream not in peer.data
    assert peer.connection.calls == {}


def test_a_client_that_goes_cancels_all_its_inferences(peer: Peer) -> None:
    tellings = [waiting(peer) for _ in range(3)]
    peer.transport.close()
    peer.connection.connection_lost(None)
    assert all(told == [request] for _, request, told in tellings)
    for _, request, _ in tellings:
        request.respond(OK)
    assert peer.transport.taken() == b""
    assert peer.shared.connections == set()


def test_a_client_that_gives_up_in_the_middle_of_its_message(peer: Peer) -> None:
    stream = peer.call("/echo", message(b"hello")[:7], end=False)
    peer.flush()
    peer.client.reset_stream(stream, 8)
    peer.flush()
    assert peer.connection.calls == {}
    assert peer.service.started == []


def test_a_deadline_ends_the_call_and_the_work(peer: Peer) -> None:
    stream, request, told = waiting(peer, grpc_timeout="50m")
    peer.loop.advance(49_000_000)
    peer.hear()
    assert stream not in peer.ended
    peer.loop.advance(2_000_000)
    peer.hear()
    assert peer.status(stream) == (4, b"Deadline Exceeded")
    assert told == [request]
    request.respond(OK)
    peer.hear()
    assert stream not in peer.data


def test_a_deadline_counts_while_the_message_is_on_its_way(peer: Peer) -> None:
    stream = peer.call("/echo", message(b"hello")[:7], end=False, grpc_timeout="1S")
    peer.flush()
    peer.loop.advance(1_100_000_000)
    peer.hear()
    assert peer.status(stream) == (4, b"Deadline Exceeded")


def test_an_answer_in_time_ends_the_deadline(peer: Peer) -> None:
    stream, request, told = waiting(peer, grpc_timeout="50m")
    request.respond(OK)
    peer.loop.advance(100_000_000)
    peer.hear()
    assert peer.reply(stream) == b"inferred x"
    assert told == []
    assert peer.loop.next_timer is None


def test_a_deadline_that_means_nothing_is_none(peer: Peer) -> None:
    _, _, told = waiting(peer, grpc_timeout="soon")
    peer.loop.advance(10**12)
    assert told == []


# The socket


def test_a_client_that_does_not_read_is_not_read_from(peer: Peer) -> None:
    peer.connection.pause_writing()
    assert not peer.transport.reading
    peer.connection.resume_writing()
    assert peer.transport.reading


def test_what_a_client_leaves_unread_is_kept_within_bounds(peer: Peer) -> None:
    asked = [waiting(peer)[:2] for _ in range(2)]
    peer.connection.pause_writing()
    for (stream, request), unread, code in zip(asked, (2**30, 2**30 + 1), (b"0", b"8"), strict=True):
        peer.transport.unread = unread
        request.respond(OK)
        peer.loop.settle()
        peer.flush()
        assert peer.headers[stream][b"grpc-status"] == code


def test_a_client_that_stops_sending_is_done(peer: Peer) -> None:
    assert peer.connection.eof_received() is False


def test_a_client_that_speaks_http1_is_told_where_it_is(peer: Peer) -> None:
    peer.send(b"GET /v2/health/ready HTTP/1.1\r\nHost: here\r\n\r\n")
    written = peer.transport.taken()
    assert written.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"This is the gRPC port" in written
    assert peer.transport.closed


def test_nonsense_ends_the_connection(peer: Peer) -> None:
    peer.send(b"\0" * 100)
    assert peer.transport.closed


def test_broken_frames_end_the_connection_and_cancel_what_it_asked(peer: Peer) -> None:
    _, request, told = waiting(peer)
    peer.send(b"\0\0\5\1\x25\0\0\0\0" + b"x" * 5)
    peer.hear()
    assert any(isinstance(event, h2.events.ConnectionTerminated) for event in peer.events)
    assert peer.transport.closed
    assert told == [request]


# Stopping


def farewells(peer: Peer) -> list[int]:
    """The last streams that the server's GOAWAYs name. ``h2`` is not told: it would take the first for the end."""
    data = peer.transport.taken()
    found = []
    while data:
        frame, length = hyperframe.frame.Frame.parse_frame_header(memoryview(data)[:9])
        frame.parse_body(memoryview(data)[9 : 9 + length])
        data = data[9 + length :]
        if isinstance(frame, hyperframe.frame.GoAwayFrame):
            found.append(frame.last_stream_id)
    return found


def test_stopping_finishes_what_has_begun(peer: Peer) -> None:
    stream, request, told = waiting(peer)
    peer.connection.shut_down()
    assert farewells(peer) == [2**31 - 1, stream]
    assert not peer.transport.closed
    request.respond(OK)
    assert peer.transport.closed
    peer.hear()
    assert peer.reply(stream) == b"inferred x"
    assert told == []


def test_a_client_that_knows_of_the_end_makes_no_more_calls() -> None:
    fresh, peer = Peer(), Peer()
    fresh.connection.drain()
    assert not fresh.transport.closed, "it has not said anything yet, and may have a call to make"
    peer.flush()
    peer.connection.drain()
    assert farewells(peer) == [2**31 - 1]
    stream, request, _ = waiting(peer)  # It was on its way.
    peer.connection.shut_down()
    assert farewells(peer) == [stream]
    request.respond(OK)
    assert peer.transport.closed
    peer.hear()
    assert peer.reply(stream) == b"inferred x"


def test_an_idle_connection_is_closed_at_once(peer: Peer) -> None:
    peer.flush()
    peer.connection.shut_down()
    assert peer.transport.closed


def test_abort(peer: Peer) -> None:
    peer.connection.abort()
    assert peer.transport.aborted


# Keepalive


def test_a_silent_client_is_pinged_and_given_up() -> None:
    peer = Peer(time_ms=1000, timeout_ms=500)
    waiting(peer)
    peer.connection.check(peer.loop.time() + 0.9)
    peer.hear()
    assert not any(isinstance(event, h2.events.PingReceived) for event in peer.events)
    peer.connection.check(peer.loop.time() + 1.0)
    peer.hear()
    assert any(isinstance(event, h2.events.PingReceived) for event in peer.events)
    peer.connection.check(peer.loop.time() + 1.5)
    assert peer.transport.aborted


def test_a_client_that_answers_the_ping_stays() -> None:
    peer = Peer(time_ms=1000, timeout_ms=500)
    waiting(peer)
    peer.loop.now_ns += 1_000_000_000
    peer.connection.check(peer.loop.time())
    peer.hear()
    peer.flush()
    peer.connection.check(peer.loop.time() + 0.9)
    assert not peer.transport.closed


def test_an_old_connection_is_asked_to_go() -> None:
    peer = Peer(max_connection_age_ms=1000)
    stream, request, _ = waiting(peer)
    peer.connection.check(peer.loop.time() + 1.0)
    assert farewells(peer) == [2**31 - 1]
    request.respond(OK)
    peer.hear()
    assert peer.reply(stream) == b"inferred x"


# What arrives is bounded


def test_a_message_that_is_too_large_is_refused_when_its_length_is_known() -> None:
    peer = Peer()
    peer.service.max_message = 1000
    announced = peer.call("/echo", b"\0" + (1001).to_bytes(4), end=False)
    whole = peer.call("/echo", message(bytes(1001)))
    fits = peer.call("/echo", message(bytes(1000)))
    peer.flush()
    assert peer.status(announced) == peer.status(whole) == (messages.RESOURCE_EXHAUSTED, b"1001 is too large")
    assert len(peer.reply(fits)) == 1000
    assert [size for _, size in peer.service.buffers] == [1005]
    assert peer.connection.calls == {}
    resets = [event for event in peer.events if isinstance(event, h2.events.StreamReset)]
    assert [(event.stream_id, event.error_code) for event in resets] == [(announced, 0)]


def with_room(size: int) -> Peer:
    peer = Peer()
    peer.flush()
    peer.bounds.bytes.limit = size
    return peer


def test_messages_count_until_they_are_answered() -> None:
    peer = with_room(100_000)
    for _ in range(2):  # until the same headers are the same bytes
        peer.call("/later", message(b"x"))
        peer.flush()
        peer.service.waiting.pop().respond(OK)
    small = peer.call("/later", end=False)
    peer.client.send_data(small, message(bytes(1000)), end_stream=True)
    peer.flush()
    assert peer.bounds.bytes.used == 0
    pieces = peer.call("/later", message(bytes(40_000)))
    peer.flush()
    assert peer.bounds.bytes.used == 40_005
    peer.service.waiting[1].respond(OK)
    peer.hear()
    assert peer.bounds.bytes.used == 0
    peer.service.waiting[0].respond(OK)
    peer.hear()
    assert peer.status(small) == peer.status(pieces) == (0, b"")


def test_a_call_counts_while_its_message_does_not_come() -> None:
    peer = with_room(100_000)
    call = peer.call("/later", end=False)
    peer.flush()
    assert peer.bounds.bytes.used == WAITING_CALL
    peer.client.send_data(call, message(b"x"), end_stream=True)
    peer.flush()
    peer.service.waiting[0].respond(OK)
    peer.hear()
    assert (peer.status(call), peer.bounds.bytes.used) == ((0, b""), 0)
    refused = [peer.call("/later", end=False) for _ in range(60)]
    peer.flush()
    assert peer.status(refused[-1])[0] == messages.RESOURCE_EXHAUSTED
    assert peer.bounds.bytes.used == 100_000 // WAITING_CALL * WAITING_CALL


def test_messages_that_there_is_no_room_for() -> None:
    peer = with_room(100_000)
    first = peer.call("/later", message(bytes(60_000)))
    announced = peer.call("/later", message(bytes(50_000))[:20_000], end=False)
    peer.flush()
    code, text = peer.status(announced)
    assert (code, b"--max-bytes-in-flight" in text) == (messages.RESOURCE_EXHAUSTED, True)
    assert peer.headers[announced][b"grpc-retry-pushback-ms"] == b"1000"
    assert peer.bounds.bytes.refused == 1
    # Two fit when they are announced, and one of them does not any more when it comes.
    peer.service.waiting[0].respond(OK)
    peer.hear()
    assert peer.bounds.bytes.used == 0
    both = [peer.call("/later", message(bytes(60_000))[:20_000], end=False) for _ in range(2)]
    peer.flush()
    assert peer.bounds.bytes.used >= 40_000
    for call in both:
        for at in range(20_000, 60_005, 10_000):
            if call not in peer.ended:
                peer.client.send_data(call, message(bytes(60_000))[at : at + 10_000])
                peer.flush()
    assert [call in peer.ended for call in both] == [False, True]
    assert peer.status(both[1])[0] == messages.RESOURCE_EXHAUSTED
    peer.client.reset_stream(both[0])
    peer.flush()
    assert peer.bounds.bytes.used == 0
    assert first in peer.ended


def test_calls_without_a_message_count_too() -> None:
    peer = with_room(10_000)
    calls = [peer.call("/echo", end=False) for _ in range(6)]
    peer.flush()
    assert [call in peer.ended for call in calls] == [False] * 4 + [True] * 2
    peer.connection.connection_lost(None)
    assert peer.bounds.bytes.used == 0


def stalled(peer: Peer, seconds: float) -> None:
    """Let time pass, with a look each quarter of it."""
    for _ in range(5):
        peer.connection.check_uploads(peer.loop.time(), seconds)
        peer.loop.advance(round(seconds / 4 * 1e9))
        peer.hear()


def test_a_message_that_does_not_come_on() -> None:
    peer = Peer()
    peer.flush()
    calls = [
        peer.call("/echo", end=False),
        peer.call("/echo", b"\0\0", end=False),
        peer.call("/echo", message(bytes(200_000))[:100_000], end=False),
    ]
    running = peer.call("/later", message(b"x"))
    peer.flush()
    stalled(peer, 60)
    for call in calls:
        code, text = peer.status(call)
        assert code == messages.DEADLINE_EXCEEDED
        assert text == b"the message made no progress for 60 s. Use --grpc-upload-timeout to wait longer."
    assert running not in peer.ended
    assert peer.bounds.refused["stalled"] == 3
    peer.service.waiting[0].respond(OK)
    assert peer.bounds.bytes.used == 0


def test_a_message_that_comes_on_may_take_its_time() -> None:
    peer = Peer()
    whole = message(bytes(20 * 16_384))
    call = peer.call("/echo", whole[:16_384], end=False)
    for at in range(16_384, len(whole), 16_384):
        peer.flush()
        peer.connection.check_uploads(peer.loop.time(), 60)
        peer.loop.advance(59 * 10**9)
        peer.client.send_data(call, whole[at : at + 16_384])
    peer.client.end_stream(call)
    peer.flush()
    assert len(peer.reply(call)) == len(whole) - 5


def test_who_is_not_read_does_not_stand_still() -> None:
    peer = Peer()
    peer.flush()
    call = peer.call("/echo", message(bytes(200_000))[:100_000], end=False)
    peer.flush()
    peer.connection.pause_writing()
    stalled(peer, 60)
    assert call not in peer.ended
    peer.connection.resume_writing()
    stalled(peer, 60)
    assert call in peer.ended


@pytest.mark.parametrize("sent", [b"", b"PRI * HT", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_a_connection_that_never_begins(sent: bytes) -> None:
    peer = Peer()
    peer.send(sent)
    stalled(peer, 60)
    assert peer.transport.closed
    assert peer.bounds.closed["stalled"] == 1


@pytest.mark.parametrize("sent", [b"\0\1\0\1\4\0\0\0\1abc", b"\0\0\3\1\0\0\0\0\1abc", b"\0\0"])
def test_a_header_block_that_never_ends(sent: bytes) -> None:
    peer = Peer()
    peer.flush()
    peer.send(sent)
    stalled(peer, 60)
    assert peer.transport.closed
    assert peer.bounds.closed["stalled"] == 1


def test_a_connection_without_calls_stands_still_for_ever() -> None:
    peer = Peer()
    peer.flush()
    stalled(peer, 60)
    assert not peer.transport.closed


def test_a_connection_in_the_table() -> None:
    peer = Peer()
    peer.flush()
    connection = peer.connection
    assert len(peer.bounds.connections) == 1
    assert (connection.busy, connection.served) == (False, 0)
    peer.call("/later", message(b"x"))
    peer.flush()
    assert (connection.busy, connection.served) == (True, 1)
    peer.service.waiting[0].respond(OK)
    peer.hear()
    assert not connection.busy
    peer.call("/echo", message(b"x"))
    peer.flush()
    assert connection.served == 2
    connection.retire()
    peer.hear()
    (goaway,) = [event for event in peer.events if isinstance(event, h2.events.ConnectionTerminated)]
    assert (goaway.error_code, goaway.last_stream_id) == (0, 3)
    assert peer.transport.closed
    connection.connection_lost(None)
    assert len(peer.bounds.connections) == 0
