"""Every flood, up to its limit and one beyond it, by a clock that the tests turn."""

from __future__ import annotations

import tracemalloc

import pytest
from http2_peer import (
    ACK,
    END_HEADERS,
    HEAD,
    PADDED,
    REQUEST,
    TRAILERS,
    Frame,
    Peer,
    data,
    frame,
    headers,
    literal,
    rst_stream,
    settings,
    window_update,
)
from hypothesis import given
from hypothesis import strategies as st

from nerite.http2 import Http2ErrorCode, Limits
from nerite.http2.limits import AbuseBudget

PING = frame(6, 0, 0, b"12345678")
PONG = Frame(6, ACK, 0, b"12345678")
CALM = Http2ErrorCode.ENHANCE_YOUR_CALM


@given(
    st.integers(1, 50),
    st.floats(0.5, 50),
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5)), max_size=60),
)
def test_a_budget_allows_a_burst_and_a_rate(burst, rate, spending):
    budget = AbuseBudget(burst, rate, 0.0)
    now, allowed, left = 0.0, 0, float(burst)
    for pause, events in spending:
        now += pause
        left = min(burst, left + pause * rate)
        if not budget.spend(now, events):
            assert left < events + 1e-6
            break
        assert left > events - 1e-6
        left -= events
        allowed += events
    assert allowed <= burst + now * rate + 1e-6


# -- rapid reset

FEW_RESETS = Limits(resets=3, resets_per_second=2)


def test_rapid_reset():
    peer = Peer(FEW_RESETS)
    for stream_id in (1, 3, 5):
        assert peer.send(headers(stream_id), rst_stream(stream_id)) == []
    assert peer.goaway(peer.send(headers(7), rst_stream(7))) == (CALM, "too many streams were reset")


def test_resets_at_the_allowed_rate_are_no_flood():
    peer = Peer(FEW_RESETS)
    for stream_id in range(1, 400, 2):
        peer.now += 0.5
        assert peer.send(headers(stream_id), rst_stream(stream_id)) == []


@pytest.mark.parametrize(
    "provocation",
    [
        lambda stream_id: headers(stream_id) + window_update(stream_id, 0),
        lambda stream_id: headers(stream_id) + window_update(stream_id, (1 << 31) - 1),
        lambda stream_id: headers(stream_id, end=True) + data(stream_id, b"more"),
        lambda stream_id: headers(stream_id, end=True) + headers(stream_id, ((b"x", b"y"),), end=True),
        lambda stream_id: headers(stream_id) + frame(2, 0, stream_id, bytes(4)),
        lambda stream_id: headers(stream_id, ((b"x", b"no request"),)),
        lambda stream_id: headers(stream_id, (*REQUEST, (b"x", b"large" * 4_000))),
    ],
)
def test_streams_that_we_have_to_reset_count_like_those_that_the_peer_resets(provocation):
    peer = Peer(FEW_RESETS)
    for stream_id in (1, 3, 5):
        assert [sent.kind for sent in peer.send(provocation(stream_id))] == [3]
    assert peer.goaway(peer.send(provocation(7)))[0] is CALM


def test_streams_beyond_the_allowed_number():
    peer = Peer(Limits(max_concurrent_streams=1, resets=3, resets_per_second=0))
    peer.send(headers(1))
    assert [sent.kind for sent in peer.send(headers(3), headers(5), headers(7))] == [3, 3, 3]
    assert peer.goaway(peer.send(headers(9)))[0] is CALM


def test_resets_that_we_remember_are_bounded():
    peer = Peer(Limits(resets=100_000, max_concurrent_streams=1))
    peer.send(headers(1))
    refused = range(3, 20_003, 2)
    peer.send(*(headers(stream_id) for stream_id in refused))
    assert peer.send(data(refused[-4_096], b"late")) == []
    assert peer.goaway(peer.send(data(refused[-4_097], b"late")))[0] is Http2ErrorCode.STREAM_CLOSED


# -- SETTINGS


def test_settings_flood():
    peer = Peer(Limits(settings=4, settings_per_second=2))
    # The first SETTINGS has counted as one.
    assert peer.send(settings(), settings((3, 1), (3, 2)))[-1] == Frame(4, ACK, 0, b"")
    peer.now += 1.0
    assert len(peer.send(settings(), settings())) == 2
    sent = peer.send(settings())
    assert peer.goaway(sent) == (CALM, "too many SETTINGS")


# -- frames that do nothing

FEW_IDLE = Limits(idle_frames=5, idle_frames_per_second=2, max_ping_strikes=0)


@pytest.mark.parametrize(
    "idle",
    [
        window_update(0, 1),
        window_update(1, 1),
        window_update(99, 1),
        frame(2, 0, 1, bytes(5)),
        frame(4, ACK, 0),
        frame(6, ACK, 0, bytes(8)),
        PING,
        frame(7, 0, 0, bytes(8)),
        frame(42, 0, 0, b"unknown"),
        data(1, b""),
        frame(0, PADDED, 1, b"\0"),
        frame(0, PADDED, 1, b"\x09" + bytes(9)),
        rst_stream(99),
        data(97, b""),
        headers(97, ((b"x", b"late"),)),
    ],
)
def test_idle_frames(idle):
    peer = Peer(FEW_IDLE)
    peer.send(headers(1), headers(97), headers(99))
    peer.connection.reset(97)
    peer.connection.reset(99)
    for _ in range(5):
        peer.send(idle)
        assert not peer.connection.closed
    peer.now += 0.5
    peer.send(idle)
    assert peer.goaway(peer.send(idle)) == (CALM, "too many frames that do nothing")


def test_data_that_was_on_its_way_when_we_replied_is_no_flood():
    peer = Peer(FEW_IDLE)
    peer.send(headers(1))
    peer.connection.reply(1, HEAD, [b"too large"], TRAILERS)
    peer.sent()
    assert [sent.kind for sent in peer.send(*[data(1, bytes(16_384))] * 600)] == [8]


def test_replies_earn_window_updates():
    peer = Peer(FEW_IDLE)
    for stream_id in range(1, 200, 2):
        peer.send(headers(stream_id), data(stream_id, b"x", end=True))
        peer.connection.reply(stream_id, HEAD, [b"y"], TRAILERS)
        peer.sent()
        assert peer.send(*[window_update(0, 1), window_update(stream_id, 1)] * 2) == []


def test_a_large_reply_earns_many_window_updates():
    peer = Peer(FEW_IDLE)
    peer.send(headers(1, end=True))
    peer.connection.reply(1, HEAD, [bytes(1 << 20)], TRAILERS)
    left = 1 << 20
    while left > 0:
        left -= sum(len(sent.payload) for sent in peer.sent() if sent.kind == 0)
        # A peer that opens its windows a little at a time, twice for each KiB.
        peer.connection.receive(window_update(1, 1_024) + window_update(0, 1_024), 0.0)
        assert not peer.connection.closed


# -- pings, by gRPC's rules

MINUTE = 60.0
KEEPALIVE = Limits(min_recv_ping_interval_without_data_ms=60_000, max_ping_strikes=2)


def test_pings_that_come_too_soon_are_strikes():
    peer = Peer(KEEPALIVE)
    peer.send(headers(1))
    assert peer.send(PING) == [PONG]
    assert peer.send(PING, PING) == [PONG, PONG]
    assert peer.goaway(peer.send(PING)) == (CALM, "too_many_pings")


def test_pings_at_the_allowed_interval_are_none():
    peer = Peer(KEEPALIVE)
    peer.send(headers(1))
    for _ in range(100):
        peer.now += MINUTE
        assert peer.send(PING) == [PONG]


def test_a_reply_wipes_the_strikes_out():
    peer = Peer(KEEPALIVE)
    peer.send(headers(1), headers(3, end=True))
    assert peer.send(PING, PING, PING) == [PONG] * 3
    peer.connection.reply(3, HEAD, [b"x"], TRAILERS)
    peer.sent()
    assert peer.send(PING, PING, PING) == [PONG] * 3
    peer.connection.send_headers(1, HEAD)
    peer.sent()
    assert peer.send(PING, PING, PING) == [PONG] * 3
    peer.connection.send_data(1, [b"x"])
    peer.sent()
    assert peer.send(PING, PING, PING) == [PONG] * 3
    assert peer.goaway(peer.send(PING)) == (CALM, "too_many_pings")


def test_without_calls_the_interval_is_two_hours_unless_permitted():
    peer = Peer(KEEPALIVE)
    assert peer.send(PING) == [PONG]
    for _ in range(2):
        peer.now += 119 * MINUTE
        assert peer.send(PING) == [PONG]
    peer.now += 120 * MINUTE
    assert peer.send(PING) == [PONG]
    peer.now += 119 * MINUTE
    assert peer.goaway(peer.send(PING)) == (CALM, "too_many_pings")

    permitted = Limits(min_recv_ping_interval_without_data_ms=60_000, permit_pings_without_calls=True)
    peer = Peer(permitted)
    for _ in range(100):
        peer.now += MINUTE
        assert peer.send(PING) == [PONG]


# -- header blocks


def test_a_block_of_too_many_bytes():
    peer = Peer(Limits(max_header_block=20_000))
    assert peer.send(frame(1, 0, 1, bytes(16_000)), frame(9, 0, 1, bytes(4_000))) == []
    assert peer.goaway(peer.send(frame(9, 0, 1, b"x"))) == (CALM, "a header block is too large")


@pytest.mark.parametrize("kind", [1, 4, 7, 9])
def test_a_frame_that_is_too_large_to_be_held_is_refused_by_its_header(kind):
    peer = Peer(Limits(max_frame_size=100_000, max_header_block=50_000))
    if kind == 9:
        peer.send(frame(1, 0, 1))
    sent = peer.send(frame(kind, 0, 0 if kind in (4, 7) else 1, bytes(50_001))[:9])
    assert peer.goaway(sent) == (CALM, "a frame is too large")


def test_a_block_of_too_many_frames():
    peer = Peer(Limits(max_continuations=3))
    assert peer.send(frame(1, 0, 1), *[frame(9, 0, 1)] * 3) == []
    assert peer.goaway(peer.send(frame(9, END_HEADERS, 1))) == (CALM, "a header block is too large")


def test_a_block_that_takes_too_long():
    peer = Peer(Limits(header_block_seconds=5.0))
    block = literal(REQUEST)
    peer.send(frame(1, 0, 1, block[:5]))
    peer.now += 5.0
    assert peer.send(frame(9, END_HEADERS, 1, block[5:])) == []
    peer.send(frame(1, 0, 3, block[:5]))
    peer.now += 5.1
    assert peer.goaway(peer.send(frame(9, END_HEADERS, 3, block[5:]))) == (CALM, "a header block takes too long")


@pytest.mark.parametrize(
    "bomb",
    [
        # A field of 4,000 bytes goes into the table once, and is then named 60,000 times: 240 MB if it were believed.
        b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4_000 + b"\xbe" * 60_000,
        # Fields without name or value: each costs three bytes on the way, and many times that as an object.
        b"\0\0\0" * 20_000,
    ],
)
def test_a_header_bomb_costs_no_memory(bomb):
    peer = Peer()
    pieces = frame(1, 0, 1, bomb[:30_000]) + frame(9, END_HEADERS, 1, bomb[30_000:])
    tracemalloc.start()
    try:
        peer.connection.receive(pieces, 0.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peer.sent() == [Frame(3, 0, 1, CALM.to_bytes(4))]
    assert peak < 400_000
    assert not peer.connection.closed


# -- memory


def test_a_frame_that_never_ends_is_not_collected():
    peer = Peer(Limits(max_frame_size=16_000_000))
    peer.send(headers(1))
    peer.send(frame(0, 0, 1, bytes(15_000_000))[:1_000_000])
    peer.send(bytes(1_000_000))
    assert peer.connection.held_bytes == 0
    peer = Peer(Limits(max_frame_size=16_000_000))
    peer.send(frame(77, 0, 1, bytes(15_000_000))[:1_000_000])
    assert peer.connection.held_bytes == 0


def test_the_owner_sees_a_peer_that_takes_nothing():
    peer = Peer(None, (4, 0))
    for stream_id in (1, 3, 5):
        peer.send(headers(stream_id, end=True))
        peer.connection.reply(stream_id, HEAD, [bytes(1_000_000)], TRAILERS)
    assert peer.connection.queued == 3_000_000
    assert peer.connection.drained == 0
    peer.send(window_update(3, 10))
    assert peer.connection.queued == 2_999_990
    assert peer.connection.drained == 10
