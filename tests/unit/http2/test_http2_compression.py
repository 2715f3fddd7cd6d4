"""HPACK against the examples of RFC 7541 and against an independent encoder and decoder."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.http2.frames import Http2ErrorCode, ProtocolError
from nerite.http2.headers import FieldDecoder, FieldsTooLarge, encode_fields

LIMIT = 16_384

# RFC 7541, appendix C.3 (plain) and C.4 (Huffman): three requests on one connection.
REQUESTS = [
    [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")],
    [
        (b":method", b"GET"),
        (b":scheme", b"http"),
        (b":path", b"/"),
        (b":authority", b"www.example.com"),
        (b"cache-control", b"no-cache"),
    ],
    [
        (b":method", b"GET"),
        (b":scheme", b"https"),
        (b":path", b"/index.html"),
        (b":authority", b"www.example.com"),
        (b"custom-key", b"custom-value"),
    ],
]
PLAIN = [
    "828684410f7777772e6578616d706c652e636f6d",
    "828684be58086e6f2d6361636865",
    "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
]
HUFFMAN = [
    "828684418cf1e3c2e5f23a6ba0ab90f4ff",
    "828684be5886a8eb10649cbf",
    "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
]


@pytest.mark.parametrize("blocks", [PLAIN, HUFFMAN], ids=["plain", "huffman"])
def test_examples_of_the_rfc(blocks):
    decoder = FieldDecoder(LIMIT)
    changes = []
    for block, fields in zip(blocks, REQUESTS, strict=True):
        assert decoder.decode(bytes.fromhex(block)) == fields
        changes.append(decoder.changes)
    assert changes == [1, 2, 3]


def test_literals_that_are_not_indexed_change_nothing():
    decoder = FieldDecoder(LIMIT)
    # C.2.2 without indexing, C.2.3 never indexed, C.2.4 indexed field.
    assert decoder.decode(bytes.fromhex("040c2f73616d706c652f70617468")) == [(b":path", b"/sample/path")]
    assert decoder.decode(bytes.fromhex("100870617373776f726406736563726574")) == [(b"password", b"secret")]
    assert decoder.decode(bytes.fromhex("82")) == [(b":method", b"GET")]
    assert decoder.changes == 0
    with pytest.raises(ProtocolError):
        decoder.decode(b"\xbe")  # the table is empty


def test_the_table_forgets_the_oldest_and_what_is_larger_than_it():
    decoder = FieldDecoder(LIMIT)
    decoder.decode(b"\x3f\x31")  # size 80: room for two small fields
    assert decoder.decode(b"\x40\x01a\x011\x40\x01b\x012\xbf") == [(b"a", b"1"), (b"b", b"2"), (b"a", b"1")]
    assert decoder.decode(b"\x40\x01c\x013\xbe\xbf") == [(b"c", b"3"), (b"c", b"3"), (b"b", b"2")]
    with pytest.raises(ProtocolError):
        decoder.decode(b"\xc0")
    assert decoder.decode(b"\x40\x01d\x40" + b"x" * 64) == [(b"d", b"x" * 64)]
    with pytest.raises(ProtocolError):
        decoder.decode(b"\xbe")


def test_a_name_may_come_from_a_field_that_its_own_insertion_drops():
    decoder = FieldDecoder(LIMIT)
    decoder.decode(b"\x3f\x09")  # size 40: room for one
    assert decoder.decode(b"\x40\x01a\x011\x7e\x012\xbe") == [(b"a", b"1"), (b"a", b"2"), (b"a", b"2")]


@pytest.mark.parametrize(
    "block",
    [
        "80",  # index 0
        "be",  # an empty dynamic table
        "ff",  # an integer without its end
        "ffffffffffffff01",  # an integer beyond 32 bits
        "40",  # no name
        "4003",  # a name without its bytes
        "400161",  # no value
        "40016105",  # a value without its bytes
        "4001618561",  # a Huffman string without its bytes
        "40016181fe",  # padding that is not of ones
        "40016184ffffffff",  # the end-of-string symbol
        "3fe21f",  # a table of 4,097 bytes
        "8220",  # a table size behind a field
        "7f80ffffff7f",  # an index beyond all tables
    ],
)
def test_what_is_not_hpack_is_a_compression_error(block):
    with pytest.raises(ProtocolError) as caught:
        FieldDecoder(LIMIT).decode(bytes.fromhex(block))
    assert caught.value.code is Http2ErrorCode.COMPRESSION_ERROR


def test_an_oversized_list_leaves_the_table_in_step():
    decoder = FieldDecoder(100)
    # Two fields of 32 + 2 bytes fit, a third does not; it is in the table all the same.
    fields = b"\x40\x01a\x011\x40\x01b\x012"
    assert len(decoder.decode(fields)) == 2
    with pytest.raises(FieldsTooLarge):
        decoder.decode(b"\xbe\xbf\x40\x01c\x013")
    assert decoder.decode(b"\xbe\xbf") == [(b"c", b"3"), (b"b", b"2")]


def test_a_few_bytes_cannot_become_a_large_list():
    decoder = FieldDecoder(LIMIT)
    decoder.decode(b"\x40\x01a\x7f\x81\x1e" + b"x" * 3_968)
    with pytest.raises(FieldsTooLarge):
        decoder.decode(b"\xbe" * 60_000)


NAMES = st.sampled_from([b":path", b":method", b"te", b"x-a", b"x-b", b"grpc-timeout", b"user-agent"])
VALUES = st.one_of(st.sampled_from([b"", b"POST", b"/", b"trailers"]), st.binary(max_size=300))
FIELDS = st.lists(st.tuples(NAMES, VALUES, st.booleans()), max_size=12)


@given(st.lists(st.tuples(FIELDS, st.booleans(), st.sampled_from([None, None, 0, 60, 500, 4096])), max_size=8))
def test_whatever_an_encoder_does_is_decoded(blocks):
    encoder = hpack.Encoder()
    decoder = FieldDecoder(1 << 20)
    for fields, huffman, size in blocks:
        if size is not None:
            encoder.header_table_size = size
        block = encoder.encode(fields, huffman=huffman)
        assert decoder.decode(block) == [(name, value) for name, value, _ in fields]


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(block):
    try:
        theirs = [tuple(field) for field in hpack.Decoder().decode(block, raw=True)]
    except hpack.HPACKError:
        theirs = None
    try:
        ours = FieldDecoder(1 << 16).decode(block)
    except ProtocolError as error:
        assert error.code is Http2ErrorCode.COMPRESSION_ERROR
        ours = None
    assert ours == theirs


@given(st.lists(st.tuples(NAMES, VALUES), max_size=12))
def test_what_we_encode_means_the_same_on_any_connection(fields):
    block = encode_fields(fields)
    fresh, used = hpack.Decoder(), hpack.Decoder()
    used.decode(hpack.Encoder().encode([(b"x-other", b"something"), (b"te", b"else")]))
    for decoder in (fresh, used, used):
        before = list(decoder.header_table.dynamic_entries)
        assert [tuple(field) for field in decoder.decode(block, raw=True)] == fields
        assert list(decoder.header_table.dynamic_entries) == before


def test_static_fields_are_one_byte():
    assert encode_fields([(b":status", b"200"), (b":status", b"404")]) == b"\x88\x8d"
    assert encode_fields([(b"content-type", b"x")]) == b"\x0f\x10\x01x"
    assert encode_fields([(b"grpc-status", b"0")]) == b"\x00\x0bgrpc-status\x010"
