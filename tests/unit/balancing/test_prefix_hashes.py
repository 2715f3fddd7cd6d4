"""Hashes of beginnings of prompts, and the index of who holds them."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.balancing.holder_index import ENTRY, MOST_HOLDERS, HolderIndex
from nerite.balancing.prefix_hashes import SIZES, prefix_hashes, prefix_tokens

MB = 1024 * 1024


def test_equal_beginnings_have_equal_hashes() -> None:
    common = b"The same for everybody. " * 200
    one, other = prefix_hashes(common + b"one" * 900), prefix_hashes(common + b"other" * 900)
    shared = sum(size <= len(common) for size in SIZES)
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])


def test_there_are_few_for_any_length() -> None:
    assert prefix_hashes(b"x" * 255) == ()
    assert len(prefix_hashes(b"x" * 800)) == 3
    assert len(prefix_hashes(b"x" * 400_000)) == 38
    assert len(prefix_hashes(bytes(SIZES[-1] + 1))) == len(SIZES) == 60


def test_a_beginning_is_known_within_a_quarter_of_the_prompt() -> None:
    for smaller, larger in pairwise(SIZES):
        assert larger - smaller <= max(256, larger / 4)


def test_all_bytes_like_objects_hash_alike_and_salts_differ() -> None:
    text = bytes(range(256)) * 400
    assert prefix_hashes(text) == prefix_hashes(bytearray(text)) == prefix_hashes(memoryview(text))
    assert not set(prefix_hashes(text, "a")) & set(prefix_hashes(text, "b"))


def test_tokens_are_estimated_from_bytes() -> None:
    assert prefix_tokens(3) == (64.0, 128.0, 192.0)
    assert len(prefix_tokens(60)) == 60


@given(st.binary(max_size=6000), st.integers(0, 6000), st.integers(1, 255))
@settings(max_examples=200)
def test_a_changed_byte_changes_all_hashes_from_there_on(text: bytes, place: int, change: int) -> None:
    if place < len(text):
        other = bytearray(text)
        other[place] ^= change
        same = [size <= place for size in SIZES if size <= len(text)]
        assert [one == two for one, two in zip(prefix_hashes(text), prefix_hashes(other), strict=True)] == same


def test_the_newest_holders_come_first() -> None:
    index = HolderIndex(MB)
    for ticket in range(1, 12):
        index.add([7], ticket)
    index.add([7], 9)
    assert index.holders(7) == (9, 11, 10, 8, 7, 6, 5, 4)
    assert len(index.holders(7)) == MOST_HOLDERS
    index.move(7, 3)
    assert index.holders(7) == (3,)
    assert index.holders(8) == ()


def test_the_deepest_beginning_that_is_held() -> None:
    index = HolderIndex(MB)
    keys = list(range(100, 140))
    index.add(keys[:30], 1)
    index.add(keys[:10], 2)
    assert index.deepest(keys) == 29
    assert (index.held(keys, 1), index.held(keys, 2), index.held(keys, 3)) == (29, 9, -1)
    assert index.deepest([1, 2]) == index.deepest([]) == -1


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    index = HolderIndex(64 * 4 * ENTRY)
    keys = [64 * number for number in range(4)]
    index.add(keys, 1)
    index.add(keys[:1], 1)
    index.add([64 * 9], 1)
    assert [bool(index.holders(key)) for key in keys] == [True, False, True, True]


def test_memory_is_flat_after_many_distinct_prompts() -> None:
    limit = 2 * MB
    index = HolderIndex(limit)
    tracemalloc.start()
    try:
        sizes = []
        for start in range(0, 60_000, 20_000):
            for number in range(start, start + 20_000):
                index.add([hash((number, place)) for place in range(4)], number % 16)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert index.used <= limit
    assert max(sizes) <= 1.05 * limit
    assert sizes[-1] <= 1.02 * sizes[0]


@pytest.mark.parametrize("holders", [1, MOST_HOLDERS])
def test_an_entry_takes_no_more_than_is_said(holders: int) -> None:
    index = HolderIndex(64 * MB)
    tracemalloc.start()
    try:
        for number in range(30_000):
            key = [hash((number, "key"))]
            for ticket in range(holders):
                index.add(key, ticket)
        assert tracemalloc.get_traced_memory()[0] <= index.used
    finally:
        tracemalloc.stop()
