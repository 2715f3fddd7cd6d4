"""How answers over HTTP are taken apart, whatever the pieces in which they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable

import pytest

from nerite.client.connection import Address
from nerite.tools.bench.forms import Script
from nerite.tools.bench.http_generator import ChatEvents, Events, HttpPort, Recorder, RequestSlot
from nerite.tools.bench.loops import ClosedLoop
from nerite.tools.bench.measurement import Records

REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
REFUSED = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 18\r\n\r\n{"error": "never"}'
STREAM = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    b'10\r\ndata: {"a": 1}\n\n\r\n10\r\ndata: {"a": 2}\n\n\r\n0\r\n\r\n'
)
ANSWERS = 12


class Few(ClosedLoop):
    """Asks as often as is enough."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.finished = asyncio.Event()
        self.asked = 0

    def following(self) -> bytes:
        self.asked += 1
        return REQUEST

    def answered(self, slot: RequestSlot) -> None:
        self._look()
        super().answered(slot)

    def failed(self, slot: RequestSlot, reason: str) -> None:
        self._look()
        super().failed(slot, reason)

    def _look(self) -> None:
        if self.asked == ANSWERS:
            self.end()
            self.finished.set()


def asked(
    answer: bytes, piece: int = 0, *, closes: bool = False, events: Callable[[], Events] | None = None
) -> Records:
    """Return the records of a closed loop of one, whose every request gets ``answer`` in pieces."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(ConnectionError):
                while self.request.recv(len(REQUEST), socket.MSG_WAITALL):
                    for at in range(0, len(answer), piece or len(answer)):
                        self.request.sendall(answer[at : at + (piece or len(answer))])
                    if closes:
                        break

    async def run(address: Address) -> Records:
        work = Few(Recorder())
        slot = HttpPort(address, None, events).slot(work, Script(work.following))
        work.begin([slot])
        await asyncio.wait_for(work.finished.wait(), 30)
        slot.close()
        return work.recorder.take()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        accepting = threading.Thread(target=server.serve_forever, args=(0.01,))
        accepting.start()
        try:
            return asyncio.run(run(Address.parse(f"127.0.0.1:{server.server_address[1]}")))
        finally:
            server.shutdown()
            accepting.join()


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED, EMPTY, CLOSING], ids=["whole", "chunked", "empty", "closing"])
@pytest.mark.parametrize("piece", [0, 1, 7, 41])
def test_each_answer_is_counted_once(answer: bytes, piece: int) -> None:
    records = asked(answer, piece, closes=answer is CLOSING)
    assert records.reasons == []
    assert len(records.ended) == ANSWERS
    assert (records.ended >= records.sent).all()


@pytest.mark.parametrize("piece", [0, 1])
def test_a_refusal_says_why(piece: int) -> None:
    records = asked(REFUSED, piece)
    assert len(records.ended) == 0
    assert set(records.reasons) == {"400: never"}


def test_a_server_that_hangs_up_is_a_failure() -> None:
    records = asked(WHOLE[:-1], closes=True)
    assert len(records.ended) == 0
    assert all("closed the connection" in reason for reason in records.reasons)


@pytest.mark.parametrize("piece", [0, 1, 50])
def test_the_events_of_a_stream(piece: int) -> None:
    records = asked(STREAM, piece, events=Events)
    assert records.reasons == []
    assert set(records.parts) == {2.0}
    assert len(records.gaps) == len(records.ended)
    assert (records.first <= records.last).all()


def test_tokens_without_text_are_an_answer() -> None:
    usage = {"completion_tokens": 1, "prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
    event = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(event)
    records = asked(head + event, events=ChatEvents)
    assert records.reasons == []
    assert set(zip(records.tokens, records.prompt, records.cached, strict=True)) == {(1, 7, 3)}


def test_the_text_of_an_answer_is_kept_for_the_next_turn() -> None:
    events = ChatEvents()
    for content in ("Who", " else?"):
        events.feed(f"data: {json.dumps({'choices': [{'delta': {'content': content}}]})}\n\n".encode(), 1.0)
    assert "".join(events.pieces) == "Who else?"


def test_chunks_of_a_chat() -> None:
    events = ChatEvents()
    events.feed(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\r\n\r\ndata: {"cho', 1.0)
    assert events.times == []
    events.feed(b'ices": [{"delta": {"content": "a"}}]}\n\ndata: {"choices": [{"text": "b"}]}\n\n', 2.0)
    events.feed(b': a comment\n\ndata: {"choices": [], "usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n', 3.0)
    assert events.times == [2.0, 2.0]
    assert events.tokens == 7
    assert events.error == ""
    events.feed(b'data: {"error": {"message": "no memory"}}\n\n', 4.0)
    assert events.error == "no memory"
