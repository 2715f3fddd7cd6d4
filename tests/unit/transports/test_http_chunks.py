"""The chunked coding."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.core.errors import InvalidArgument
from nerite.transports.http.content_coding import MAX_CHUNKS, BadChunk, ChunkDecoder


def fed(pieces: list[bytes], limit: int = 10**9) -> tuple[bytes, bytes | None]:
    """Body and what is behind it; None behind a body that is not complete."""
    decoder = ChunkDecoder(limit)
    for number, piece in enumerate(pieces):
        rest = decoder.feed(piece)
        if decoder.complete:
            return bytes(decoder.body), rest + b"".join(pieces[number + 1 :])
        assert rest == b""
    return bytes(decoder.body), None


@st.composite
def coded(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A body, and one of the ways to write it in chunks."""
    chunks = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
    written = b""
    for chunk in chunks:
        digits = draw(st.sampled_from(("%x", "%X", "000%x"))) % len(chunk)
        extension = draw(st.sampled_from((b"", b";a=b", b" ; a", b';a="x"')))
        written += digits.encode() + extension + b"\r\n" + chunk + b"\r\n"
    written += draw(st.sampled_from((b"0\r\n", b"000;x\r\n")))
    written += draw(st.sampled_from((b"", b"A: b\r\n", b"A: b\r\nC: d\r\n"))) + b"\r\n"
    return b"".join(chunks), written


@settings(max_examples=60)
@given(coded(), st.binary(max_size=10), st.integers(0, 2**32))
def test_any_chunks_cut_anywhere(example: tuple[bytes, bytes], rest: bytes, seed: int) -> None:
    body, written = example
    stream = written + rest
    for pieces in (
        [stream],
        [stream[at : at + 1] for at in range(len(stream))],
        *([stream[:at], stream[at:]] for at in range(len(stream))),
    ):
        assert fed([*pieces]) == (body, rest)
    cut = random.Random(seed).sample(range(len(stream)), min(3, len(stream)))
    points = [0, *sorted(cut), len(stream)]
    assert fed([stream[a:b] for a, b in itertools.pairwise(points)]) == (body, rest)
    for end in range(len(written)):
        assert fed([written[:end]])[1] is None


@pytest.mark.parametrize(
    "stream",
    [
        b"x\r\n",
        b"\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"1_0\r\n",
        b" \r\n",
        b";a=b\r\n",
        b"1 1\r\na\r\n",
        "\u0661\r\n".encode(),
        b"1\r\nab\r\n",
        b"1\r\na\n0\r\n\r\n",
        b"1\r\na0\r\n\r\n",
        b"1" * 5000,
        b"1\r\na\r\n" + b"1;" + b"x" * 5000,
    ],
)
def test_broken_coding(stream: bytes) -> None:
    with pytest.raises(BadChunk):
        fed([stream])
    with pytest.raises(BadChunk):
        fed([stream[at : at + 1] for at in range(len(stream))])


def test_as_many_chunks_as_triton_takes() -> None:
    body, rest = fed([b"1\r\na\r\n" * MAX_CHUNKS + b"0\r\n\r\n"])
    assert (len(body), rest) == (65536, b"")
    with pytest.raises(InvalidArgument) as caught:
        fed([b"1\r\na\r\n" * (MAX_CHUNKS + 1)])
    assert caught.value.message == (
        "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks."
    )


def test_what_is_beyond_the_limit_is_not_kept() -> None:
    decoder = ChunkDecoder(1000)
    decoder.feed(b"%x\r\n" % 10**9)
    for _ in range(100):
        decoder.feed(b"x" * 1000)
    assert 1000 < len(decoder.body) <= 2000
    assert not decoder.complete


def test_a_chunk_within_the_limit_is_kept_whole() -> None:
    body, _ = fed([b"3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n"], limit=1000)
    assert len(body) == 1000
