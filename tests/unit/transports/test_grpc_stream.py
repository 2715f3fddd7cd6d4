"""One stream of requests, with the ``h2`` package as its client."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_grpc_connection import FakeService, FakeTarget, Peer, message

from doubles import Incident
from nerite.core.errors import Exhausted, Internal, NeriteError, NotFound
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse
from nerite.core.tensor import Buffer
from nerite.http2 import RequestHeaders, encode_headers
from nerite.transports.grpc import messages
from nerite.transports.grpc.stream import StreamCall
from nerite.transports.limits import ByteReservation

OK = InferenceResponse(None)


class FakeStream:
    """Begins an inference for each message: decoupled if it says so, refused if it says that."""

    head = messages.HEAD
    outer_span = None

    def __init__(self, service: StreamService, errors_end_it: bool) -> None:
        self.service = service
        self.errors_end_it = errors_end_it
        self.max_message = service.max_message

    def too_large(self, size: int) -> NeriteError:
        return Exhausted(f"{size} is too large")

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def infer(self, call: StreamCall, framed: memoryview) -> bool:
        text = bytes(framed[5:]).decode()
        if text.startswith("refuse"):
            call.refuse(text, NotFound("nobody"))
            return True
        if text.startswith("mistake"):
            raise RuntimeError("a mistake of ours")
        request = InferenceRequest(RequestHeader(text, "", []), [], call, 0)
        request.on_cancel = self.service.cancelled.append
        request.on_pause = lambda request, paused: self.service.paused.append((request, paused))
        if text.startswith("aside"):
            self.service.aside.append((call, request))
            return False
        self.service.asked.append(request)
        call.begin(request, "decoupled" in text)
        return True

    def write(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> Sequence[Buffer]:
        if response.error is not None:
            return [message(b"error " + response.error.message.encode())]
        if response.empty and not response.data:
            return [] if response is EMPTY else [message(f"{request.header.model_name} {final}".encode())]
        return [message(bytes(response.data[0]))]

    def write_refusal(self, request_id: str, error: NeriteError) -> Sequence[Buffer]:
        return [message(f"refused {request_id}: {error.message}".encode())]

    def load_trailer(self, model: str) -> bytes:
        self.service.told_load_of.append(model)
        return encode_headers([(b"x-load-of", model.encode())]) if model.endswith("loaded") else b""


class StreamService(FakeService):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[InferenceRequest] = []
        self.told_load_of: list[str] = []
        """Models of the last requests of streams that have ended."""
        self.aside: list[tuple[StreamCall, InferenceRequest]] = []
        """Those that are read in a thread."""
        self.cancelled: list[InferenceRequest] = []
        self.paused: list[tuple[InferenceRequest, bool]] = []

    def target(self, headers: RequestHeaders) -> FakeTarget:
        target = super().target(headers)
        target.stream = FakeStream(self, b"strict" in headers.path)
        return target


class StreamPeer(Peer):
    """A client of one stream."""

    def __init__(self, path: str = "/stream", **metadata: str) -> None:
        super().__init__()
        self.streams = StreamService()
        self.shared.service = self.streams
        self.stream = self.call(path, end=False, **metadata)
        self.flush()

    def say(self, *texts: str, end: bool = False) -> None:
        for text in texts:
            self.client.send_data(self.stream, message(text.encode()))
        if end:
            self.client.end_stream(self.stream)
        self.flush()

    @property
    def heard(self) -> list[str]:
        self.hear()
        data, found = self.data.get(self.stream, b""), []
        while data:
            size = int.from_bytes(data[1:5])
            found.append(data[5 : 5 + size].decode())
            data = data[5 + size :]
        return found


@pytest.mark.parametrize("step", [1, 2, 5, 7, 10**9])
def test_messages_cut_anywhere(step: int) -> None:
    peer = StreamPeer()
    for text in ("one", "", "three" * 10_000):
        peer.client.send_data(peer.stream, message(text.encode())[:16384])
        rest = message(text.encode())[16384:]
        for at in range(0, len(rest), 16384):
            peer.client.send_data(peer.stream, rest[at : at + 16384])
    peer.flush(step)
    assert [each.header.model_name for each in peer.streams.asked] == ["one", "", "three" * 10_000]


def test_one_response_each_in_the_order_of_the_requests() -> None:
    peer = StreamPeer()
    peer.say("a", "refuse b", "c")
    first, third = peer.streams.asked
    third.respond(OK)
    assert peer.heard == []
    first.respond(OK)
    assert peer.heard == ["a True", "refused refuse b: nobody", "c True"]
    assert peer.stream not in peer.ended


def test_requests_of_a_stream_count_for_its_connection() -> None:
    peer = StreamPeer()
    assert peer.connection.served == 1
    peer.say("a", "refuse b", "c")
    assert peer.connection.served == 3


def test_responses_of_decoupled_models_leave_at_once() -> None:
    peer = StreamPeer()
    peer.say("slow", "decoupled 1", "decoupled 2")
    slow, one, two = peer.streams.asked
    two.respond(OK, False)
    one.respond(OK, False)
    two.respond(OK)
    one.respond(EMPTY)
    assert peer.heard == ["decoupled 2 False", "decoupled 1 False", "decoupled 2 True"]
    slow.respond(OK)
    assert peer.heard[-1] == "slow True"


def test_only_the_first_response_of_a_model_that_is_not_decoupled_counts() -> None:
    peer = StreamPeer()
    peer.say("a", end=True)
    (asked,) = peer.streams.asked
    asked.respond(OK, False)
    asked.respond(OK)
    assert peer.heard == ["a False"]
    assert peer.status(peer.stream) == (0, b"")


def test_the_end_comes_after_the_last_response() -> None:
    peer = StreamPeer()
    peer.say("a", "decoupled", end=True)
    for asked in peer.streams.asked:
        assert peer.stream not in peer.ended
        asked.respond(OK)
        peer.hear()
    assert peer.status(peer.stream) == (0, b"")
    assert peer.connection.calls == {}


def test_the_end_tells_the_load_of_the_engine_that_was_asked_last() -> None:
    for model, told in (("loaded", b"loaded"), ("a", None)):
        peer = StreamPeer()
        peer.say("b", model, end=True)
        for asked in peer.streams.asked:
            asked.respond(OK)
        peer.hear()
        assert peer.status(peer.stream) == (0, b"")
        assert peer.streams.told_load_of == [model]
        assert peer.headers[peer.stream].get(b"x-load-of") == told


def test_a_stream_without_requests() -> None:
    peer = StreamPeer()
    peer.say(end=True)
    assert peer.status(peer.stream) == (0, b"")


def test_errors_go_in_the_stream_or_end_it() -> None:
    for path, heard in (("/stream", ["error bad", "b True"]), ("/strict", [])):
        peer = StreamPeer(path)
        peer.say("a", "b")
        bad, other = peer.streams.asked
        bad.respond(InferenceResponse.failed(Internal("bad")))
        other.respond(OK)
        assert peer.heard == heard
        if path == "/strict":
            assert peer.status(peer.stream) == (messages.INTERNAL, b"bad")
            assert peer.streams.cancelled == [other]


def test_a_refusal_does_not_end_a_strict_stream() -> None:
    peer = StreamPeer("/strict")
    peer.say("refuse")
    assert peer.heard == ["refused refuse: nobody"]


def test_an_incomplete_message_at_the_end() -> None:
    peer = StreamPeer()
    peer.say("a")
    peer.client.send_data(peer.stream, b"\0\0\0", end_stream=True)
    peer.flush()
    assert peer.status(peer.stream)[0] == messages.INTERNAL
    assert peer.streams.cancelled == peer.streams.asked


@pytest.mark.parametrize("how", ["reset", "lost", "deadline"])
def test_whoever_goes_takes_everything_along(how: str) -> None:
    peer = StreamPeer(grpc_timeout="1S")
    peer.say("a", "decoupled")
    peer.streams.asked[1].respond(OK, False)
    if how == "reset":
        peer.client.reset_stream(peer.stream, 8)
        peer.flush()
    elif how == "lost":
        peer.connection.connection_lost(None)
    else:
        peer.loop.advance(1_000_000_000)
        peer.hear()
        assert peer.status(peer.stream)[0] == messages.DEADLINE_EXCEEDED
    assert peer.streams.cancelled == peer.streams.asked
    for asked in peer.streams.asked:
        asked.respond(OK)
    assert peer.connection.calls == {}


def test_a_mistake_of_ours_ends_the_stream_and_not_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    peer = StreamPeer()
    peer.say("a", "mistake")
    assert peer.status(peer.stream) == (messages.INTERNAL, Incident())
    assert peer.streams.cancelled == peer.streams.asked
    assert len(caplog.records) == 1
    assert not peer.transport.closed


class Reluctant(StreamPeer):
    """A client that opens no window."""

    def __init__(self) -> None:
        super().__init__()
        self.client.update_settings({4: 1000})
        self.flush()


def test_a_slow_reader_makes_models_pause() -> None:
    peer = Reluctant()
    peer.say("decoupled 1", "decoupled 2")
    one, two = peer.streams.asked
    large = InferenceResponse(None, [b"x" * 600_000])
    one.respond(large, False)
    assert peer.streams.paused == []
    two.respond(large, False)
    assert peer.streams.paused == [(one, True), (two, True)]
    two.respond(OK, False)
    assert peer.streams.paused[2:] == [(two, True)], "said again to whoever sends on"
    peer.streams.paused.clear()
    peer.client.increment_flow_control_window(2**24, peer.stream)
    peer.flush()
    assert peer.streams.paused == [(one, False), (two, False)]


def test_a_stream_whose_client_leaves_everything_unread_ends() -> None:
    """Models that are not decoupled cannot pause: each of a thousand requests may have one large answer."""
    peer = Reluctant()
    peer.say("one", "one", "one")
    first, second, third = peer.streams.asked
    first.respond(InferenceResponse(None, [b"x" * 600_000]))
    peer.transport.unread = 2**30
    second.respond(OK)
    assert peer.streams.cancelled == [third]
    peer.client.increment_flow_control_window(2**24, peer.stream)
    peer.flush()
    assert peer.headers[peer.stream][b"grpc-status"] == b"8"
    assert peer.connection.calls == {}


def test_a_congested_socket_makes_models_pause() -> None:
    peer = StreamPeer()
    peer.say("decoupled")
    (asked,) = peer.streams.asked
    peer.connection.pause_writing()
    peer.connection.resume_writing()
    assert peer.streams.paused == [(asked, True), (asked, False)]


def test_a_client_that_asks_without_end_is_read_no_further() -> None:
    peer = StreamPeer()
    for _ in range(11):
        peer.say(*["decoupled"] * 100)
    large = message(b"decoupled" * 1000)
    for _ in range(400):
        peer.client.send_data(peer.stream, large)
        peer.flush()
    assert peer.client.local_flow_control_window(peer.stream) < 4_000_000 - 400 * len(large) + 500_000
    for asked in peer.streams.asked:
        asked.respond(OK)
    peer.hear()
    assert peer.client.local_flow_control_window(peer.stream) > 4_000_000


def test_stopping_ends_idle_streams_and_lets_others_finish() -> None:
    idle, busy = StreamPeer(), StreamPeer()
    busy.say("a")
    for peer in (idle, busy):
        peer.connection.shut_down()
    assert [len(peer.connection.calls) for peer in (idle, busy)] == [0, 1]
    said = b"GRPC server is shutting down and has stopped accepting new requests."
    assert said in idle.transport.taken()
    busy.transport.taken()
    busy.say("b")
    assert len(busy.streams.asked) == 1
    busy.streams.asked[0].respond(OK)
    assert busy.connection.calls == {}
    assert said in busy.transport.taken()


# What is read in a thread


def test_a_message_that_is_read_aside_keeps_its_place() -> None:
    peer = StreamPeer()
    peer.say("a", "aside", "b", end=True)
    assert [each.header.model_name for each in peer.streams.asked] == ["a"]
    ((call, request),) = peer.streams.aside
    assert call.go_on(ByteReservation(peer.bounds.bytes))
    call.begin(request, False)
    call.proceed()
    first, third = peer.streams.asked
    for asked in (third, request, first):
        asked.respond(OK)
    assert peer.heard == ["a True", "aside True", "b True"]
    assert peer.status(peer.stream) == (0, b"")
    assert peer.bounds.bytes.used == 0


def test_what_comes_meanwhile_is_held_back_and_counts() -> None:
    peer = StreamPeer()
    open_stream = peer.bounds.bytes.used
    assert open_stream > 0
    peer.say("aside")
    peer.say("x" * 10_000)
    assert peer.bounds.bytes.used == open_stream + 10_005
    ((call, request),) = peer.streams.aside
    share = ByteReservation(peer.bounds.bytes)
    assert share.take(5000) and call.go_on(share)
    call.begin(request, False)
    call.proceed()
    assert peer.bounds.bytes.used == open_stream + 5000
    request.respond(OK)
    assert peer.bounds.bytes.used == open_stream
    (asked,) = peer.streams.asked
    assert asked.header.model_name == "x" * 10_000


def test_a_stream_that_ends_meanwhile() -> None:
    peer = StreamPeer()
    peer.say("aside", "b")
    peer.client.reset_stream(peer.stream)
    peer.flush()
    ((call, _),) = peer.streams.aside
    share = ByteReservation(peer.bounds.bytes)
    assert share.take(5000)
    assert not call.go_on(share)
    assert (peer.bounds.bytes.used, peer.streams.asked) == (0, [])


def test_a_message_that_is_too_large_ends_the_stream() -> None:
    peer = StreamPeer()
    peer.streams.max_message = 1000
    stream = peer.call("/stream", b"\0" + (1001).to_bytes(4), end=False)
    peer.flush()
    assert peer.status(stream) == (messages.RESOURCE_EXHAUSTED, b"1001 is too large")


def test_messages_of_a_stream_count_until_they_are_answered() -> None:
    peer = StreamPeer()
    peer.bounds.bytes.limit = 100_000
    before = peer.bounds.bytes.used
    text = "x" * 16_000 + "y" * 30_000
    for at in range(0, len(text) + 5, 16_000):
        peer.client.send_data(peer.stream, message(text.encode())[at : at + 16_000])
    peer.flush(10_000)
    assert peer.bounds.bytes.used == before + len(message(text.encode()))
    (asked,) = peer.streams.asked
    other = peer.call("/stream", b"\0" + (60_000).to_bytes(4) + bytes(10), end=False)
    peer.flush()
    assert peer.status(other)[0] == messages.RESOURCE_EXHAUSTED
    asked.respond(OK)
    peer.hear()
    assert peer.bounds.bytes.used == before
    peer.client.reset_stream(peer.stream)
    peer.flush()
    assert peer.bounds.bytes.used == 0


def test_a_message_of_a_stream_that_does_not_come_on() -> None:
    peer = StreamPeer()
    idle = peer.call("/stream", end=False)
    peer.client.send_data(peer.stream, message(b"abc")[:6])
    peer.flush()
    for _ in range(3):
        peer.connection.check_uploads(peer.loop.time(), 60)
        peer.loop.advance(30 * 10**9)
    peer.hear()
    assert peer.status(peer.stream)[0] == messages.DEADLINE_EXCEEDED
    assert idle not in peer.ended
