"""Framing, stream states and the life of a connection: each rule with the bytes that break it."""

from __future__ import annotations

import pytest
from http2_peer import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEAD,
    PADDED,
    REQUEST,
    TRAILERS,
    Frame,
    Peer,
    Recorder,
    data,
    frame,
    headers,
    keep_all,
    literal,
    reset_frame,
    rst_stream,
    settings,
    window_update,
)

from nerite.http2 import Http2Connection, Http2ErrorCode, Limits
from nerite.http2.frames import PREFACE

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
LAST = (1 << 31) - 1


def goaway(last_stream_id: int, code: int = Http2ErrorCode.NO_ERROR, reason: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4) + code.to_bytes(4) + reason)


# -- the preface


def new() -> tuple[Http2Connection, Recorder]:
    handler = Recorder()
    connection = handler.connection = Http2Connection(handler, Limits(), 0.0, keep_all)
    return connection, handler


def test_nothing_is_sent_before_the_peer_has_shown_that_it_speaks_http2():
    connection, handler = new()
    for byte in PREFACE[:-1]:
        connection.receive(bytes((byte,)), 0.0)
        assert connection.outbound == []
    connection.receive(PREFACE[-1:], 0.0)
    assert len(connection.outbound) == 1
    assert not connection.closed and handler.events == []


@pytest.mark.parametrize(
    ("sent", "http1"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", True),
        (b"G", True),
        (b"POST /v2/models HTTP/1.1\r\n", True),
        (b"PO", True),
        (b"\x16\x03\x01\x02\x00\x01", False),
        (b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", False),
        (b"hello\r\n", False),
    ],
)
def test_a_peer_that_speaks_something_else(sent, http1):
    for pieces in ([sent], [sent[index : index + 1] for index in range(len(sent))]):
        connection, handler = new()
        for piece in pieces:
            connection.receive(piece, 0.0)
        assert connection.closed and connection.finished
        assert connection.http1 is http1
        assert connection.outbound == []
        assert handler.events == [("closing", Http2ErrorCode.PROTOCOL_ERROR, "the peer does not speak HTTP/2")]


@pytest.mark.parametrize(
    "first", [headers(1), window_update(0, 1), frame(PING, 0, 0, bytes(8)), frame(SETTINGS, ACK, 0)]
)
def test_the_first_frame_has_to_be_settings(first):
    connection, handler = new()
    connection.receive(PREFACE + first, 0.0)
    assert connection.closed
    assert handler.events == [("closing", Http2ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")]


# -- framing


def test_any_cutting_of_the_bytes_gives_the_same():
    stream = b"".join(
        (
            headers(1),
            data(1, b"abc"),
            frame(DATA, PADDED, 1, b"\x03defgh\0\0\0"),
            frame(99, 0xFF, 1, b"unknown"),
            headers(3, end=True),
            data(1, b"ij", end=True),
            frame(PING, 0, 0, b"12345678"),
        )
    )
    outcomes = set()
    for size in range(1, len(stream) + 1):
        peer = Peer()
        for start in range(0, len(stream), size):
            # The owner's buffer, which it uses again.
            chunk = bytearray(stream[start : start + size])
            peer.connection.receive(memoryview(chunk), 0.0)
            chunk[:] = bytes(len(chunk))
        assert [event[0] for event in peer.handler.events if event[0] != "data"] == ["started", "started"]
        outcomes.add((tuple(peer.handler.bodies.items()), tuple(peer.sent())))
    assert outcomes == {(((1, b"abcdefghij"), (3, b"")), (Frame(PING, ACK, 0, b"12345678"),))}


def test_data_is_passed_on_before_its_frame_is_complete():
    peer = Peer()
    whole = data(1, b"x" * 10_000, end=True)
    peer.send(headers(1), whole[:109])
    peer.handler.take()
    peer.send(whole[109:5_009])
    peer.send(whole[5_009:])
    assert [(len(event[2]), event[3]) for event in peer.handler.take()] == [(4_900, False), (5_000, True)]


class Whole(Recorder):
    """Notes the requests that came at once."""

    def __init__(self):
        super().__init__()
        self.whole = []

    def request_received(self, stream_id, headers, body):
        self.whole.append((stream_id, bytes(body)))


def test_a_known_block_and_all_of_its_body_are_one_event():
    peer = Peer(handler=Whole())
    peer.send(headers(1), data(1, b"a", end=True))
    peer.send(headers(3), data(3, b"bc", end=True), headers(5), data(5, b"d", end=True))
    assert peer.handler.whole == [(3, b"bc"), (5, b"d")]
    peer.connection.reply(5, HEAD, [b"y"], TRAILERS)
    peer.connection.reply(3, HEAD, [b"x"], TRAILERS)
    assert [(answer.kind, answer.stream_id) for answer in peer.sent()] == [
        (kind, stream_id) for stream_id in (5, 3) for kind in (HEADERS, DATA, HEADERS)
    ]
    assert peer.connection.open_streams == 1


@pytest.mark.parametrize(
    "follows",
    [
        data(3, b"a"),
        data(3, b"", end=True),
        data(5, b"a", end=True),
        frame(DATA, END_STREAM | PADDED, 3, b"\1a\0"),
        data(3, b"a", end=True)[:-1],
        headers(5),
    ],
)
def test_anything_else_behind_a_known_block_is_not(follows):
    peer = Peer(handler=Whole())
    peer.send(headers(1), data(1, b"a", end=True))
    peer.send(headers(3), follows)
    assert peer.handler.whole == []


@pytest.mark.parametrize(("announced", "whole"), [(b"1", [(3, b"a")]), (b"2", [])])
def test_a_body_at_once_must_be_as_long_as_announced(announced, whole):
    peer = Peer(handler=Whole())
    fields = (*REQUEST, (b"content-length", announced))
    peer.send(headers(1, fields), rst_stream(1))
    sent = peer.send(headers(3, fields), data(3, b"a", end=True))
    assert peer.handler.whole == whole
    assert sent == ([] if whole else [reset_frame(3, Http2ErrorCode.PROTOCOL_ERROR)])


def test_large_reads_are_passed_on_as_views():
    seen = []

    class Types(Recorder):
        def data_received(self, stream_id, data, end_stream):
            seen.append(type(data))

    peer = Peer(Limits(max_frame_size=100_000), handler=Types())
    peer.send(headers(1), data(1, bytes(50_000)))
    peer.send(data(1, bytes(50)))
    assert seen == [memoryview, bytes]


def test_frames_may_be_as_large_as_announced():
    peer = Peer(Limits(max_frame_size=20_000))
    assert peer.send(headers(1), data(1, bytes(20_000))) == []
    # The header is enough to know.
    assert peer.goaway(peer.send(data(1, bytes(20_001))[:9]))[0] is Http2ErrorCode.FRAME_SIZE_ERROR


def test_frames_of_unknown_types_and_unknown_flags_are_ignored():
    peer = Peer()
    assert peer.send(frame(10, 0xFF, 0, b"abc"), frame(255, 0, 5, bytes(20_000)), headers(1, flags=0xC4 | 0x12)) == []
    assert [event[:2] for event in peer.handler.take()] == [("started", 1)]


def test_the_reserved_bit_of_a_stream_is_ignored():
    peer = Peer()
    reserved = 0x80000000
    peer.send(headers(1 | reserved), data(1 | reserved, b"a"), headers(3))
    assert [event[:2] for event in peer.handler.take()] == [("started", 1), ("data", 1), ("started", 3)]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(PRIORITY, 0, 3, bytes(4)), Http2ErrorCode.FRAME_SIZE_ERROR),
        (frame(RST_STREAM, 0, 1, bytes(3)), Http2ErrorCode.FRAME_SIZE_ERROR),
        (frame(PING, 0, 0, bytes(7)), Http2ErrorCode.FRAME_SIZE_ERROR),
        (frame(GOAWAY, 0, 0, bytes(7)), Http2ErrorCode.FRAME_SIZE_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, bytes(5)), Http2ErrorCode.FRAME_SIZE_ERROR),
        (frame(WINDOW_UPDATE, 0, 1, bytes(3)), Http2ErrorCode.FRAME_SIZE_ERROR),
        (data(0, b"a"), Http2ErrorCode.PROTOCOL_ERROR),
        (headers(0), Http2ErrorCode.PROTOCOL_ERROR),
        (frame(PRIORITY, 0, 0, bytes(5)), Http2ErrorCode.PROTOCOL_ERROR),
        (rst_stream(0), Http2ErrorCode.PROTOCOL_ERROR),
        (frame(PING, 0, 1, bytes(8)), Http2ErrorCode.PROTOCOL_ERROR),
        (frame(GOAWAY, 0, 1, bytes(8)), Http2ErrorCode.PROTOCOL_ERROR),
        (frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), Http2ErrorCode.PROTOCOL_ERROR),
        (frame(CONTINUATION, END_HEADERS, 1), Http2ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, END_HEADERS, 3, b"\xff"), Http2ErrorCode.COMPRESSION_ERROR),
        # Streams that are idle, or never a client's.
        (data(3, b"a"), Http2ErrorCode.PROTOCOL_ERROR),
        (rst_stream(3), Http2ErrorCode.PROTOCOL_ERROR),
        (window_update(3, 1), Http2ErrorCode.PROTOCOL_ERROR),
        (headers(2), Http2ErrorCode.PROTOCOL_ERROR),
        (headers(4), Http2ErrorCode.PROTOCOL_ERROR),
        (data(2, b"a"), Http2ErrorCode.PROTOCOL_ERROR),
        (rst_stream(2), Http2ErrorCode.PROTOCOL_ERROR),
        (window_update(2, 1), Http2ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_what_ends_the_connection(sent, code):
    peer = Peer()
    peer.send(headers(1))
    peer.handler.take()
    sent_back = peer.send(sent, data(1, b"not read any more"))
    assert peer.goaway(sent_back)[0] is code
    # The GOAWAY names the last stream; the handler hears of each stream, then of the connection.
    assert int.from_bytes(sent_back[-1].payload[:4]) == (3 if code is Http2ErrorCode.COMPRESSION_ERROR else 1)
    assert [event[:3] for event in peer.handler.take()[:-1]] == [("closed", 1, code)]
    # After that nothing happens any more, whatever is done.
    peer.send(headers(5))
    peer.connection.ping()
    peer.connection.shutdown()
    peer.connection.goaway()
    peer.connection.reply(1, HEAD, [b"x"], TRAILERS)
    peer.connection.lost()
    assert peer.sent() == [] and peer.handler.take() == []


def test_a_priority_of_the_wrong_size_resets_its_stream():
    peer = Peer()
    peer.send(headers(1))
    assert peer.send(frame(PRIORITY, 0, 1, bytes(5)), frame(PRIORITY, 0, 99, bytes(5))) == []
    assert peer.send(frame(PRIORITY, 0, 1, bytes(6))) == [reset_frame(1, Http2ErrorCode.FRAME_SIZE_ERROR)]


# -- header blocks


def test_a_block_in_several_frames():
    peer = Peer()
    block = literal(REQUEST)
    peer.send(
        frame(HEADERS, END_STREAM, 1, block[:10]),
        frame(CONTINUATION, 0, 1, block[10:20]),
        frame(CONTINUATION, 0, 1),
    )
    assert peer.handler.take() == []
    peer.send(frame(CONTINUATION, END_HEADERS, 1, block[20:]))
    ((name, stream_id, request, end_stream),) = peer.handler.take()
    assert (name, stream_id, request.method, end_stream) == ("started", 1, b"POST", True)
    assert peer.send(frame(HEADERS, 0, 3, block), frame(CONTINUATION, END_HEADERS, 3), data(3, b"a")) == []


@pytest.mark.parametrize(
    "between",
    [data(1, b"a"), headers(5), frame(PING, 0, 0, bytes(8)), frame(99, 0, 3), frame(CONTINUATION, END_HEADERS, 1)],
)
def test_nothing_may_come_between_the_frames_of_a_block(between):
    peer = Peer()
    peer.send(headers(1), frame(HEADERS, 0, 3, b""))
    assert peer.goaway(peer.send(between)) == (Http2ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")


def test_trailers_end_a_request():
    peer = Peer()
    peer.send(headers(1), data(1, b"a"))
    peer.handler.take()
    assert peer.send(headers(1, ((b"x-checksum", b"1"),), end=True)) == []
    assert peer.handler.take() == [("data", 1, b"", True)]


@pytest.mark.parametrize(
    "sent",
    [
        headers(1, ((b"x", b"y"),)),
        headers(1, ((b":path", b"/"),), end=True),
        headers(1, ((b"X", b"y"),), end=True),
        headers(1, ((b"connection", b"y"),), end=True),
        headers(1, ((b"x", b"\n"),), end=True),
    ],
)
def test_trailers_that_are_malformed(sent):
    peer = Peer()
    peer.send(headers(1))
    peer.handler.take()
    assert peer.send(sent) == [reset_frame(1, Http2ErrorCode.PROTOCOL_ERROR)]
    assert peer.handler.take() == [("closed", 1, Http2ErrorCode.PROTOCOL_ERROR)]


# -- stream states


@pytest.mark.parametrize("late", [data(1, b"a"), headers(1, ((b"x", b"y"),), end=True)])
def test_after_its_end_a_request_may_not_go_on(late):
    peer = Peer()
    peer.send(headers(1, end=True))
    peer.handler.take()
    assert peer.send(late) == [reset_frame(1, Http2ErrorCode.STREAM_CLOSED)]
    assert peer.handler.take() == [("closed", 1, Http2ErrorCode.STREAM_CLOSED)]


@pytest.mark.parametrize(
    ("late", "code"), [(data(1, b"a"), Http2ErrorCode.STREAM_CLOSED), (headers(1), Http2ErrorCode.PROTOCOL_ERROR)]
)
@pytest.mark.parametrize("how", ["reply", "reset by the peer", "skipped"])
def test_on_a_closed_stream_a_request_is_an_error(late, code, how):
    peer = Peer()
    if how == "skipped":
        peer.send(headers(3, end=True))
    else:
        peer.send(headers(1, end=True))
    if how == "reply":
        peer.connection.reply(1, HEAD, [b"a"], TRAILERS)
    elif how == "reset by the peer":
        peer.send(rst_stream(1))
    assert peer.goaway(peer.send(late))[0] is code


def test_on_a_closed_stream_control_frames_are_ignored():
    peer = Peer()
    peer.send(headers(1, end=True))
    peer.connection.reply(1, HEAD, [b"a"], TRAILERS)
    peer.sent()
    assert peer.send(window_update(1, 5), window_update(1, 0), rst_stream(1), frame(PRIORITY, 0, 1, bytes(5))) == []


def test_on_a_stream_that_we_reset_everything_is_ignored():
    peer = Peer(Limits(connection_window=65_535))
    peer.send(headers(1))
    peer.handler.take()
    peer.connection.reset(1, Http2ErrorCode.INTERNAL_ERROR)
    assert peer.sent() == [reset_frame(1, Http2ErrorCode.INTERNAL_ERROR)]
    # The table of fields and the connection's window go on as if nothing had happened.
    indexed = b"".join(b"\x40" + literal([field])[1:] for field in REQUEST)
    assert peer.send(data(1, bytes(16_000)), frame(HEADERS, END_HEADERS, 1, indexed), window_update(1, 1)) == []
    assert peer.send(data(1, bytes(16_384))) == []
    assert peer.send(data(1, bytes(384))) == [Frame(WINDOW_UPDATE, 0, 0, (32_768).to_bytes(4))]
    assert peer.send(rst_stream(1)) == []
    assert peer.handler.take() == []
    peer.send(frame(HEADERS, END_HEADERS, 3, bytes((0xC3, 0xC2, 0xC1, 0xC0, 0xBF, 0xBE))))
    assert peer.handler.take()[0][2].path == b"/inference.GRPCInferenceService/ModelInfer"


def test_a_reply_that_is_faster_than_its_request():
    peer = Peer()
    peer.send(headers(1), data(1, b"ab"))
    peer.connection.reply(1, HEAD, [b"cd"], TRAILERS)
    assert peer.sent()[-1] == reset_frame(1, Http2ErrorCode.NO_ERROR)
    peer.handler.take()
    assert peer.send(data(1, b"ef"), data(1, b"gh", end=True)) == []
    assert peer.handler.take() == []


def test_a_reply_in_the_middle_of_a_frame():
    peer = Peer()
    whole = data(1, b"abcdef", end=True)
    peer.send(headers(1), whole[:12])
    peer.connection.reply(1, HEAD, [b"x"], TRAILERS)
    # The frame said that it is the last, so there is nothing to tell the peer.
    assert [sent.kind for sent in peer.sent()] == [HEADERS, DATA, HEADERS]
    peer.handler.take()
    assert peer.send(whole[12:], headers(3)) == []
    assert [event[:2] for event in peer.handler.take()] == [("started", 3)]


def test_a_reset_in_the_middle_of_a_frame():
    peer = Peer()
    whole = frame(DATA, PADDED, 1, b"\x03abcdef\0\0\0")
    peer.send(headers(1), whole[:12])
    peer.handler.take()
    peer.connection.reset(1)
    assert peer.send(whole[12:], headers(3)) == [reset_frame(1, Http2ErrorCode.CANCEL)]
    assert [event[:2] for event in peer.handler.take()] == [("started", 3)]


def test_the_handler_may_reply_reset_and_say_goodbye_at_once():
    class Hasty(Recorder):
        def request_started(self, stream_id, headers, end_stream):
            if stream_id == 1:
                self.connection.reply(1, HEAD, [b"a"], TRAILERS)
            elif stream_id == 3:
                self.connection.reset(3)
            else:
                self.connection.goaway()

    peer = Peer(handler=Hasty())
    sent = peer.send(headers(1), headers(3), data(1, b"x", end=True), data(3, b"x", end=True), headers(5), headers(7))
    assert [answer.kind for answer in sent] == [HEADERS, DATA, HEADERS, RST_STREAM, RST_STREAM, GOAWAY]
    assert sent[-1].payload[:4] == (5).to_bytes(4)


def test_a_connection_that_is_lost_during_a_callback_reads_no_further():
    class Pulled(Recorder):
        def data_received(self, stream_id, data, end_stream):
            self.connection.lost()

    peer = Peer(handler=Pulled())
    assert peer.send(headers(1), data(1, b"x"), headers(3)) == []
    assert [event[:2] for event in peer.handler.take()] == [("started", 1), ("closed", 1)]


def test_the_error_of_a_handler_reaches_the_owner():
    class Faulty(Recorder):
        def request_started(self, stream_id, headers, end_stream):
            raise KeyError("a mistake")

    peer = Peer(handler=Faulty())
    for stream_id in (1, 3):  # a block that is decoded, and one that is known
        with pytest.raises(KeyError, match="a mistake"):
            peer.connection.receive(headers(stream_id), 0.0)


def test_too_many_streams_are_refused_one_by_one():
    peer = Peer(Limits(max_concurrent_streams=2))
    assert peer.send(headers(1), headers(3), headers(5)) == [reset_frame(5, Http2ErrorCode.REFUSED_STREAM)]
    assert [event[:2] for event in peer.handler.take()] == [("started", 1), ("started", 3)]
    assert peer.connection.open_streams == 2
    # The peer may not know yet; and a stream that is gone makes room.
    assert peer.send(data(5, b"a", end=True), rst_stream(1), headers(7)) == []
    assert [event[:2] for event in peer.handler.take()] == [("closed", 1), ("started", 7)]


def test_a_stream_counts_until_its_reply_has_left():
    peer = Peer(Limits(max_concurrent_streams=1), (4, 0))
    peer.send(headers(1, end=True))
    peer.connection.reply(1, HEAD, [b"a"], TRAILERS)
    peer.sent()
    assert peer.send(headers(3)) == [reset_frame(3, Http2ErrorCode.REFUSED_STREAM)]
    peer.send(window_update(1, 1))
    assert peer.send(headers(5)) == []


def test_the_peers_code_reaches_the_handler():
    peer = Peer()
    peer.send(headers(1), rst_stream(1, 0xABCD))
    assert peer.handler.take()[1:] == [("closed", 1, 0xABCD)]


# -- PING and GOAWAY


def test_pings_in_both_directions():
    peer = Peer()
    assert peer.send(frame(PING, 0xFE, 0, b"abcdefgh")) == [Frame(PING, ACK, 0, b"abcdefgh")]
    peer.connection.ping()
    peer.connection.ping(b"01234567")
    assert peer.sent() == [Frame(PING, 0, 0, bytes(8)), Frame(PING, 0, 0, b"01234567")]
    assert peer.connection.pings_unanswered == 2
    assert peer.send(frame(PING, ACK, 0, b"01234567")) == []
    assert peer.connection.pings_unanswered == 1
    assert peer.send(frame(PING, ACK, 0, bytes(8)), frame(PING, ACK, 0, bytes(8))) == []
    assert peer.connection.pings_unanswered == 0


def test_the_peers_goaway_lets_streams_finish():
    peer = Peer()
    peer.send(headers(1, end=True), goaway(0, Http2ErrorCode.NO_ERROR, b"bye \xff"))
    assert peer.handler.take()[1:] == [("closing", Http2ErrorCode.NO_ERROR, "bye \ufffd")]
    assert not peer.connection.closed
    peer.connection.reply(1, HEAD, [b"a"], TRAILERS)
    assert len(peer.sent()) == 3


def test_a_graceful_shutdown_loses_no_request():
    peer = Peer()
    peer.send(headers(1, end=True))
    peer.connection.shutdown()
    announcement, ping = peer.sent()
    assert announcement == Frame(GOAWAY, 0, 0, LAST.to_bytes(4) + bytes(4))
    assert (ping.kind, ping.flags) == (PING, 0)
    peer.connection.shutdown()
    assert peer.sent() == []
    # A request that was on its way is served.
    assert peer.send(headers(3)) == []
    assert peer.send(frame(PING, ACK, 0, b"whatever")) == []
    assert peer.send(frame(PING, ACK, 0, ping.payload)) == [Frame(GOAWAY, 0, 0, (3).to_bytes(4) + bytes(4))]
    assert peer.send(frame(PING, ACK, 0, ping.payload)) == []
    # From now on a new one is ignored in all its parts, which the client knows.
    peer.handler.take()
    assert peer.send(headers(5), data(5, b"a"), headers(5, ((b"x", b"y"),), end=True), window_update(5, 1)) == []
    assert peer.send(headers(7, ((b"no", b"request"),)), data(3, b"more", end=True)) == []
    assert peer.handler.take() == [("data", 3, b"more", True)]
    assert not peer.connection.finished
    peer.connection.reply(1, HEAD, [b"a"], TRAILERS)
    peer.connection.reply(3, HEAD, [b"a"], TRAILERS)
    assert peer.connection.finished and not peer.connection.closed


def test_an_end_at_once():
    peer = Peer()
    peer.send(headers(1))
    peer.connection.goaway(Http2ErrorCode.ENHANCE_YOUR_CALM, "too old")
    assert peer.sent() == [Frame(GOAWAY, 0, 0, (1).to_bytes(4) + (11).to_bytes(4) + b"too old")]
    peer.send(headers(3))
    peer.connection.goaway()
    assert peer.sent() == [Frame(GOAWAY, 0, 0, (1).to_bytes(4) + bytes(4))]
    assert peer.goaway(peer.send(data(0, b"")))[0] is Http2ErrorCode.PROTOCOL_ERROR


def test_an_error_after_the_last_stream_was_named_names_no_later_one():
    peer = Peer()
    peer.send(headers(1))
    peer.connection.goaway()
    peer.send(headers(3))
    assert peer.send(data(0, b""))[-1].payload[:4] == (1).to_bytes(4)


@pytest.mark.parametrize("how", ["shutdown", "goaway"])
def test_an_end_before_the_beginning(how):
    connection, handler = new()
    connection.receive(PREFACE[:5], 0.0)
    getattr(connection, how)()
    assert connection.closed and connection.finished and connection.outbound == []
    connection.receive(PREFACE[5:], 0.0)
    assert connection.outbound == [] and handler.events == []


def test_losing_the_transport_closes_every_stream():
    peer = Peer(None, (4, 1 << 20))
    peer.send(headers(1), headers(3, end=True))
    peer.handler.take()
    tensor = bytearray(100_000)
    peer.connection.reply(3, HEAD, [tensor], TRAILERS)
    peer.connection.lost()
    tensor.clear()  # which raises as long as somebody holds a view
    assert peer.handler.take() == [("closed", 1, Http2ErrorCode.CANCEL), ("closed", 3, Http2ErrorCode.CANCEL)]
    assert peer.connection.closed and peer.connection.queued == 0 and peer.connection.outbound == []
    peer.connection.lost()
    assert peer.handler.take() == []


def test_settings_in_mid_stream_do_not_disturb_it():
    peer = Peer()
    assert peer.send(headers(1), data(1, b"a"), settings((4, 0)), data(1, b"b", end=True)) == [
        Frame(SETTINGS, ACK, 0, b"")
    ]
    assert peer.handler.bodies[1] == b"ab"
