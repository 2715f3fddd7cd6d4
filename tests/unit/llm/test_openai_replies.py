"""A completion on its way: events as they come, one end, and nobody works for nobody."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import numpy as np
import pytest

from http_peer import Peer, replies, request
from nerite.core.errors import Unavailable
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.tensor import from_array
from nerite.llm.openai.replies import CompletionReply, CompletionStream
from nerite.llm.openai.reply_formats import ChatFormat, CompletionFormat
from nerite.transports.http.handler import HttpQuestion
from nerite.transports.http.head import RequestHead


class Handler:
    """Begins a completion of two choices for every request; ``/refused`` is refused at once."""

    def __init__(self) -> None:
        self.asked: list[InferenceRequest] = []
        self.submitted: list[InferenceRequest] = []
        self.paused: list[tuple[int, bool]] = []

    def begin(self, head: RequestHead) -> None:
        return None

    def receive_buffer(self, head: RequestHead) -> None:
        return None

    def handle(self, connection: Any, head: RequestHead, body: memoryview) -> HttpQuestion | None:
        shape = (ChatFormat if "chat" in head.path else CompletionFormat)("id", 1, "m", usage=True)
        streams = [CompletionStream(index, 0, None) for index in range(2)]
        exchange = CompletionReply(connection, shape, streams, events="stream" in head.path)
        header = RequestHeader("m", "", [])
        self.asked = [InferenceRequest(header, [], exchange, 0, f"id-{number}") for number in range(2)]
        for number, each in enumerate(self.asked):
            each.on_pause = lambda _, paused, number=number: self.paused.append((number, paused))

        def submit(each: InferenceRequest) -> None:
            self.submitted.append(each)
            if "refused" in head.path:
                each.respond(InferenceResponse.failed(Unavailable("queue full", 2)))

        exchange.begin(self.asked, submit)
        return None

    def handle_again(self, connection: Any, meaning: Any, data: bytearray) -> None:
        raise AssertionError

    def answer(self, connection: Any, request: InferenceRequest, response: InferenceResponse) -> None:
        raise AssertionError


class Bench:
    def __init__(self) -> None:
        self.handler = Handler()
        double: Any = self.handler
        self.peer = Peer(double)

    def ask(self, path: str) -> list[InferenceRequest]:
        self.peer.send(request(path))
        return self.handler.asked

    def events(self) -> list[Any]:
        """Return the events since the last time."""
        said = self.peer.transport.taken().decode()
        lines = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def said(text: bytes, tokens: int = 1) -> InferenceResponse:
    arrays = {
        "text_output": np.array([text], object),
        "num_input_tokens": np.array([5], np.uint32),
        "num_output_tokens": np.array([tokens], np.uint32),
    }
    tensors = [from_array(name, array) for name, array in arrays.items()]
    return InferenceResponse(ResponseHeader("m", "1", [spec for spec, _ in tensors]), [data for _, data in tensors])


def test_events_leave_as_they_come(bench: Bench) -> None:
    first, second = bench.ask("/chat/stream")
    assert bench.events() == []
    first.respond(said(b"a"), False)
    role, text = bench.events()
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (text["choices"][0]["delta"], text["usage"]) == ({"content": "a"}, None)
    second.respond(said(b"b"), False)
    assert [event["choices"][0]["index"] for event in bench.events()] == [1, 1]
    first.respond(EMPTY)
    assert [event["choices"][0]["finish_reason"] for event in bench.events()] == ["stop"]
    second.respond(said(b"c", 2))
    *_, last, usage, done = bench.events()
    assert (last["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")
    assert usage["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert len(bench.ask("/chat")) == 2, "the connection goes on"


def test_characters_that_come_in_two_pieces(bench: Bench) -> None:
    first, second = bench.ask("/whole")
    for piece in ("é".encode()[:1], "é".encode()[1:], b"\xff"):
        first.respond(said(piece), False)
    first.respond(EMPTY)
    second.respond(said("é".encode()[:1]))
    ((status, _, body),) = replies(bench.peer.transport.taken())
    assert (status, [choice["text"] for choice in json.loads(body)["choices"]]) == (200, ["é\ufffd", "\ufffd"])


def test_the_first_error_is_the_answer(bench: Bench) -> None:
    bench.ask("/refused/stream")
    ((status, headers, body),) = replies(bench.peer.transport.taken())
    assert (status, headers["retry-after"]) == (503, "2")
    assert json.loads(body)["error"]["message"] == "queue full"
    assert len(bench.handler.submitted) == 1, "the second is not asked any more"


def test_an_error_later_is_an_event_and_ends_the_rest(bench: Bench) -> None:
    first, second = bench.ask("/stream")
    first.respond(said(b"a"), False)
    bench.events()
    first.respond(InferenceResponse.failed(Unavailable("gone")), False)
    error, done = bench.events()
    assert (error["error"]["message"], done) == ("gone", "[DONE]")
    assert first.cancelled and second.cancelled
    second.respond(said(b"late"))
    assert bench.events() == []


def test_a_slow_reader_makes_the_model_pause(bench: Bench) -> None:
    first, _ = bench.ask("/stream")
    first.respond(said(b"a"), False)
    bench.peer.connection.pause_writing()
    assert bench.handler.paused == [(0, True), (1, True)]
    first.respond(said(b"b"), False)
    assert bench.handler.paused[2:] == [(0, True)]
    bench.peer.connection.resume_writing()
    assert bench.handler.paused[3:] == [(0, False), (1, False)]


def test_a_client_that_goes_cancels_all(bench: Bench) -> None:
    asked = bench.ask("/stream")
    bench.peer.lose()
    assert all(each.cancelled for each in asked)
    asked[0].respond(said(b"a"))


@pytest.mark.parametrize("path", ["/stream", "/whole", "/refused"])
def test_what_is_over_is_gone(bench: Bench, path: str) -> None:
    gc.disable()
    try:
        asked = bench.ask(path)
        work = weakref.ref(asked[0].sink)
        for each in asked:
            each.respond(said(b"a"))
        bench.handler.asked = bench.handler.submitted = asked = []
        del each
        assert work() is None, "without the collector"
    finally:
        gc.enable()


def test_a_response_that_makes_no_sense(bench: Bench) -> None:
    first, _ = bench.ask("/whole")
    spec, data = from_array("num_output_tokens", np.array([b"x"], object))
    first.respond(InferenceResponse(ResponseHeader("m", "1", [spec]), [data]))
    ((status, _, body),) = replies(bench.peer.transport.taken())
    assert (status, json.loads(body)["error"]["type"]) == (500, "server_error")
