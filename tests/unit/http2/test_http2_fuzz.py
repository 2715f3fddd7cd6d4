"""Bytes that nobody meant: ``receive`` never raises, and what comes of them is always a defined state."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from http2_peer import (
    END_HEADERS,
    GOAWAY,
    HEAD,
    PADDED,
    PRIORITISED,
    REQUEST,
    TRAILERS,
    Recorder,
    data,
    frame,
    headers,
    keep_all,
    literal,
    parse,
    rst_stream,
    settings,
    window_update,
)
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nerite.http2 import Http2Connection, Http2ErrorCode, Limits
from nerite.http2.frames import PREFACE

LIMITS = Limits(max_concurrent_streams=4, stream_window=70_000, connection_window=80_000, max_header_block=20_000)


class Server(Recorder):
    """Answers by the number of the stream: at once, at the end, not at all, or with a reset."""

    def __init__(self) -> None:
        super().__init__()
        self.started: set[int] = set()
        self.ended: set[int] = set()
        self.over: set[int] = set()

    def request_started(self, stream_id, headers, end_stream):
        assert stream_id not in self.started
        assert headers.method and (headers.path or headers.method == b"CONNECT")
        self.started.add(stream_id)
        self.bodies[stream_id] = b""
        if stream_id % 8 == 3:
            self.connection.pause(stream_id)
        if end_stream:
            self.finish(stream_id)
        elif stream_id % 8 == 5:
            self.connection.send_headers(stream_id, HEAD)
            self.connection.send_data(stream_id, [b"early"])

    def data_received(self, stream_id, data, end_stream):
        assert stream_id in self.started and stream_id not in self.over and stream_id not in self.ended
        assert data or end_stream
        self.bodies[stream_id] += data
        if end_stream:
            self.finish(stream_id)

    def finish(self, stream_id):
        self.ended.add(stream_id)
        if stream_id % 8 == 7:
            self.connection.reset(stream_id, Http2ErrorCode.INTERNAL_ERROR)
        elif stream_id % 8 == 5:
            self.connection.send_trailers(stream_id, TRAILERS)
        elif stream_id % 16 != 9:
            self.connection.reply(stream_id, HEAD, [b"y" * (stream_id * 999), self.bodies[stream_id]], TRAILERS)

    def stream_closed(self, stream_id, error_code):
        assert stream_id in self.started and stream_id not in self.over
        self.over.add(stream_id)
        super().stream_closed(stream_id, error_code)

    def connection_closing(self, error_code, reason):
        super().connection_closing(error_code, reason)
        if self.connection.closed:
            assert self.connection.open_streams == 0


def converse(pieces: list[bytes]) -> tuple[object, ...]:
    """Feed ``pieces``, check what came of it, and return it."""
    handler = Server()
    connection = handler.connection = Http2Connection(handler, LIMITS, 0.0, keep_all)
    outbound = []
    for piece in pieces:
        connection.receive(piece, 0.0)
        outbound += connection.outbound
        connection.outbound.clear()
        assert connection.held_bytes < LIMITS.max_header_block + 9
    sent = parse(outbound)
    if connection.closed:
        assert connection.finished and connection.queued == 0 and connection.open_streams == 0
        assert handler.events[-1][0] == "closing"
        if sent:
            assert sent[-1].kind == GOAWAY and Http2ErrorCode(int.from_bytes(sent[-1].payload[4:8]))
    else:
        assert connection.open_streams <= len(handler.started - handler.over)
        assert connection.open_streams <= LIMITS.max_concurrent_streams
    return sent, handler.events, handler.bodies


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    places = sorted({min(place, len(stream)) for place in places} | {0, len(stream)})
    return [stream[start:end] for start, end in pairwise(places)]


STREAM_IDS = st.one_of(st.sampled_from([0, 1, 3, 5, 7, 9, 11, 13]), st.integers(0, 40))
GOOD_FRAMES = st.one_of(
    st.builds(headers, STREAM_IDS, end=st.booleans()),
    st.builds(headers, STREAM_IDS, st.just([(b"x", b"y")]), end=st.booleans()),
    st.builds(headers, STREAM_IDS, st.just([*REQUEST, (b"content-length", b"5")]), end=st.booleans()),
    st.builds(data, STREAM_IDS, st.binary(max_size=40), end=st.booleans()),
    st.builds(data, STREAM_IDS, st.integers(0, 16_384).map(bytes), end=st.booleans()),
    st.builds(settings, st.tuples(st.integers(0, 8), st.one_of(st.integers(0, 70_000), st.integers(0, 0xFFFFFFFF)))),
    st.builds(window_update, STREAM_IDS, st.one_of(st.integers(1, 70_000), st.integers(0, 0xFFFFFFFF))),
    st.builds(rst_stream, STREAM_IDS),
    st.just(frame(6, 0, 0, b"12345678")),
    st.builds(
        frame, st.just(1), st.sampled_from([PADDED, PRIORITISED, PADDED | PRIORITISED | END_HEADERS]), STREAM_IDS,
        st.just(b"\0\0\0\0\0\0" + literal(REQUEST)),
    ),
    st.builds(frame, st.just(9), st.sampled_from([0, END_HEADERS]), STREAM_IDS, st.just(literal(REQUEST))),
)  # fmt: skip
ANY_FRAME = st.builds(frame, st.integers(0, 11), st.integers(0, 255), STREAM_IDS, st.binary(max_size=60))
CUTS = st.lists(st.integers(0, 3_000), max_size=12)


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(GOOD_FRAMES, GOOD_FRAMES, GOOD_FRAMES, ANY_FRAME), max_size=25), CUTS)
def test_any_frames_in_any_order_and_any_pieces(frames, places):
    stream = PREFACE + settings() + b"".join(frames)
    assert converse([stream]) == converse(cut(stream, places))


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), CUTS, st.booleans())
def test_any_bytes(noise, places, greeted):
    stream = (PREFACE + settings() if greeted else b"") + noise
    assert converse([stream]) == converse(cut(stream, places))


def session(source: random.Random) -> bytes:
    """A session as a client would have it."""
    parts = [PREFACE, settings((4, 100_000))]
    for stream_id in range(1, source.randrange(3, 40), 2):
        parts.append(headers(stream_id))
        for _ in range(source.randrange(3)):
            parts.append(data(stream_id, source.randbytes(source.choice([5, 50, 5_000]))))
            parts.append(source.choice([b"", window_update(0, 1_000), window_update(stream_id, 1_000), settings()]))
        parts.append(source.choice([data(stream_id, b"the end", end=True), rst_stream(stream_id)]))
    return b"".join(parts)


def damaged(stream: bytes, source: random.Random) -> bytes:
    """Flip, drop, repeat and insert a few things, anywhere but in the preface."""
    damaged = bytearray(stream)
    for _ in range(source.randrange(1, 6)):
        place = source.randrange(24, len(damaged))
        end = place + source.choice([1, 2, 9, 100])
        match source.randrange(4):
            case 0:
                damaged[place] ^= 1 << source.randrange(8)
            case 1:
                del damaged[place:end]
            case 2:
                damaged[place:place] = damaged[place:end]
            case _:
                damaged[place:place] = source.randbytes(end - place)
        if len(damaged) < 30:
            break
    return bytes(damaged)


@pytest.mark.parametrize("seed", range(10))
def test_damaged_sessions(seed):
    source = random.Random(seed)
    for _ in range(60):
        stream = damaged(session(source), source)
        places = [source.randrange(len(stream)) for _ in range(source.randrange(20))]
        assert converse([stream]) == converse(cut(stream, places))


def test_a_session_that_is_not_damaged():
    for seed in range(20):
        sent, events, bodies = converse([session(random.Random(seed))])
        assert bodies and not any(event[0] == "closing" for event in events)
        assert not any(answer.kind == GOAWAY for answer in sent)
        assert all(event[2] == Http2ErrorCode.CANCEL for event in events if event[0] == "closed")
