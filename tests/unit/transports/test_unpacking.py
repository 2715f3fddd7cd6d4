"""Decompression that stops at a limit."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.transports import unpacking
from nerite.transports.unpacking import BrokenContent, UnpackedTooLarge, unpack, unpack_small

GZIP = 31


@given(st.binary(max_size=300), st.integers(1, 400), st.integers(0, 9))
def test_anything_is_what_it_was_or_too_large(plain: bytes, repeated: int, level: int) -> None:
    plain *= repeated
    packed = memoryview(gzip.compress(plain, level, mtime=0))
    assert bytes(unpack(packed, GZIP, len(plain))) == plain
    if plain:
        with pytest.raises(UnpackedTooLarge):
            unpack(packed, GZIP, len(plain) - 1)


@pytest.mark.parametrize("size", [2**20 - 1, 2**20, 2**20 + 1, 5 * 2**20])
@pytest.mark.parametrize("one_byte", [True, False])
def test_sizes_server_context_a_step(size: int, one_byte: bool) -> None:
    plain = b"x" * size if one_byte else bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert bytes(unpack(memoryview(gzip.compress(plain, mtime=0)), GZIP, size)) == plain


def test_models_may_work_in_place() -> None:
    assert not unpack(memoryview(gzip.compress(b"abc", mtime=0)), GZIP, 10).readonly


def test_a_bomb_takes_no_more_memory_than_the_limit() -> None:
    packed = memoryview(gzip.compress(bytes(100_000_000)))
    tracemalloc.start()
    try:
        with pytest.raises(UnpackedTooLarge):
            unpack(packed, GZIP, 4_000_000)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_somebody_else_may_say_that_there_is_no_room() -> None:
    told: list[int] = []

    def take(size: int) -> None:
        if sum(told) + size > 3_000_000:
            raise MemoryError
        told.append(size)

    with pytest.raises(MemoryError):
        unpack(memoryview(gzip.compress(bytes(10_000_000))), GZIP, 10**9, take)
    assert sum(told) <= 3_000_000
    told.clear()
    assert len(unpack(memoryview(gzip.compress(bytes(2_000_000))), GZIP, 10**9, take)) == sum(told) == 2_000_000


@pytest.mark.parametrize("packed", [b"", b"hello", gzip.compress(b"hello", mtime=0)[:-9], zlib.compress(b"hello")])
def test_what_is_not_packed_as_it_says(packed: bytes) -> None:
    with pytest.raises(BrokenContent):
        unpack(memoryview(packed), GZIP, 100)


def test_what_follows_the_end_is_ignored() -> None:
    packed = gzip.compress(b"hello", mtime=0) + bytes(200_000)
    assert bytes(unpack(memoryview(packed), GZIP, 100)) == b"hello"


def test_a_little_is_unpacked_at_once() -> None:
    def small(plain: bytes, limit: int = 10**9) -> bytes | None:
        unpacked = unpack_small(memoryview(gzip.compress(plain, mtime=0)), GZIP, limit)
        return None if unpacked is None else bytes(unpacked)

    assert small(bytes(unpacking.SMALL)) == bytes(unpacking.SMALL)
    assert small(bytes(unpacking.SMALL + 1)) is None
    assert small(bytes(100), 100) == bytes(100)
    with pytest.raises(UnpackedTooLarge):
        small(bytes(101), 100)
    assert unpack_small(memoryview(bytes(unpacking.SMALL + 1)), GZIP, 10**9) is None


def test_nothing_follows_the_end_of_what_stands_alone() -> None:
    packed = gzip.compress(b"hello", mtime=0)
    assert bytes(unpack(memoryview(packed), GZIP, 100, alone=True)) == b"hello"
    for more in (b"\0", packed, bytes(200_000)):
        with pytest.raises(BrokenContent, match="follows"):
            unpack(memoryview(packed + more), GZIP, 100, alone=True)
