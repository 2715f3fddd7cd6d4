"""One HTTP connection: what arrives, in whatever pieces, and what leaves, in order."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from http_peer import FakeHandler, Peer, chunked, replies, request
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.transports.http.connection import HttpConnection
from nerite.transports.http.head import MAX_HEAD, RequestHead
from nerite.transports.limits import TransportLimits

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
def peer() -> Peer:
    return Peer()


def test_a_request_and_its_answer(peer: Peer) -> None:
    peer.send(request("/a", b"body"))
    assert peer.handler.handled == [("POST", "/a", b"body")]
    assert peer.answers() == [(200, b"/a body")]
    assert not peer.transport.closed


def test_a_request_without_a_body(peer: Peer) -> None:
    peer.send(request("/a", method="GET"))
    peer.send(request("/b", b"", "Content-Length: 0"))
    assert peer.answers() == [(200, b"/a "), (200, b"/b ")]


def test_the_answer_to_head_has_no_body(peer: Peer) -> None:
    """Or the client would take it for the beginning of the next answer."""
    peer.send(request("/a", method="HEAD"))
    written = peer.transport.taken()
    assert written == b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\n\r\n"
    peer.send(request("/b", method="GET"))
    assert peer.answers() == [(200, b"/b ")]


def test_requests_that_were_sent_ahead_are_answered_in_order(peer: Peer) -> None:
    peer.send(b"".join(request(f"/{number}", b"x" * number) for number in range(200)))
    assert peer.answers() == [(200, b"/%d " % number + b"x" * number) for number in range(200)]


def test_one_exchange_at_a_time(peer: Peer) -> None:
    peer.send(request("/later/1", b"a") + request("/2", b"b") + request("/later/3", b"c") + request("/4", b"d"))
    assert [path for _, path, _ in peer.handler.handled] == ["/later/1"]
    assert peer.answers() == []
    peer.handler.answer_next()
    assert peer.answers() == [(200, b"/later/1 a"), (200, b"/2 b")]
    assert [path for _, path, _ in peer.handler.handled] == ["/later/1", "/2", "/later/3"]
    peer.handler.answer_next()
    assert peer.answers() == [(200, b"/later/3 c"), (200, b"/4 d")]


def test_the_same_question_with_other_data_is_recognised(peer: Peer) -> None:
    for number in range(3):
        peer.send(request("/again", b"abc%d" % number))
    assert peer.handler.known == 2
    assert peer.answers() == [(200, b"/again abc%d" % number) for number in range(3)]


@pytest.mark.parametrize(
    "other",
    [
        request("/again", b"abd2"),
        request("/again", b"abc22"),
        request("/again", b"abc"),
        request("/Again/", b"abc2"),
        request("/again", b"abc2", "X-More: 1"),
        request("/again", b"abc1") + request("/again", b"abc2"),
    ],
)
def test_another_question_is_read(other: bytes) -> None:
    """Also one that is as long, and one behind another, and the first question is known only if it was the last."""
    peer = Peer()
    peer.send(request("/again", b"abc1"))
    peer.send(other)
    assert peer.handler.known == 0
    fresh = Peer()
    fresh.send(other)
    assert peer.answers()[1:] == fresh.answers()


def test_a_known_question_waits_its_turn(peer: Peer) -> None:
    """Behind an answer that is still due, and where the client does not read."""
    peer.send(request("/again", b"abc1"))
    peer.send(request("/later", b"slow"))
    peer.send(request("/again", b"abc2"))
    assert peer.handler.known == 0
    peer.handler.answer_next()
    peer.connection.pause_writing()
    peer.send(request("/again", b"abc3"))
    assert peer.answers() == [(200, b"/again abc1"), (200, b"/later slow"), (200, b"/again abc2")]
    peer.connection.resume_writing()
    assert peer.answers() == [(200, b"/again abc3")]


EVERY_KIND = [
    request("/sized", b"0123456789"),
    chunked("/chunked", b"abc", b"defgh"),
    request("/empty", method="GET"),
    request("/refuse/sized", b"not wanted"),
    request("/expect", b"expected", "Expect: 100-continue"),
    chunked("/no/chunks"),
    request("/later", b"slow"),
    request("/refuse/empty", method="GET"),
    request("/again", b"abc1"),
    request("/again", b"abc2"),
    request("/again", b"abd3"),
    request("/last", b"\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
]
ANSWERS = [
    (200, b"/sized 0123456789"),
    (200, b"/chunked abcdefgh"),
    (200, b"/empty "),
    (403, b"/refuse/sized"),
    (200, b"/expect expected"),
    (200, b"/no/chunks "),
    (200, b"/later slow"),
    (403, b"/refuse/empty"),
    (200, b"/again abc1"),
    (200, b"/again abc2"),
    (200, b"/again abd3"),
    (200, b"/last \r\n\r\nGET / HTTP/1.1\r\n\r\n"),
]


def play(pieces: list[bytes]) -> list[tuple[int, bytes]]:
    """Send pieces, answering what waits between them; return all answers."""
    peer = Peer()
    written = b""
    for piece in pieces:
        peer.send(piece)
        while peer.handler.waiting:
            peer.handler.answer_next()
        written += peer.transport.taken()
    assert not peer.transport.closed
    return [(status, body) for status, _, body in replies(written.replace(CONTINUE, b""))]


def test_cut_in_two_at_every_byte() -> None:
    stream = b"".join(EVERY_KIND)
    for at in range(len(stream)):
        assert play([stream[:at], stream[at:]]) == ANSWERS


def test_byte_by_byte() -> None:
    stream = b"".join(EVERY_KIND)
    assert play([stream[at : at + 1] for at in range(len(stream))]) == ANSWERS


@settings(max_examples=100)
@given(st.lists(st.integers(0, len(EVERY_KIND) - 1), max_size=12), st.integers(0, 2**32))
def test_any_requests_cut_anywhere(chosen: list[int], seed: int) -> None:
    stream = b"".join(EVERY_KIND[index] for index in chosen)
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(len(stream) + 1), min(len(stream), rng.randrange(20))))
    points = [0, *cuts, len(stream)]
    assert play([stream[a:b] for a, b in itertools.pairwise(points)]) == [ANSWERS[i] for i in chosen]


@pytest.mark.parametrize("make", [lambda path: chunked(path, b"x"), lambda path: request("/refuse" + path, b"x")])
def test_any_number_may_be_sent_ahead(peer: Peer, make: object) -> None:
    """However they are framed: nothing recurses from one request to the next."""
    assert callable(make)
    peer.send(b"".join(make(f"/{number}") for number in range(2000)))
    assert len(peer.answers()) == 2000
    assert not peer.transport.closed


def test_a_body_larger_than_one_read(peer: Peer) -> None:
    body = random.Random(1).randbytes(1_000_000)
    peer.send(request("/large", body) + request("/next", b"x"))
    assert peer.answers() == [(200, b"/large " + body), (200, b"/next x")]


def test_a_large_body_is_received_where_the_handler_says(peer: Peer) -> None:
    place = memoryview(bytearray(1_000_000))
    peer.handler.buffers.append(place)
    body = random.Random(1).randbytes(1_000_000)
    seen: list[object] = []
    peer.handler.on_handle = lambda connection, head: seen.append(bytes(place) == body)
    peer.send(request("/large", body))
    assert seen == [True]


def test_each_body_has_memory_of_its_own(peer: Peer) -> None:
    kept: list[memoryview] = []

    class Keeping(FakeHandler):
        def handle(self, connection: HttpConnection, head: RequestHead, body: memoryview) -> None:
            kept.append(body)
            super().handle(connection, head, body)

    peer = Peer(Keeping())
    for number in range(5):
        peer.send(request("/small", b"%d" % number * 100))
        peer.send(chunked("/chunked", b"%d" % number * 100))
    assert [bytes(body) for body in kept] == [b"%d" % number * 100 for number in range(5) for _ in range(2)]


# Expect: 100-continue


def test_a_client_that_waits_is_told_to_go_on(peer: Peer) -> None:
    head, body = request("/a", b"body", "Expect: 100-continue")[:-4], b"body"
    peer.send(head)
    assert peer.transport.taken() == CONTINUE
    peer.send(body)
    assert peer.answers() == [(200, b"/a body")]


def test_a_client_that_did_not_wait_is_not_told(peer: Peer) -> None:
    peer.send(request("/a", b"body", "Expect: 100-continue"))
    assert peer.answers() == [(200, b"/a body")]


def test_a_client_that_waits_with_chunks_is_told_to_go_on(peer: Peer) -> None:
    peer.send(request("/a", b"", "Expect: 100-continue", "Transfer-Encoding: chunked"))
    assert peer.transport.taken() == CONTINUE
    peer.send(b"1\r\nx\r\n0\r\n\r\n")
    assert peer.answers() == [(200, b"/a x")]


def test_a_client_that_waits_in_vain_is_told_at_once(peer: Peer) -> None:
    peer.send(request("/refuse", b"body", "Expect: 100-continue")[:-4])
    assert peer.answers() == [(403, b"/refuse")]
    peer.send(b"body" + request("/next"))
    assert peer.answers() == [(200, b"/next ")]


# Refusals


def test_the_body_of_a_refused_request_passes_by(peer: Peer) -> None:
    body = b"GET /smuggled HTTP/1.1\r\n\r\n" * 50_000
    stream = request("/refuse", body) + request("/next")
    peer.send(stream[:100])
    assert peer.answers() == [(403, b"/refuse")]
    peer.send(stream[100:])
    assert peer.answers() == [(200, b"/next ")]
    assert [path for _, path, _ in peer.handler.handled] == ["/next"]


def test_a_refused_request_in_chunks_is_the_last_one(peer: Peer) -> None:
    peer.send(chunked("/refuse", b"x") + request("/next"))
    ((status, headers, body),) = replies(peer.transport.taken())
    assert (status, body, headers["connection"]) == (403, b"/refuse", "close")
    assert peer.transport.closed


def test_a_chunked_body_beyond_the_limit() -> None:
    peer = Peer(max_body=1000)
    peer.send(chunked("/a", b"x" * 1001) + request("/next"))
    (status, body), after = peer.answers()
    assert status == 400
    assert body == (
        b'{"error":"request JSON size of 1001 bytes exceeds the maximum allowed input size of 1000 bytes. '
        b'Use --http-max-input-size to increase the limit."}'
    )
    assert after == (200, b"/next ")
    assert [path for _, path, _ in peer.handler.handled] == ["/next"]


def test_a_sized_body_beyond_the_limit() -> None:
    """No memory is made for it, whatever it is for."""
    peer = Peer(max_body=1000)
    peer.send(request("/a", b"x" * 1001) + request("/b", b"x" * 1000))
    (status, body), after = peer.answers()
    assert (status, body) == (
        400,
        b'{"error":"request JSON size of 1001 bytes exceeds the maximum allowed input size of 1000 bytes. '
        b'Use --http-max-input-size to increase the limit."}',
    )
    assert after == (200, b"/b " + b"x" * 1000)
    peer.send(request("/a", b"", f"Content-Length: {10**15}"))
    assert peer.answers()[0][0] == 400


@pytest.mark.parametrize(
    ("json_size", "told"),
    [
        (0, b"Raw input has a byte_size (1001 bytes) that exceeds the maximum allowed value of 1000 bytes."),
        (1, b"request size of 1001 bytes, tensors included, exceeds the maximum allowed input size of 1000 bytes."),
    ],
)
def test_a_body_with_tensors_beyond_the_limit(json_size: int, told: bytes) -> None:
    peer = Peer(max_body=1000)
    peer.send(request("/a", b"x" * 1001, f"Inference-Header-Content-Length: {json_size}"))
    ((status, headers, body),) = replies(peer.transport.taken())
    assert (status, headers["content-type"]) == (400, "application/json")
    assert body == b'{"error":"' + told + b' Use --http-max-input-size to increase the limit."}'


def test_too_many_chunks(peer: Peer) -> None:
    peer.send(request("/a", b"", "Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 65537)
    ((status, headers, body),) = replies(peer.transport.taken())
    assert (status, headers["connection"]) == (400, "close")
    assert b"Chunked request body exceeds maximum of 65536 non-empty chunks." in body
    assert peer.transport.closed


@pytest.mark.parametrize(
    "stream",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nA\r\n\r\n",
        request("/a", b"", "Content-Length: x"),
        request("/a", b"", "Transfer-Encoding: chunked") + b"nonsense\r\n",
        request("/a", b"", "Transfer-Encoding: chunked") + b"1\r\nxx\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * MAX_HEAD,
        b"GET / HTTP/1.1\r\nA: " + b"x" * MAX_HEAD + b"\r\n\r\n",
        b"x" * (MAX_HEAD + 1),
    ],
)
@pytest.mark.parametrize("step", [10**9, 1000])
def test_what_is_not_http_ends_the_connection_with_an_answer(peer: Peer, stream: bytes, step: int) -> None:
    peer.send(request("/before"))
    for at in range(0, len(stream), step):
        peer.send(stream[at : at + step])
    before, (status, headers, body) = replies(peer.transport.taken())
    assert before[0] == 200
    assert (status, headers["connection"]) == (400, "close")
    assert len(json.loads(body)["error"]) > len("Bad Request: ")
    assert peer.transport.closed


@pytest.mark.parametrize(
    "wrong",
    [
        b"hello\r\n\r\n",
        request("/refuse", b"", "Transfer-Encoding: chunked") + b"5\r\nsome",
        request("/a", b"", "Transfer-Encoding: chunked") + b"nonsense\r\n",
    ],
)
def test_what_comes_after_the_last_answer_is_taken_until_the_client_is_done(peer: Peer, wrong: bytes) -> None:
    peer.transport.half_closes = True
    peer.send(wrong)
    ((status, _),) = peer.answers()
    assert status in (400, 403) and peer.transport.ended
    peer.send(request("/more", b"x" * 100_000))
    assert (peer.answers(), peer.transport.closed, peer.connection.busy) == ([], False, False)
    assert not any(path == "/more" for _, path, _ in peer.handler.handled)
    assert not peer.connection.eof_received(), "then it is closed"


def test_a_client_that_is_never_done_after_the_last_answer(peer: Peer) -> None:
    peer.transport.half_closes = True
    peer.send(b"hello\r\n\r\n")
    peer.connection.check(0.0, 60.0)
    assert not peer.transport.closed
    peer.send(b"x" * 1000)
    peer.connection.check(7.5, 60.0)
    assert peer.transport.closed
    retired = Peer()
    retired.transport.half_closes = True
    retired.send(b"hello\r\n\r\n")
    retired.connection.retire()
    assert retired.transport.closed


def test_a_head_as_large_as_allowed(peer: Peer) -> None:
    start = b"GET /a HTTP/1.1\r\nA: "
    head = start + b"x" * (MAX_HEAD - len(start) - 4) + b"\r\n\r\n"
    assert len(head) == MAX_HEAD
    peer.send(head)
    peer.send(head[:1000])
    peer.send(head[1000:])
    assert peer.answers() == [(200, b"/a ")] * 2


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=60) | st.sampled_from(EVERY_KIND), max_size=8), st.sampled_from((1, 7, 10**6)))
def test_no_bytes_make_it_fail(pieces: list[bytes], step: int) -> None:
    stream = b"".join(pieces)
    peer = Peer()
    for at in range(0, len(stream), step):
        peer.send(stream[at : at + step])
        while peer.handler.waiting:
            peer.handler.answer_next()
    replies(peer.transport.taken().replace(CONTINUE, b""))
    peer.lose()


# Keeping and closing


@pytest.mark.parametrize(
    ("version", "lines", "closed", "told"),
    [
        ("1.1", [], False, False),
        ("1.1", ["Connection: close"], True, True),
        ("1.0", [], True, False),
        ("1.0", ["Connection: keep-alive"], False, False),
    ],
)
@pytest.mark.parametrize("body", [b"", b"body"])
def test_who_closes(peer: Peer, version: str, lines: list[str], closed: bool, told: bool, body: bytes) -> None:
    peer.send(request("/a", body, *lines, version=version) + request("/b"))
    found = replies(peer.transport.taken())
    assert [answer for _, _, answer in found] == [b"/a " + body, *([] if closed else [b"/b "])]
    assert (found[0][1].get("connection") == "close") == told
    assert peer.transport.closed == closed


def test_a_later_answer_closes_as_well(peer: Peer) -> None:
    peer.send(request("/later", b"x", "Connection: close"))
    assert not peer.transport.closed
    peer.handler.answer_next()
    assert peer.transport.closed
    assert peer.answers() == [(200, b"/later x")]


def test_a_client_that_stops_sending_is_done(peer: Peer) -> None:
    assert peer.connection.eof_received() is False


# Inferences


def infers(handler: FakeHandler) -> list[InferenceRequest]:
    """Have every request begin an inference."""
    begun: list[InferenceRequest] = []

    def begin(connection: HttpConnection, head: RequestHead) -> None:
        header = RequestHeader("m", "", [])
        connection.request = InferenceRequest(header, [], connection, 0, str(len(begun)))
        begun.append(connection.request)

    handler.on_handle = begin
    return begun


OK = InferenceResponse(None)


def test_an_inference_is_answered(peer: Peer) -> None:
    (begun, _) = (infers(peer.handler), None)
    peer.send(request("/later") + request("/later"))
    begun[0].respond(OK)
    assert peer.answers() == [(200, b"inferred 0")]
    begun[1].respond(OK)
    assert peer.answers() == [(200, b"inferred 1")]


def test_a_client_that_goes_cancels_its_inference(peer: Peer) -> None:
    begun = infers(peer.handler)
    peer.send(request("/later"))
    told: list[InferenceRequest] = []
    begun[0].on_cancel = told.append
    peer.lose()
    assert told == begun
    begun[0].respond(OK)
    assert peer.transport.taken() == b""
    assert peer.shared.connections == set()


def test_a_client_that_goes_after_its_answer_cancels_nothing(peer: Peer) -> None:
    begun = infers(peer.handler)
    peer.send(request("/later"))
    begun[0].respond(OK)
    peer.lose()
    assert not begun[0].cancelled


def test_an_answer_that_comes_too_late_is_dropped(peer: Peer) -> None:
    peer.send(request("/later"))
    peer.lose()
    peer.handler.answer_next()
    assert peer.transport.taken() == b""


def test_a_client_that_goes_in_the_middle_of_a_body(peer: Peer) -> None:
    peer.send(request("/a", b"x" * 1000)[:-500])
    peer.lose()
    assert peer.handler.handled == []


# A client that does not read


def test_nobody_is_answered_who_does_not_read(peer: Peer) -> None:
    peer.connection.pause_writing()
    for number in range(100):
        peer.send(request(f"/{number}"))
    assert len(peer.handler.handled) <= 1
    peer.connection.resume_writing()
    assert peer.answers() == [(200, b"/%d " % number) for number in range(100)]


def test_reading_stops_when_too_much_was_sent_ahead(peer: Peer) -> None:
    peer.connection.pause_writing()
    stream = request("/a", b"x" * 1000)
    sent = 0
    while peer.transport.reading and sent < 10_000:
        peer.send(stream)
        sent += 1
    assert 50 < sent < 100
    peer.connection.resume_writing()
    assert peer.transport.reading
    assert len(peer.answers()) == sent


def test_reading_stops_while_an_exchange_is_busy_and_goes_on_after_it(peer: Peer) -> None:
    peer.send(request("/later"))
    stream = request("/a", b"x" * 1000)
    sent = 0
    while peer.transport.reading and sent < 10_000:
        peer.send(stream)
        sent += 1
    assert 50 < sent < 100
    peer.handler.answer_next()
    assert peer.transport.reading
    assert len(peer.answers()) == sent + 1


def test_an_answer_while_the_client_does_not_read_is_written_and_the_next_waits(peer: Peer) -> None:
    peer.send(request("/later") + request("/b"))
    peer.connection.pause_writing()
    peer.handler.answer_next()
    assert peer.answers() == [(200, b"/later ")]
    peer.connection.resume_writing()
    assert peer.answers() == [(200, b"/b ")]


# Stopping


def test_an_idle_connection_is_closed_at_once(peer: Peer) -> None:
    peer.send(request("/a"))
    peer.connection.shut_down()
    assert peer.transport.closed


def test_a_connection_that_drains_ends_with_its_next_answer(peer: Peer) -> None:
    peer.send(request("/a"))
    peer.transport.taken()
    peer.connection.drain()
    assert not peer.transport.closed
    peer.send(request("/b"))
    ((status, headers, body),) = replies(peer.transport.taken())
    assert (status, headers["connection"], body) == (200, "close", b"/b ")
    assert peer.transport.closed


@pytest.mark.parametrize("begun", [request("/later", b"x" * 10), chunked("/later", b"x" * 10)])
@pytest.mark.parametrize("part", [30, -10, -3, None])
def test_an_exchange_that_has_begun_is_finished_first(peer: Peer, begun: bytes, part: int | None) -> None:
    peer.send(begun[:part])
    assert peer.connection.busy
    peer.connection.shut_down()
    assert not peer.transport.closed
    if part is not None:
        peer.send(begun[part:])
    peer.handler.answer_next()
    ((status, headers, body),) = replies(peer.transport.taken())
    assert (status, headers["connection"], body) == (200, "close", b"/later " + b"x" * 10)
    assert peer.transport.closed


@pytest.mark.parametrize("asks", [True, False])
def test_a_stream_that_did_not_say_that_it_is_the_last_answer_is_followed_by_one(peer: Peer, asks: bool) -> None:
    """Its client may use the connection again at once, and cannot tell whether a request that is lost was executed."""

    async def play() -> None:
        peer.send(request("/later"))
        peer.connection.open(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"token")
        peer.connection.drain()
        peer.connection.close_reply()
        peer.connection.shut_down()
        assert peer.transport.taken().endswith(b"token\r\n0\r\n\r\n")
        assert not peer.transport.closed
        if asks:
            peer.send(request("/b"))
            ((status, headers, body),) = replies(peer.transport.taken())
            assert (status, headers["connection"], body) == (200, "close", b"/b ")
        else:
            loop = asyncio.get_running_loop()
            moment = loop.time()
            while not peer.transport.closed:
                assert loop.time() < moment + 30
                await asyncio.sleep(0.01)
        assert peer.transport.closed

    asyncio.run(play())


def test_a_stream_that_says_that_it_is_the_last_answer_is(peer: Peer) -> None:
    peer.send(request("/later"))
    peer.connection.drain()
    peer.connection.open(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"token")
    peer.connection.close_reply()
    assert b"connection: close" in peer.transport.taken().lower()
    assert peer.transport.closed


def test_what_was_sent_ahead_is_not_answered_any_more(peer: Peer) -> None:
    peer.send(request("/later") + request("/b"))
    peer.connection.shut_down()
    peer.handler.answer_next()
    assert peer.answers() == [(200, b"/later ")]
    assert peer.transport.closed


def test_abort(peer: Peer) -> None:
    peer.send(request("/later"))
    peer.connection.abort()
    assert peer.transport.aborted


def test_the_listener_knows_its_connections(peer: Peer) -> None:
    assert peer.shared.connections == {peer.connection}
    assert not peer.connection.busy
    peer.send(request("/later"))
    assert peer.connection.busy
    peer.lose()
    assert peer.shared.connections == set()


# What arrives is bounded


def with_room(size: int) -> Peer:
    return Peer(bounds=TransportLimits(max_bytes=size))


NO_ROOM = b'{"error":"requests in progress use the 100000 bytes of --max-bytes-in-flight. Try again in 1 s"}'


@pytest.mark.parametrize("whole", [True, False])
def test_bodies_count_until_they_are_answered(whole: bool) -> None:
    peer = with_room(100_000)
    text = request("/later/again", b"x" * 60_000)
    for _ in range(3):  # read, and recognised
        for at in range(0, len(text), len(text) if whole else 7_000):
            peer.send(text[at : at + (len(text) if whole else 7_000)])
        assert 60_000 <= peer.bounds.bytes.used <= len(text)
        peer.handler.answer_next()
        assert peer.bounds.bytes.used == 0
    assert [status for status, _ in peer.answers()] == [200] * 3


def test_small_bodies_do_not_count() -> None:
    peer = with_room(1)
    peer.send(request("/a", b"x" * 10_000))
    assert [status for status, _ in peer.answers()] == [200]
    assert peer.bounds.bytes.used == 0


def test_a_body_that_there_is_no_room_for_is_refused_and_passes_by() -> None:
    peer = with_room(100_000)
    assert peer.bounds.bytes.take(50_000)
    text = request("/a", b"x" * 60_000)
    for at in (len(text), 20_000):
        peer.send(text[:at])
        ((status, headers, body),) = replies(peer.transport.taken())
        assert (status, headers["retry-after"], body) == (429, "1", NO_ROOM)
        peer.send(text[at:])
    assert (peer.bounds.bytes.used, peer.bounds.bytes.refused) == (50_000, 2)
    peer.bounds.bytes.give_back(50_000)
    peer.send(text)
    assert [status for status, _ in peer.answers()] == [200]
    assert not peer.transport.closed


def test_a_known_request_that_there_is_no_room_for() -> None:
    peer = with_room(100_000)
    text = request("/again", b"x" * 60_000)
    peer.send(text)
    assert [status for status, _ in peer.answers()] == [200]
    assert peer.bounds.bytes.take(50_000)
    peer.send(text)
    assert peer.answers() == [(429, NO_ROOM)]
    peer.bounds.bytes.give_back(50_000)
    peer.send(text)
    assert [status for status, _ in peer.answers()] == [200]
    assert peer.handler.known == 1


def test_a_body_that_there_is_no_room_for_any_more() -> None:
    peer = with_room(100_000)
    text = request("/a", b"x" * 60_000)
    peer.send(text[:20_000])
    assert peer.bounds.bytes.used <= 40_000
    assert peer.bounds.bytes.take(60_000)
    peer.send(text[20_000:50_000])
    assert peer.answers() == [(429, NO_ROOM)]
    assert peer.bounds.bytes.used == 60_000
    peer.send(text[50_000:] + request("/b", b"next"))
    assert peer.answers() == [(200, b"/b next")]


def test_chunks_that_there_is_no_room_for() -> None:
    peer = with_room(100_000)
    peer.send(chunked("/a", b"x" * 60_000, b"x" * 60_000)[:90_000])
    assert 80_000 < peer.bounds.bytes.used <= 90_000
    peer.send(b"x" * 20_000)
    assert peer.answers() == [(429, NO_ROOM)]
    assert peer.transport.closed
    assert peer.bounds.bytes.used == 0


def test_what_is_sent_ahead_counts() -> None:
    peer = with_room(100_000)
    peer.send(request("/later"))
    peer.send(b"x" * 40_000)
    assert peer.bounds.bytes.used == 40_000
    assert peer.transport.reading
    assert peer.bounds.bytes.take(50_000)
    peer.send(b"x" * 20_000)
    assert not peer.transport.reading
    peer.lose()
    assert peer.bounds.bytes.used == 50_000


def test_a_head_that_there_is_no_room_for() -> None:
    peer = with_room(100_000)
    assert peer.bounds.bytes.take(90_000)
    peer.send(b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000)
    ((status, _),) = peer.answers()
    assert status == 429
    assert peer.transport.closed


def test_a_client_that_goes_leaves_nothing() -> None:
    peer = with_room(100_000)
    peer.send(request("/later", b"x" * 60_000)[:50_000])
    assert peer.bounds.bytes.used > 0
    peer.lose()
    assert (peer.bounds.bytes.used, len(peer.bounds.connections)) == (0, 0)


def test_a_connection_in_the_table() -> None:
    peer = Peer()
    assert (len(peer.bounds.connections), peer.connection.busy, peer.connection.served) == (1, False, 0)
    peer.send(request("/later"))
    assert peer.connection.busy
    peer.handler.answer_next()
    assert (peer.connection.busy, peer.connection.served) == (False, 1)
    peer.connection.retire()
    assert peer.transport.closed


@pytest.mark.parametrize(
    ("sent", "status", "counted"),
    [
        (b"GET / HT", 408, (1, 0)),
        (request("/a", b"abc")[:-1], 408, (1, 0)),
        (request("/refuse", b"abc")[:-1], None, (0, 1)),
    ],
)
def test_a_request_that_does_not_come_on(sent: bytes, status: int | None, counted: tuple[int, int]) -> None:
    peer = Peer()
    peer.send(sent)
    peer.transport.taken()
    for now in (0, 59, 60):
        peer.connection.check(now, 60)
    assert [status for status, _ in peer.answers()] == ([status] if status else [])
    assert (peer.bounds.refused["stalled"], peer.bounds.closed["stalled"]) == counted
    assert peer.transport.closed
