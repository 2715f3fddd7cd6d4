"""Content codings."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core.errors import InvalidArgument, Unsupported
from nerite.transports.http import content_coding

PACK = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("plain", [b"", b"hello", b"x" * 100_000])
def test_a_body_is_unpacked(encoding: str, plain: bytes) -> None:
    unpacked = content_coding.decompress(memoryview(PACK[encoding](plain)), 100_000)
    assert bytes(unpacked) == plain
    assert not unpacked.readonly


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_unpacks_beyond_the_limit(encoding: str) -> None:
    packed = memoryview(PACK[encoding](b"x" * 10_000_001))
    with pytest.raises(
        InvalidArgument, match=r"^Decompressed data size exceeds the maximum allowed value of 10000000 bytes"
    ):
        content_coding.decompress(packed, 10_000_000)


@pytest.mark.parametrize("body", [b"hello", b"\x1f\x8b"])
def test_a_body_that_is_not_packed(body: bytes) -> None:
    with pytest.raises(InvalidArgument, match="failed to decompress request body"):
        content_coding.decompress(memoryview(body), 100)


def test_no_body() -> None:
    with pytest.raises(InvalidArgument, match=r"^nothing to be decompressed$"):
        content_coding.decompress(memoryview(b""), 100)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_cut_off(encoding: str) -> None:
    packed = PACK[encoding](b"hello" * 10)
    for end in range(1, len(packed)):
        with pytest.raises(InvalidArgument, match="failed to decompress request body"):
            content_coding.decompress(memoryview(packed[:end]), 100)


def test_codings_that_there_are() -> None:
    for encoding in ("identity", "gzip", "deflate"):
        assert content_coding.known_coding(encoding)
        content_coding.check_coding(encoding)
    for encoding in ("", "br", "x-gzip", "gzip, deflate"):
        assert not content_coding.known_coding(encoding)
        with pytest.raises(Unsupported, match=r"^Unsupported compression type$"):
            content_coding.check_coding(encoding)


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        ("", ""),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, deflate", "deflate"),
        ("gzip;q=0.5,deflate;q=0.4", "gzip"),
        ("gzip; q=0", ""),
        ("identity", ""),
        ("identity, gzip;q=0.5", ""),
        ("identity;q=0.5, gzip", "gzip"),
        ("br", ""),
        ("br, gzip;q=0.1", "gzip"),
        ("gzip;q=nonsense", ""),
        ("gzip;q=nan", ""),
        (" , ;,gzip ,", "gzip"),
    ],
)
def test_what_a_reply_is_packed_with(header: str, chosen: str) -> None:
    assert content_coding.accepted(header) == chosen


@given(st.text(st.sampled_from("gzipdeflateidentity;q=0.15, *"), max_size=40))
def test_any_header_chooses_something_that_there_is(header: str) -> None:
    assert content_coding.accepted(header) in ("", "gzip", "deflate")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_reply_is_packed(encoding: str) -> None:
    parts = [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: 5\r\n"
        b"Content-Length: 13\r\n\r\nhello",
        memoryview(b"\r\n\r\nabcd"),
    ]
    packed = b"".join(content_coding.compress_reply(encoding, parts))
    head, _, body = packed.partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 200 OK",
        b"Content-Type: application/octet-stream",
        b"Inference-Header-Content-Length: 5",
        b"Content-Encoding: " + encoding.encode(),
        b"Content-Length: %d" % len(body),
    ]
    unpack = {"gzip": gzip.decompress, "deflate": zlib.decompress}[encoding]
    assert unpack(body) == b"hello\r\n\r\nabcd"
