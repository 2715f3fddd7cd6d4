"""The client side of HTTP/2 before frames that no server should send."""

from __future__ import annotations

from itertools import pairwise

import pytest
from http2_client_peer import Client
from http2_peer import (
    GOAWAY,
    PADDED,
    PING,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    data,
    frame,
    headers,
    literal,
    reset_frame,
    rst_stream,
    settings,
    window_update,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nerite.http2 import Http2ErrorCode, Limits
from nerite.http2.frames import MAX_STREAM_ID

OK = [(b":status", b"200"), (b"content-type", b"application/grpc")]
STATUS = [(b"grpc-status", b"0")]
LIMITS = Limits(stream_window=70_000, connection_window=80_000, max_header_block=20_000, max_ping_strikes=0)


def goaway(last: int, code: int = 0, reason: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, last.to_bytes(4) + code.to_bytes(4) + reason)


def test_the_opening_disables_push():
    client = Client(greeted=False)
    assert client.opening[0].kind == SETTINGS and client.opening[0].payload[:6] == b"\0\2\0\0\0\0"
    assert client.connection.incomplete, "the server's SETTINGS are outstanding"


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ([headers(1, [(b"x", b"y")])], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, [(b":status", b"099")])], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, [(b":status", b"twos")])], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, [(b"x", b"y"), (b":status", b"200")])], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, [*OK, (b":path", b"/")])], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, [*OK, (b"connection", b"close")])], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, [(b":status", b"101")])], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, [(b":status", b"100")], end=True)], Http2ErrorCode.PROTOCOL_ERROR),
        ([data(1, b"no headers")], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, OK), headers(1, STATUS)], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, OK), headers(1, OK, end=True)], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, [*OK, (b"content-length", b"3")]), data(1, b"1234")], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, [*OK, (b"content-length", b"3")]), data(1, b"12", end=True)], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, OK), data(1, bytes(16_384)), data(1, bytes(60_000))], Http2ErrorCode.FLOW_CONTROL_ERROR),
        ([headers(1, OK), window_update(1, 0)], Http2ErrorCode.PROTOCOL_ERROR),
    ],
)  # fmt: skip
def test_a_bad_answer_ends_its_stream_alone(bad, code):
    client = Client(Limits(stream_window=65_535))
    client.ask(b"question")
    other = client.ask(b"question")
    client.sent()
    sent = [each for each in client.send(*bad) if each.kind == RST_STREAM]
    assert sent == [reset_frame(1, code)]
    assert ("closed", 1, code) in client.answers.take()
    client.send(headers(other, OK), data(other, b"fine"), headers(other, STATUS, end=True))
    assert client.answers.take()[-1] == ("trailers", other, tuple(STATUS))


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ([headers(3, OK)], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(2, OK)], Http2ErrorCode.PROTOCOL_ERROR),
        ([data(5, b"x")], Http2ErrorCode.PROTOCOL_ERROR),
        ([rst_stream(7)], Http2ErrorCode.PROTOCOL_ERROR),
        ([window_update(9, 1)], Http2ErrorCode.PROTOCOL_ERROR),
        ([frame(PUSH_PROMISE, 4, 1, (2).to_bytes(4) + literal(OK))], Http2ErrorCode.PROTOCOL_ERROR),
        ([headers(1, OK, end=True), data(1, b"more")], Http2ErrorCode.STREAM_CLOSED),
        ([headers(1, OK, end=True), headers(1, STATUS, end=True)], Http2ErrorCode.STREAM_CLOSED),
        ([frame(0, PADDED, 1, b"\x09x")], Http2ErrorCode.PROTOCOL_ERROR),
        ([frame(GOAWAY, 0, 0, b"short")], Http2ErrorCode.FRAME_SIZE_ERROR),
        ([frame(GOAWAY, 0, 1, bytes(8))], Http2ErrorCode.PROTOCOL_ERROR),
        ([frame(PING, 0, 0, b"1234")], Http2ErrorCode.FRAME_SIZE_ERROR),
        ([frame(1, 4, 1, b"\xff\xff\xff\xff\xff\x0f")], Http2ErrorCode.COMPRESSION_ERROR),
        ([settings((4, 1 << 31))], Http2ErrorCode.FLOW_CONTROL_ERROR),
    ],
)  # fmt: skip
def test_a_violation_ends_the_connection(bad, code):
    client = Client()
    client.ask(b"question")
    client.sent()
    last = client.send(*bad)[-1]
    assert last.kind == GOAWAY and int.from_bytes(last.payload[4:8]) == code
    assert int.from_bytes(last.payload[:4]) == 0, "no stream of the server was processed: it opens none"
    events = client.answers.take()
    assert events[-1][:2] == ("closing", code)
    assert client.connection.closed and client.connection.finished and client.connection.room == 0
    assert client.answers.over == {1}


def test_a_server_that_speaks_http_1():
    client = Client(greeted=False)
    client.ask(b"question")
    client.connection.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n", 0.0)
    assert client.connection.closed and client.answers.take()[0] == ("closed", 1, Http2ErrorCode.PROTOCOL_ERROR)


def test_a_second_goaway_never_adds_streams():
    client = Client()
    for _ in range(3):
        client.ask(b"x")
    client.send(goaway(MAX_STREAM_ID))
    assert [event[0] for event in client.answers.take()] == ["closing"]
    client.send(goaway(3))
    assert client.answers.take()[1:] == [("closed", 5, Http2ErrorCode.REFUSED_STREAM)]
    client.send(goaway(5), headers(5, OK), data(5, b"late"), headers(1, OK, end=True))
    assert [event[:2] for event in client.answers.take()] == [("closing", 0), ("started", 1)]
    client.send(goaway(0, 11, b"too_many_pings"))
    assert client.answers.take() == [("closing", 11, "too_many_pings"), ("closed", 3, Http2ErrorCode.REFUSED_STREAM)]
    assert client.connection.finished and not client.connection.closed


def test_streams_closed_in_a_callback_are_not_closed_again():
    client = Client()
    streams = [client.ask(b"x") for _ in range(3)]
    closed = client.answers.stream_closed

    def reset_the_rest(stream_id, error_code):
        closed(stream_id, error_code)
        for other in streams:
            client.connection.reset(other)

    client.answers.stream_closed = reset_the_rest
    client.send(goaway(0))
    assert [event for event in client.answers.take() if event[0] == "closed"] == [
        ("closed", 1, Http2ErrorCode.REFUSED_STREAM)
    ]
    assert client.connection.finished


def test_floods_are_bounded():
    client = Client(Limits(idle_frames=10, idle_frames_per_second=0))
    client.ask(b"x")
    client.send(*[headers(1, [(b":status", b"100")])] * 30)
    assert client.connection.closed
    assert client.answers.take()[-1][:2] == ("closing", Http2ErrorCode.ENHANCE_YOUR_CALM)


def test_a_large_list_of_headers_ends_its_stream():
    client = Client(Limits(max_header_list_size=1_000))
    client.ask(b"x")
    client.send(headers(1, [*OK, (b"x", b"y" * 2_000)]))
    assert client.answers.take() == [("closed", 1, Http2ErrorCode.ENHANCE_YOUR_CALM)]
    assert not client.connection.closed


STREAM_IDS = st.one_of(st.sampled_from([0, 1, 3, 5, 7]), st.integers(0, 12))
ANSWER = st.sampled_from([OK, STATUS, [*OK, (b"content-length", b"5")], [(b":status", b"103")], [(b"x", b"y")]])
GOOD_FRAMES = st.one_of(
    st.builds(headers, STREAM_IDS, ANSWER, end=st.booleans()),
    st.builds(data, STREAM_IDS, st.binary(max_size=40), end=st.booleans()),
    st.builds(data, STREAM_IDS, st.integers(0, 16_384).map(bytes), end=st.booleans()),
    st.builds(settings, st.tuples(st.integers(0, 8), st.one_of(st.integers(0, 70_000), st.integers(0, 0xFFFFFFFF)))),
    st.builds(window_update, STREAM_IDS, st.one_of(st.integers(1, 70_000), st.integers(0, 0xFFFFFFFF))),
    st.builds(rst_stream, STREAM_IDS),
    st.builds(goaway, STREAM_IDS, st.integers(0, 14)),
    st.just(frame(PING, 0, 0, b"12345678")),
)
ANY_FRAME = st.builds(frame, st.integers(0, 11), st.integers(0, 255), STREAM_IDS, st.binary(max_size=60))


def converse(pieces: list[bytes]) -> tuple[object, ...]:
    """Feed ``pieces`` to a client with four calls, check what came of it, and return it."""
    client = Client(LIMITS, greeted=False)
    streams = [client.ask(body) for body in (b"short", None, bytes(90_000), b"")]
    sent = client.sent()
    for piece in pieces:
        client.connection.receive(piece, 0.0)
        sent += client.sent()
        assert client.connection.held_bytes < LIMITS.max_header_block + 9
    connection = client.connection
    assert connection.open_streams == len(set(streams) - client.answers.over)
    assert connection.room <= LIMITS.max_concurrent_streams
    if connection.closed:
        assert connection.finished and connection.queued == 0 and client.answers.over == set(streams)
    connection.lost()
    assert client.answers.over == set(streams), "each call ends, and ends once"
    return sent, [event for event in client.answers.events if event[0] != "started"], client.answers.bodies


@hypothesis_settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(GOOD_FRAMES, GOOD_FRAMES, GOOD_FRAMES, ANY_FRAME), max_size=25),
    st.lists(st.integers(0, 3_000), max_size=12),
    st.booleans(),
)
def test_any_frames_in_any_order_and_any_pieces(frames, places, greeted):
    stream = (settings() if greeted else b"") + b"".join(frames)
    cuts = sorted({min(place, len(stream)) for place in places} | {0, len(stream)})
    assert converse([stream]) == converse([stream[start:end] for start, end in pairwise(cuts)])
