"""One stream of requests, with the ``h2`` package as its client."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_grpc_connection import FakeService, FakeTarget, Peer, message

from nerite.core.errors import Internal, NeriteError, NotFound
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse
from nerite.core.tensor import Buffer
from nerite.http2 import Headers
from nerite.transports.grpc import status
from nerite.transports.grpc.stream import StreamCall

OK = InferenceResponse(None)


class FakeStream:
    """Begins an inference for each message: decoupled if it says so, refused if it says that."""

    head = status.HEAD

    def __init__(self, service: StreamService, errors_end_it: bool) -> None:
        self.service = service
        self.errors_end_it = errors_end_it

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def infer(self, call: StreamCall, framed: memoryview) -> None:
        text = bytes(framed[5:]).decode()
        if text.startswith("refuse"):
            call.refuse(text, NotFound("nobody"))
            return
        if text.startswith("mistake"):
            raise RuntimeError("a mistake of ours")
        request = InferenceRequest(RequestHeader(text, "", []), [], call, 0)
        request.on_cancel = self.service.cancelled.append
        request.on_pause = lambda request, paused: self.service.paused.append((request, paused))
        self.service.asked.append(request)
        call.begin(request, "decoupled" in text)

    def write(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> Sequence[Buffer]:
        if response.error is not None:
            return [message(b"error " + response.error.message.encode())]
        if response.empty and not response.data:
            return [] if response is EMPTY else [message(f"{request.header.model_name} {final}".encode())]
        return [message(bytes(response.data[0]))]

    def write_refusal(self, request_id: str, error: NeriteError) -> Sequence[Buffer]:
        return [message(f"refused {request_id}: {error.message}".encode())]


class StreamService(FakeService):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[InferenceRequest] = []
        self.cancelled: list[InferenceRequest] = []
        self.paused: list[tuple[InferenceRequest, bool]] = []

    def target(self, headers: Headers) -> FakeTarget:
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
            assert peer.status(peer.stream) == (status.INTERNAL, b"bad")
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
    assert peer.status(peer.stream)[0] == status.INTERNAL
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
        assert peer.status(peer.stream)[0] == status.DEADLINE_EXCEEDED
    assert peer.streams.cancelled == peer.streams.asked
    for asked in peer.streams.asked:
        asked.respond(OK)
    assert peer.connection.calls == {}


def test_a_mistake_of_ours_ends_the_stream_and_not_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    peer = StreamPeer()
    peer.say("a", "mistake")
    assert peer.status(peer.stream) == (status.INTERNAL, status.MISTAKE_TEXT.encode())
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
    busy.streams.asked[0].respond(OK)
    assert busy.connection.calls == {}
    assert said in busy.transport.taken()
