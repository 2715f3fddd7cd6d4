"""Which requests are well-formed (RFC 9113 section 8), and which blocks are decoded once."""

from __future__ import annotations

import tracemalloc

import hpack
import pytest
from http2_peer import (
    END_HEADERS,
    PRIORITISED,
    REQUEST,
    Frame,
    Peer,
    data,
    frame,
    headers,
    keep_all,
    literal,
    reset_frame,
)

from nerite.http2 import Http2ErrorCode, Limits, RequestHeaders, encode_headers
from nerite.http2.headers import HeaderReader, MalformedHeaders

PSEUDO = REQUEST[:3]


def read(*fields: tuple[bytes, bytes]) -> RequestHeaders:
    return HeaderReader(Limits(), keep_all).request(literal(fields))


def test_a_request_is_taken_apart():
    request = read(*REQUEST, (b"x-two", b"1"), (b"x-two", b"2"))
    assert request.method == b"POST"
    assert request.scheme == b"http"
    assert request.path == b"/inference.GRPCInferenceService/ModelInfer"
    assert request.authority == b"localhost"
    assert request.content_length == -1
    assert request.fields == (
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        (b"x-two", b"1"),
        (b"x-two", b"2"),
    )
    assert request.get(b"te") == b"trailers"
    assert request.get(b"x-two") == b"1"
    assert request.get(b"x-three") is None
    assert request.memo is None


@pytest.mark.parametrize(
    "fields",
    [
        PSEUDO,
        (*PSEUDO, (b"te", b"Trailers")),
        (*PSEUDO, (b"content-length", b"7"), (b"content-length", b"7")),
        (*PSEUDO, (b"x", b"")),
        (*PSEUDO, (b"x", b"a \t b")),
        (*PSEUDO, (b"x", b"\xff\x80")),
        (*PSEUDO, (b"x!#$%&'*+-.^_`|~9", b"a")),
        ((b":method", b"CONNECT"), (b":authority", b"a:1")),
        ((b":path", b"*"), (b":scheme", b"x"), (b":method", b"OPTIONS")),
    ],
)
def test_well_formed(fields):
    read(*fields)


@pytest.mark.parametrize(
    ("value", "read_as"), [(b" leading", b"leading"), (b"trailing\t", b"trailing"), (b" ", b""), (b"\t a b ", b"a b")]
)
def test_blanks_at_the_ends_of_a_value_are_no_part_of_it(value: bytes, read_as: bytes) -> None:
    assert read(*PSEUDO, (b"x", value)).fields == ((b"x", read_as),)


@pytest.mark.parametrize(
    "fields",
    [
        (),
        PSEUDO[1:],
        (PSEUDO[0], PSEUDO[2]),
        PSEUDO[:2],
        (*PSEUDO[:2], (b":path", b"")),
        ((b":method", b""), *PSEUDO[1:]),
        (*PSEUDO, (b":path", b"/again")),
        (*PSEUDO, (b":status", b"200")),
        (*PSEUDO, (b":protocol", b"websocket")),
        (*PSEUDO, (b"x", b"a"), (b":authority", b"late")),
        ((b"x", b"a"), *PSEUDO),
        ((b"x", b"a"), (b"y", b"b"), *PSEUDO),
        (*PSEUDO, (b"", b"no name")),
        (*PSEUDO, (b"Upper", b"a")),
        (*PSEUDO, (b"sp ace", b"a")),
        (*PSEUDO, (b"co:lon", b"a")),
        (*PSEUDO, (b"z\x80", b"a")),
        (*PSEUDO, (b"x", b"line\nbreak")),
        (*PSEUDO, (b"x", b"return\r")),
        (*PSEUDO, (b"x", b"nul\0")),
        (PSEUDO[0], (b":path", b"/ "), PSEUDO[2]),
        (*PSEUDO[:2], (b":path", b"/\n")),
        (*PSEUDO, (b"connection", b"close")),
        (*PSEUDO, (b"keep-alive", b"1")),
        (*PSEUDO, (b"proxy-connection", b"close")),
        (*PSEUDO, (b"transfer-encoding", b"chunked")),
        (*PSEUDO, (b"upgrade", b"h2c")),
        (*PSEUDO, (b"te", b"gzip")),
        (*PSEUDO, (b"te", b"trailers, gzip")),
        (*PSEUDO, (b"content-length", b"")),
        (*PSEUDO, (b"content-length", b"-1")),
        (*PSEUDO, (b"content-length", b"1_0")),
        (*PSEUDO, (b"content-length", b"1" * 20)),
        (*PSEUDO, (b"content-length", b"7"), (b"content-length", b"8")),
        ((b":method", b"CONNECT"), (b":authority", b"a:1"), (b":path", b"/")),
        ((b":method", b"CONNECT"), (b":scheme", b"http")),
    ],
)
def test_malformed(fields):
    with pytest.raises(MalformedHeaders) as caught:
        read(*fields)
    assert caught.value.code is Http2ErrorCode.PROTOCOL_ERROR

    # On a connection that is the end of the stream, and of nothing else.
    peer = Peer()
    assert peer.send(headers(1, fields)) == [reset_frame(1, Http2ErrorCode.PROTOCOL_ERROR)]
    assert peer.handler.take() == []
    assert peer.send(data(1, b"late"), headers(3, end=True)) == []
    assert [event[:2] for event in peer.handler.take()] == [("started", 3)]


def test_a_field_that_was_refused_is_refused_again():
    reader = HeaderReader(Limits(), keep_all)
    for _ in range(2):
        with pytest.raises(MalformedHeaders):
            reader.request(literal((*PSEUDO, (b"connection", b"close"))))


def test_a_header_list_may_be_as_large_as_announced():
    limits = Limits(max_header_list_size=200)
    size = sum(len(name) + len(value) + 32 for name, value in PSEUDO) + 32 + 1
    assert size < 200
    exact = (*PSEUDO, (b"x", b"v" * (200 - size)))
    larger = (*PSEUDO, (b"x", b"v" * (201 - size)))
    peer = Peer(limits)
    assert peer.send(headers(1, exact, end=True)) == []
    assert peer.send(headers(3, larger, end=True)) == [reset_frame(3, Http2ErrorCode.ENHANCE_YOUR_CALM)]
    assert peer.send(headers(5, exact, end=True)) == []
    assert [event[:2] for event in peer.handler.take()] == [("started", 1), ("started", 5)]


def test_the_same_block_gives_the_same_object_while_the_table_does_not_change():
    encoder = hpack.Encoder()
    reader = HeaderReader(Limits(), keep_all)
    first = encoder.encode(REQUEST)
    reader.request(first)
    second = encoder.encode(REQUEST)
    kept = reader.request(second)
    assert reader.kept == {second: kept}
    # Another block that inserts a field: what the bytes of ``second`` mean has changed.
    reader.request(encoder.encode([*REQUEST, (b"x-new", b"1")]))
    assert reader.kept == {}
    with pytest.raises(MalformedHeaders):
        reader.request(second)


@pytest.mark.parametrize("change", ["trailers", "discard", "malformed"])
def test_every_block_that_changes_the_table_drops_what_was_kept(change):
    reader = HeaderReader(Limits(), keep_all)
    reader.request(literal(PSEUDO))
    assert len(reader.kept) == 1
    block = b"\x40\x01a\x011"
    if change == "trailers":
        reader.trailers(block)
    elif change == "discard":
        reader.discard(block)
    else:
        with pytest.raises(MalformedHeaders):
            reader.request(block)
    assert reader.kept == {}


def test_what_is_kept_is_bounded():
    sizes: list[int] = []
    reader = HeaderReader(Limits(), lambda kept, block, headers, size: sizes.append(size))
    for number in range(5_000):
        reader.request(literal((*PSEUDO, (b"x", b"%d" % number))))
    assert len(sizes) == 5_000, "the owner decides"
    assert reader.kept == {}
    reader.request(literal((*PSEUDO, (b"x", b"v" * 900))))
    assert sizes[-1] - sizes[-2] > 2 * 900
    reader.request(literal((*PSEUDO, (b"x", b"v" * 2_000))))
    assert len(sizes) == 5_001, "long blocks do not come again"


@pytest.mark.parametrize(("count", "length", "most"), [(20_000, 120, 4_096 * 400), (4_000, 900, 100_000)])
def test_what_all_connections_remember_of_fields_is_bounded(count: int, length: int, most: int) -> None:
    reader = HeaderReader(Limits(), lambda *_: None)
    reader.request(literal(PSEUDO))
    tracemalloc.start()
    try:
        for number in range(count):
            reader.request(literal((*PSEUDO, (b"x", b"%0*d" % (length, number)))))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken <= most < count * length


def test_requests_on_one_connection_share_their_headers():
    peer = Peer()
    peer.send(headers(1), headers(3), headers(5, end=True))
    first, second, third = (event[2] for event in peer.handler.take())
    assert first is second is third


def test_priority_in_headers_is_ignored():
    peer = Peer()
    block = b"\x80\0\0\1\xff" + literal(REQUEST)
    assert peer.send(frame(1, END_HEADERS | PRIORITISED, 1, block)) == []
    assert [event[:2] for event in peer.handler.take()] == [("started", 1)]


def test_our_headers_cannot_be_split_by_a_value():
    assert encode_headers([(b":status", b"200"), (b"x", b"1")]) == b"\x88\x00\x01x\x011"
    for field in [(b"x", b"a\r\nb"), (b"X", b"a"), (b":path", b"/"), (b"x", b" a")]:
        with pytest.raises(ValueError, match="not a header"):
            encode_headers([field])


def test_a_reply_may_have_more_headers_than_a_frame_holds():
    peer = Peer()
    peer.send(headers(1, end=True))
    block = encode_headers([(b":status", b"200"), (b"x", b"v" * 40_000)])
    peer.connection.send_headers(1, block, end_stream=True)
    first, second, third = peer.sent()
    assert first == Frame(1, 0x1, 1, block[:16_384])
    assert second == Frame(9, 0, 1, block[16_384:32_768])
    assert third == Frame(9, 0x4, 1, block[32_768:])
