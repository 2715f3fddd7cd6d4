"""gRPC's framing of replies."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core import errors
from nerite.transports.grpc import messages


def fields(block: bytes) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in hpack.Decoder().decode(block, raw=True)]


def test_the_head_of_a_reply() -> None:
    assert fields(messages.HEAD) == [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-accept-encoding", b"identity, deflate, gzip"),
    ]
    assert fields(messages.head_with_encoding("gzip")) == [*fields(messages.HEAD), (b"grpc-encoding", b"gzip")]
    assert fields(messages.TRAILERS_OK) == [(b"grpc-status", b"0")]
    assert fields(messages.NOT_GRPC) == [(b":status", b"415")]


def test_a_reply_that_is_only_a_status() -> None:
    assert fields(messages.trailers_only(12, "")) == [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-status", b"12"),
    ]
    assert fields(messages.trailers(13, "why")) == [(b"grpc-status", b"13"), (b"grpc-message", b"why")]


@pytest.mark.parametrize(
    "kind",
    [*errors.BY_CODE.values(), errors.Restricted, errors.QuotaExceeded, errors.TooLarge, errors.DeadlineExceeded],
)
def test_errors(kind: type[errors.NeriteError]) -> None:
    found = dict(fields(messages.of_error(kind("what is wrong"))))
    assert found[b"grpc-status"] == b"%d" % kind.grpc_status
    assert found[b"grpc-message"] == b"what is wrong"


def test_who_may_come_again_is_told_when() -> None:
    found = dict(fields(messages.of_error(errors.Unavailable("full", retry_after=3))))
    assert found[b"grpc-retry-pushback-ms"] == b"3000"
    assert dict(fields(messages.trailers(14, "full", 2)))[b"grpc-retry-pushback-ms"] == b"2000"
    assert b"grpc-retry-pushback-ms" not in dict(fields(messages.of_error(errors.Unavailable("gone"))))


@pytest.mark.parametrize(
    ("message", "encoded"),
    [
        ("Expected [-1,16], got [1,8].", b"Expected [-1,16], got [1,8]."),
        ("100%", b"100%25"),
        ("é", b"%C3%A9"),
        ("a\nb\r\0", b"a%0Ab%0D%00"),
        ("~ !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}", b"~ !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}"),
        # A field's value neither begins nor ends with a blank.
        ("got [3]. ", b"got [3].%20"),
        (" x  ", b"%20x%20%20"),
        (" ", b"%20"),
    ],
)
def test_messages_are_printable(message: str, encoded: bytes) -> None:
    assert dict(fields(messages.trailers(3, message)))[b"grpc-message"] == encoded


@given(st.text(max_size=200))
def test_any_message_can_be_sent_and_read(message: str) -> None:
    found = dict(fields(messages.of_error(errors.Internal(message)))).get(b"grpc-message", b"")
    assert all(0x20 <= byte < 0x7F for byte in found)
    assert unquote_to_bytes(found) == message.encode(errors="replace")


def test_a_long_message_is_cut() -> None:
    found = dict(fields(messages.trailers(3, "é" * 100_000)))[b"grpc-message"]
    assert len(unquote_to_bytes(found)) == 4096


def test_a_message_behind_its_length() -> None:
    assert messages.framed(b"abcde") == b"\0\0\0\0\5abcde"
    assert messages.framed(b"") == b"\0\0\0\0\0"
    assert messages.framed(b"x" * 300, compressed=True) == b"\1\0\0\1\x2c" + b"x" * 300


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1S", 1.0),
        (b"2M", 120.0),
        (b"3H", 10800.0),
        (b"250m", 0.25),
        (b"250u", 0.00025),
        (b"250n", 2.5e-07),
        (b"99999999S", 99999999.0),
        (b"0n", 0.0),
    ],
)
def test_timeouts(value: bytes, seconds: float) -> None:
    assert messages.timeout_seconds(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value", [b"", b"S", b"1", b"1s", b"1.5S", b"-1S", b"+1S", b"1 S", b"100000000S", b"1SS", b"\xb2S", b"0x1S"]
)
def test_timeouts_that_mean_nothing(value: bytes) -> None:
    assert messages.timeout_seconds(value) is None
