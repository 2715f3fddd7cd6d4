"""SETTINGS in both directions."""

from __future__ import annotations

import struct

import hpack
import pytest
from http2_peer import (
    ACK,
    HEAD,
    SETTINGS,
    TRAILERS,
    WINDOW_UPDATE,
    Frame,
    Peer,
    data,
    frame,
    headers,
    settings,
)

from nerite.http2 import Http2ErrorCode, Limits

ACKNOWLEDGED = Frame(SETTINGS, ACK, 0, b"")


def test_the_first_frame_says_what_we_allow():
    limits = Limits(
        max_concurrent_streams=7,
        stream_window=100_000,
        connection_window=200_000,
        max_frame_size=20_000,
        max_header_list_size=9_000,
    )
    first, window, acknowledged = Peer(limits).opening
    assert first.kind == SETTINGS and first.flags == 0 and first.stream_id == 0
    assert dict(struct.iter_unpack(">HI", first.payload)) == {3: 7, 4: 100_000, 5: 20_000, 6: 9_000}
    assert window == Frame(WINDOW_UPDATE, 0, 0, (200_000 - 65_535).to_bytes(4))
    assert acknowledged == ACKNOWLEDGED


def test_the_default_window_of_the_connection_needs_no_update():
    assert [frame.kind for frame in Peer(Limits(connection_window=65_535)).opening] == [SETTINGS, SETTINGS]


def test_every_value_is_taken_and_acknowledged():
    peer = Peer(None, (1, 0), (2, 0), (3, 0), (4, 1_000), (5, 16_777_215), (6, 5_000), (99, 1))
    assert peer.opening[-1] == ACKNOWLEDGED
    settings_of_peer = peer.connection.peer
    assert settings_of_peer.header_table_size == 0
    assert settings_of_peer.initial_window_size == 1_000
    assert settings_of_peer.max_frame_size == 16_777_215
    assert settings_of_peer.max_header_list_size == 5_000
    # The last of several values is the one that counts; what is not named stays.
    assert peer.send(settings((4, 1), (4, 2))) == [ACKNOWLEDGED]
    assert settings_of_peer.initial_window_size == 2
    assert settings_of_peer.max_header_list_size == 5_000
    assert peer.send(settings()) == [ACKNOWLEDGED]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (settings((2, 2)), Http2ErrorCode.PROTOCOL_ERROR),
        (settings((4, 0x80000000)), Http2ErrorCode.FLOW_CONTROL_ERROR),
        (settings((5, 16_383)), Http2ErrorCode.PROTOCOL_ERROR),
        (settings((5, 16_777_216)), Http2ErrorCode.PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, b"12345"), Http2ErrorCode.FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, 1), Http2ErrorCode.PROTOCOL_ERROR),
        (frame(SETTINGS, ACK, 0, bytes(6)), Http2ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_what_settings_may_not_say(sent, code):
    peer = Peer()
    assert peer.goaway(peer.send(sent))[0] is code


def test_a_peer_that_shrinks_its_table_is_told_once_that_we_use_none():
    peer = Peer()
    decoder = hpack.Decoder()

    def reply(stream_id: int) -> bytes:
        peer.send(headers(stream_id), data(stream_id, b"x", end=True))
        peer.connection.reply(stream_id, HEAD, [b"y"], TRAILERS)
        sent = peer.sent()
        for sent_frame in sent:
            if sent_frame.kind == 1:
                decoder.decode(sent_frame.payload)
        return sent[0].payload

    assert reply(1) == HEAD
    peer.send(settings((1, 10_000)))
    assert reply(3) == HEAD
    peer.send(settings((1, 100)))
    decoder.max_allowed_table_size = 100
    assert reply(5) == b"\x20" + HEAD
    peer.send(settings((1, 50)))
    decoder.max_allowed_table_size = 50
    assert reply(7) == HEAD
    assert decoder.header_table_size == 0


def test_larger_frames_are_used_when_allowed():
    peer = Peer(None, (4, 1 << 20), (5, 20_000))
    peer.send(frame(WINDOW_UPDATE, 0, 0, (1 << 20).to_bytes(4)), headers(1, end=True))
    peer.connection.reply(1, HEAD, [bytes(50_000)], TRAILERS)
    assert [len(sent.payload) for sent in peer.sent()[1:-1]] == [20_000, 20_000, 10_000]


def test_our_smaller_window_counts_from_the_acknowledgement():
    limits = Limits(stream_window=1_000)
    peer = Peer(limits)
    # The peer still believes in 65,535.
    peer.send(headers(1))
    peer.connection.pause(1)
    assert peer.send(data(1, bytes(60_000))) == []
    assert peer.send(frame(SETTINGS, ACK, 0)) == []
    peer.send(headers(3))
    peer.connection.pause(3)
    assert peer.send(data(3, bytes(1_000))) == []
    assert peer.send(data(3, b"x")) == [Frame(3, 0, 3, bytes((0, 0, 0, Http2ErrorCode.FLOW_CONTROL_ERROR)))]
    # What was taken before counts as used: all of it comes back.
    peer.connection.resume(1)
    assert peer.sent() == [Frame(WINDOW_UPDATE, 0, 1, (60_000).to_bytes(4))]


@pytest.mark.parametrize(
    "values",
    [
        {"max_concurrent_streams": 0},
        {"stream_window": 0},
        {"stream_window": 1 << 31},
        {"connection_window": 65_534},
        {"connection_window": 1 << 31},
        {"max_frame_size": 16_383},
        {"max_frame_size": 1 << 24},
    ],
)
def test_limits_that_cannot_be_expressed_are_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        Limits(**values)
