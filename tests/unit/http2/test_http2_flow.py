"""Windows in both directions, and what waits for them."""

from __future__ import annotations

import pytest
from http2_peer import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEAD,
    PADDED,
    TRAILERS,
    Frame,
    Peer,
    data,
    frame,
    headers,
    reset_frame,
    rst_stream,
    settings,
    window_update,
)

from nerite.http2 import Http2ErrorCode, Limits
from nerite.http2.connection import JOINED

DATA, HEADERS, RST_STREAM, WINDOW_UPDATE = 0, 1, 3, 8
BIG = 1 << 24


def request(peer: Peer, *stream_ids: int) -> None:
    """Start complete requests."""
    assert peer.send(*(headers(stream_id, end=True) for stream_id in stream_ids)) == []
    peer.handler.take()


def head(stream_id: int) -> Frame:
    return Frame(HEADERS, END_HEADERS, stream_id, HEAD)


def trailers(stream_id: int) -> Frame:
    return Frame(HEADERS, END_HEADERS | END_STREAM, stream_id, TRAILERS)


# -- sending


def test_a_small_reply_is_one_object():
    peer = Peer()
    request(peer, 1)
    peer.connection.reply(1, HEAD, [b"ab", memoryview(b"cd")], TRAILERS)
    assert len(peer.connection.outbound) == 1
    assert peer.sent() == [head(1), Frame(DATA, 0, 1, b"abcd"), trailers(1)]
    assert peer.connection.open_streams == 0


@pytest.mark.parametrize("buffers", [[], [b""]])
def test_a_reply_without_a_message_has_no_data(buffers):
    peer = Peer()
    request(peer, 1)
    peer.connection.reply(1, HEAD, buffers, TRAILERS)
    assert peer.sent() == [head(1), trailers(1)]


def test_a_reply_without_trailers_ends_with_its_message():
    peer = Peer()
    request(peer, 1, 3)
    peer.connection.reply(1, HEAD, [b"ab"], b"")
    assert peer.sent() == [head(1), Frame(DATA, END_STREAM, 1, b"ab")]
    peer.connection.reply(3, HEAD, [], b"")
    assert peer.sent() == [head(3), Frame(DATA, END_STREAM, 3, b"")]
    assert peer.connection.open_streams == 0


def test_headers_alone_can_be_the_reply():
    peer = Peer()
    request(peer, 1)
    peer.connection.send_headers(1, TRAILERS, end_stream=True)
    assert peer.sent() == [trailers(1)]
    assert peer.connection.open_streams == 0


def test_a_large_reply_is_cut_into_frames_without_being_copied():
    peer = Peer(None, (4, BIG))
    peer.send(window_update(0, BIG))
    request(peer, 1)
    tensor = bytearray(b"0123456789" * 5_000)
    peer.connection.reply(1, HEAD, [b"prefix", memoryview(tensor), b"suffix"], TRAILERS)
    # A change of the tensor shows: what waits to be written is the tensor itself.
    tensor[:] = b"X" * 50_000
    sent = peer.sent()
    assert sent[0] == head(1) and sent[-1] == trailers(1)
    pieces = [piece.payload for piece in sent[1:-1]]
    assert [len(piece) for piece in pieces] == [16_384, 16_384, 16_384, 860]
    assert b"".join(pieces) == b"prefix" + b"X" * 50_000 + b"suffix"
    assert all(piece.flags == 0 for piece in sent[1:-1])


@pytest.mark.parametrize("size", [JOINED - 1, JOINED, JOINED + 1, 2 * JOINED])
def test_sizes_server_context_the_limit_of_joining(size):
    peer = Peer()
    request(peer, 1)
    peer.connection.reply(1, HEAD, [b"a" * size], TRAILERS)
    sent = peer.sent()
    assert b"".join(piece.payload for piece in sent if piece.kind == DATA) == b"a" * size
    assert all(len(piece.payload) <= 16_384 for piece in sent)


def test_the_opening_window_holds_a_large_reply_back():
    peer = Peer()
    request(peer, 1)
    peer.connection.reply(1, HEAD, [bytes(100_000)], TRAILERS)
    first = peer.sent()
    assert first[0] == head(1)
    assert sum(len(piece.payload) for piece in first[1:]) == 65_535
    assert peer.connection.queued == peer.connection.buffered(1) == 100_000 - 65_535
    assert peer.connection.drained == 0
    # One window alone is not enough.
    assert peer.send(window_update(1, 10)) == []
    assert peer.send(window_update(0, 4)) == [Frame(DATA, 0, 1, bytes(4))]
    assert peer.send(window_update(0, BIG)) == [Frame(DATA, 0, 1, bytes(6))]
    assert peer.connection.drained == 10
    assert peer.connection.open_streams == 1
    rest = peer.send(window_update(1, BIG))
    assert rest[-1] == trailers(1)
    assert sum(len(piece.payload) for piece in rest[:-1]) == 100_000 - 65_535 - 10
    assert peer.connection.queued == peer.connection.buffered(1) == 0
    assert peer.connection.open_streams == 0
    # Nobody waits for a chance to write on a stream that has ended.
    assert peer.handler.take() == []


def test_a_small_reply_is_cut_by_a_smaller_window():
    peer = Peer(None, (4, 3))
    request(peer, 1)
    peer.connection.reply(1, HEAD, [b"abcde"], TRAILERS)
    assert peer.sent() == [head(1), Frame(DATA, 0, 1, b"abc")]
    assert peer.send(window_update(1, 100)) == [Frame(DATA, 0, 1, b"de"), trailers(1)]


def test_small_replies_use_the_window_of_the_connection_up():
    peer = Peer()
    request(peer, *range(1, 31, 2))
    for stream_id in range(1, 31, 2):
        peer.connection.reply(stream_id, HEAD, [bytes(6_000)], TRAILERS)
    assert sum(len(sent.payload) for sent in peer.sent() if sent.kind == DATA) == 65_535
    assert peer.connection.queued == 15 * 6_000 - 65_535


def test_messages_of_a_stream_follow_each_other_through_a_narrow_window():
    peer = Peer(None, (4, 4))
    request(peer, 1)
    connection = peer.connection
    connection.send_headers(1, HEAD)
    connection.send_data(1, [b"abc"])
    connection.send_data(1, [b"def"])
    connection.send_data(1, [b"", b"gh"])
    assert peer.sent() == [head(1), Frame(DATA, 0, 1, b"abc"), Frame(DATA, 0, 1, b"d")]
    assert connection.buffered(1) == 4
    assert peer.send(window_update(1, 3)) == [Frame(DATA, 0, 1, b"efg")]
    assert peer.handler.take() == []
    assert peer.send(window_update(1, 3)) == [Frame(DATA, 0, 1, b"h")]
    assert peer.handler.take() == [("writable", 1)]
    connection.send_data(1, [b"ij"])
    assert peer.sent() == [Frame(DATA, 0, 1, b"ij")]
    connection.send_data(1, [b"k"])
    connection.send_trailers(1, TRAILERS)
    assert peer.sent() == []
    assert peer.send(window_update(1, 1)) == [Frame(DATA, 0, 1, b"k"), trailers(1)]
    assert peer.handler.take() == []


def test_the_last_data_can_end_a_stream_that_was_held_back():
    peer = Peer(None, (4, 2))
    request(peer, 1, 3)
    peer.connection.send_data(1, [b"abc"], end_stream=True)
    assert peer.sent() == [Frame(DATA, 0, 1, b"ab")]
    assert peer.send(window_update(1, 1)) == [Frame(DATA, END_STREAM, 1, b"c")]
    peer.connection.send_data(3, [b"de"])
    peer.connection.send_data(3, [], end_stream=True)
    assert peer.sent() == [Frame(DATA, 0, 3, b"de"), Frame(DATA, END_STREAM, 3, b"")]


def test_trailers_need_no_window():
    peer = Peer(None, (4, 0))
    request(peer, 1)
    peer.connection.send_headers(1, HEAD)
    peer.connection.send_data(1, [])
    peer.connection.send_trailers(1, TRAILERS)
    assert peer.sent() == [head(1), trailers(1)]


def test_sending_after_the_queued_end_is_the_owners_mistake():
    peer = Peer(None, (4, 0))
    request(peer, 1)
    peer.connection.send_data(1, [b"a"], end_stream=True)
    with pytest.raises(RuntimeError, match="stream 1 has already ended"):
        peer.connection.send_data(1, [b"b"])


def test_settings_move_the_windows_of_open_streams():
    peer = Peer(None, (4, 100))
    request(peer, 1)
    peer.connection.reply(1, HEAD, [bytes(300)], TRAILERS)
    assert [len(piece.payload) for piece in peer.sent()[1:]] == [100]
    # The window becomes 40 - 100 = -60: credit first has to fill the hole.
    assert peer.send(settings((4, 40))) == [Frame(4, ACK, 0, b"")]
    assert peer.send(window_update(1, 60)) == []
    assert peer.send(window_update(1, 5)) == [Frame(DATA, 0, 1, bytes(5))]
    # Raising it opens the stream at once, behind the acknowledgement.
    assert peer.send(settings((4, 60))) == [Frame(4, ACK, 0, b""), Frame(DATA, 0, 1, bytes(20))]
    # A stream that starts now has the new window.
    request(peer, 3)
    peer.connection.reply(3, HEAD, [bytes(61)], TRAILERS)
    assert peer.sent() == [head(3), Frame(DATA, 0, 3, bytes(60))]
    sent = peer.send(settings((4, 65_535)))
    assert [(piece.stream_id, len(piece.payload)) for piece in sent if piece.kind == DATA] == [(1, 175), (3, 1)]


def test_streams_share_what_the_connection_lets_through():
    peer = Peer(None, (4, BIG))
    peer.send(window_update(0, 1_000))
    request(peer, 1, 3, 5, 7)
    peer.connection.reply(1, HEAD, [bytes(65_535 + 1_000)], TRAILERS)
    for stream_id in (3, 5, 7):
        peer.connection.reply(stream_id, HEAD, [bytes(50)], TRAILERS)
    peer.sent()
    order = []
    for _ in range(6):
        order += [
            (piece.stream_id, len(piece.payload)) for piece in peer.send(window_update(0, 25)) if piece.kind == DATA
        ]
    # Each that was served in part goes to the end of the line.
    assert order == [(3, 25), (5, 25), (7, 25), (3, 25), (5, 25), (7, 25)]
    assert peer.connection.queued == 0


def test_a_stream_without_a_window_of_its_own_does_not_stand_in_the_line():
    peer = Peer(None, (4, 65_535))
    request(peer, 1, 3)
    peer.connection.reply(1, HEAD, [bytes(65_540)], TRAILERS)
    peer.connection.reply(3, HEAD, [bytes(10)], TRAILERS)
    peer.sent()
    sent = peer.send(window_update(0, 100))
    assert sent == [Frame(DATA, 0, 3, bytes(10)), trailers(3)]
    assert len(peer.send(window_update(1, 100))[0].payload) == 5


def test_a_handler_may_send_more_when_it_is_told_that_it_can():
    peer = Peer(None, (4, 0))
    request(peer, 1)
    left = [b"cd", b"ef", b"g"]

    def writable(stream_id: int) -> None:
        while left and not peer.connection.buffered(stream_id):
            peer.connection.send_data(stream_id, [left.pop(0)], end_stream=not left)

    peer.handler.writable = writable
    peer.connection.send_data(1, [b"ab"])
    assert peer.send(window_update(1, 5)) == [
        Frame(DATA, 0, 1, b"ab"),
        Frame(DATA, 0, 1, b"cd"),
        Frame(DATA, 0, 1, b"e"),
    ]
    assert peer.send(window_update(1, 5)) == [
        Frame(DATA, 0, 1, b"f"),
        Frame(DATA, END_STREAM, 1, b"g"),
    ]


@pytest.mark.parametrize("by", ["peer", "owner"])
def test_a_reset_drops_what_waits(by):
    peer = Peer(None, (4, BIG))
    request(peer, 1, 3)
    peer.connection.reply(1, HEAD, [bytes(100_000)], TRAILERS)
    peer.connection.reply(3, HEAD, [b"abc"], TRAILERS)
    peer.sent()
    if by == "peer":
        assert peer.send(rst_stream(1)) == []
        assert peer.handler.take() == [("closed", 1, Http2ErrorCode.CANCEL)]
    else:
        peer.connection.reset(1, Http2ErrorCode.INTERNAL_ERROR)
        assert peer.sent() == [reset_frame(1, Http2ErrorCode.INTERNAL_ERROR)]
        assert peer.handler.take() == []
    assert peer.connection.queued == 3
    assert peer.connection.buffered(1) == 0
    assert peer.send(window_update(0, BIG)) == [Frame(DATA, 0, 3, b"abc"), trailers(3)]


def test_sending_on_a_stream_that_is_gone_does_nothing():
    peer = Peer()
    request(peer, 1)
    peer.send(rst_stream(1))
    connection = peer.connection
    for stream_id in (1, 99):
        connection.reply(stream_id, HEAD, [b"a"], TRAILERS)
        connection.send_headers(stream_id, HEAD)
        connection.send_data(stream_id, [b"a"])
        connection.send_trailers(stream_id, TRAILERS)
        connection.reset(stream_id)
        connection.pause(stream_id)
        connection.resume(stream_id)
        assert connection.buffered(stream_id) == 0
    assert peer.sent() == []


def test_a_window_may_grow_to_the_largest_and_no_further():
    largest = (1 << 31) - 1
    peer = Peer()
    request(peer, 1, 3)
    assert peer.send(window_update(1, largest - 65_535)) == []
    assert peer.send(window_update(1, 1)) == [reset_frame(1, Http2ErrorCode.FLOW_CONTROL_ERROR)]
    assert peer.handler.take() == [("closed", 1, Http2ErrorCode.FLOW_CONTROL_ERROR)]
    assert peer.send(window_update(3, largest - 65_535)) == []
    assert peer.goaway(peer.send(settings((4, 65_536))))[0] is Http2ErrorCode.FLOW_CONTROL_ERROR

    peer = Peer()
    assert peer.send(window_update(0, largest - 65_535)) == []
    assert peer.goaway(peer.send(window_update(0, 1)))[0] is Http2ErrorCode.FLOW_CONTROL_ERROR


def test_the_reserved_bit_of_an_increment_is_ignored():
    peer = Peer(None, (4, 0))
    request(peer, 1)
    peer.connection.reply(1, HEAD, [b"abc"], TRAILERS)
    peer.sent()
    assert peer.send(window_update(1, 0x80000002)) == [Frame(DATA, 0, 1, b"ab")]


def test_an_increment_of_zero():
    peer = Peer()
    request(peer, 1)
    assert peer.send(window_update(1, 0)) == [reset_frame(1, Http2ErrorCode.PROTOCOL_ERROR)]
    assert peer.goaway(peer.send(window_update(0, 0)))[0] is Http2ErrorCode.PROTOCOL_ERROR


# -- receiving

SMALL_WINDOWS = Limits(stream_window=70_000, connection_window=100_000)


def test_credit_comes_back_when_half_of_a_window_is_used():
    peer = Peer(SMALL_WINDOWS)
    peer.send(headers(1), frame(4, ACK, 0))
    assert peer.send(data(1, bytes(16_384)), data(1, bytes(16_384))) == []
    assert peer.send(data(1, bytes(2_232))) == [Frame(WINDOW_UPDATE, 0, 1, (35_000).to_bytes(4))]
    assert peer.send(data(1, bytes(15_000))) == [Frame(WINDOW_UPDATE, 0, 0, (50_000).to_bytes(4))]
    # The end of a request needs no credit for the stream.
    assert peer.send(data(1, bytes(15_000)), data(1, bytes(10_000), end=True)) == []
    assert len(peer.handler.bodies[1]) == 75_000


def test_a_paused_stream_gets_no_credit_and_the_connection_does():
    peer = Peer(SMALL_WINDOWS)
    peer.send(headers(1), headers(3), frame(4, ACK, 0))
    peer.connection.pause(1)
    sent = peer.send(*(data(1, bytes(14_000)) for _ in range(5)))
    assert sent == [Frame(WINDOW_UPDATE, 0, 0, (56_000).to_bytes(4))]
    assert len(peer.handler.bodies[1]) == 70_000
    peer.connection.resume(1)
    assert peer.sent() == [Frame(WINDOW_UPDATE, 0, 1, (70_000).to_bytes(4))]
    peer.connection.pause(1)
    assert peer.send(*(data(1, bytes(14_000)) for _ in range(5)))[0].stream_id == 0
    assert peer.send(data(1, b"x")) == [reset_frame(1, Http2ErrorCode.FLOW_CONTROL_ERROR)]
    assert peer.handler.take()[-1] == ("closed", 1, Http2ErrorCode.FLOW_CONTROL_ERROR)
    assert not peer.connection.closed


def test_a_pause_that_ends_early_costs_nothing():
    peer = Peer(SMALL_WINDOWS)
    peer.send(headers(1))
    peer.connection.pause(1)
    assert peer.send(data(1, b"abc")) == []
    peer.connection.resume(1)
    assert peer.send(data(1, b"def", end=True)) == []
    peer.connection.pause(1)
    peer.connection.resume(1)
    assert peer.sent() == []


def test_a_request_that_is_complete_gets_no_credit():
    peer = Peer(SMALL_WINDOWS)
    peer.send(headers(1))
    peer.connection.pause(1)
    assert peer.send(*[data(1, bytes(16_000))] * 2, data(1, bytes(10_000), end=True)) == []
    peer.connection.resume(1)
    assert peer.sent() == []


def test_more_than_the_connection_allows_ends_it():
    # The connection's credit comes back at once, so only a single frame can be too much.
    peer = Peer(Limits(connection_window=65_535, max_frame_size=70_000))
    peer.send(headers(1))
    assert peer.goaway(peer.send(data(1, bytes(65_536))))[0] is Http2ErrorCode.FLOW_CONTROL_ERROR


def test_padding_counts_and_is_not_passed_on():
    peer = Peer(Limits(stream_window=65_535, connection_window=65_535))
    peer.send(headers(1))
    padded = frame(DATA, PADDED, 1, b"\xff" + b"abc" + bytes(255))
    assert len(padded) == 9 + 259
    sent = []
    for _ in range(127):
        sent += peer.send(padded)
    assert peer.handler.bodies[1] == b"abc" * 127
    # 127 frames of 259 bytes are just over half of the window.
    assert sent == [Frame(WINDOW_UPDATE, 0, stream_id, (127 * 259).to_bytes(4)) for stream_id in (0, 1)]
    peer.handler.take()
    assert peer.send(frame(DATA, PADDED | END_STREAM, 1, b"\x02\0\0")) == []
    assert peer.handler.take() == [("data", 1, b"", True)]


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", Http2ErrorCode.FRAME_SIZE_ERROR),
        (b"\x01", Http2ErrorCode.PROTOCOL_ERROR),
        (b"\x04abc", Http2ErrorCode.PROTOCOL_ERROR),
        (b"\xffabc", Http2ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_padding_that_does_not_fit(payload, code):
    peer = Peer()
    peer.send(headers(1))
    assert peer.goaway(peer.send(frame(DATA, PADDED, 1, payload)))[0] is code


def test_padded_headers():
    peer = Peer()
    block = headers(1)[9:]
    assert peer.send(frame(HEADERS, END_HEADERS | PADDED, 1, b"\x03" + block + bytes(3))) == []
    assert peer.send(frame(HEADERS, END_HEADERS | PADDED | 0x20, 3, b"\x03" + bytes(5) + block + bytes(3))) == []
    assert [event[:2] for event in peer.handler.take()] == [("started", 1), ("started", 3)]
    assert (
        peer.goaway(peer.send(frame(HEADERS, END_HEADERS | PADDED, 5, b"\x03ab")))[0] is Http2ErrorCode.PROTOCOL_ERROR
    )

    peer = Peer()
    assert peer.goaway(peer.send(frame(HEADERS, END_HEADERS | PADDED, 1)))[0] is Http2ErrorCode.FRAME_SIZE_ERROR
    peer = Peer()
    assert peer.goaway(peer.send(frame(HEADERS, END_HEADERS | 0x20, 1, bytes(4))))[0] is Http2ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize(
    ("length", "pieces", "whole"),
    [
        ("5", [b"abc", b"de"], True),
        ("5", [b"abcde", b""], True),
        ("5", [b"abcde"], True),
        ("0", [b""], True),
        ("5", [b"abcd"], False),
        ("5", [b"abc", b"def"], False),
        ("5", [b"abcdef", b""], False),
        ("0", [b"a"], False),
    ],
)
def test_content_length(length, pieces, whole):
    for as_trailers in (False, True):
        for _ in range(2):  # the second time the block is known
            peer = Peer()
            fields = (
                (b":method", b"POST"),
                (b":scheme", b"http"),
                (b":path", b"/"),
                (b"content-length", length.encode()),
            )
            peer.send(headers(1, fields), data(1, pieces[0], end=not pieces[1:] and not as_trailers))
            if as_trailers:
                peer.send(*(data(1, piece) for piece in pieces[1:]), headers(1, ((b"x", b"y"),), end=True))
            else:
                peer.send(*(data(1, piece, end=True) for piece in pieces[1:]))
            events = peer.handler.take()
            if whole:
                assert peer.handler.bodies[1] == b"".join(pieces)
                assert [event[3] for event in events if event[0] == "data"][-1] is True
            else:
                assert ("closed", 1, Http2ErrorCode.PROTOCOL_ERROR) in events
                assert not any(event[3] for event in events if event[0] == "data")
            assert not peer.connection.closed


def test_content_length_without_a_body():
    peer = Peer()
    fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"))
    assert peer.send(headers(1, (*fields, (b"content-length", b"0")), end=True)) == []
    refused = headers(3, (*fields, (b"content-length", b"1")), end=True)
    assert peer.send(refused) == [reset_frame(3, Http2ErrorCode.PROTOCOL_ERROR)]
    # The same block again, which is known by now.
    assert peer.send(headers(5, (*fields, (b"content-length", b"1")))) == []
    assert peer.send(headers(7, (*fields, (b"content-length", b"1")), end=True)) == [
        reset_frame(7, Http2ErrorCode.PROTOCOL_ERROR)
    ]
