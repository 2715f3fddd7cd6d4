from __future__ import annotations

import os

import pytest

from nerite.core.memory import memory_file
from nerite.core.tensor import address_of
from nerite.workers.ipc.shared_memory import FIRST, Arena, ForeignSegments, Segment

SIZE = 10_000


def span(view: memoryview) -> tuple[int, int]:
    """Where a view is, and how long."""
    return address_of(view), len(view)


def mapped(descriptor: int) -> memoryview:
    return Segment(descriptor, SIZE).array(0, SIZE).data


def test_views_are_found_by_where_they_are() -> None:
    foreign_segments = ForeignSegments()
    assert foreign_segments.find(*span(memoryview(bytearray(8)))) is None
    one, two = memory_file(SIZE), memory_file(SIZE)
    first, second = mapped(one), mapped(two)
    numbers = [foreign_segments.add(one, SIZE, address_of(first)), foreign_segments.add(two, SIZE, address_of(second))]
    assert numbers == [FIRST, FIRST + 1]
    for number, descriptor, memory in ((FIRST, one, first), (FIRST + 1, two, second)):
        found = foreign_segments.find(*span(memory[100:200]))
        assert found is not None
        foreign_segment, place = found
        assert (foreign_segment.number, foreign_segment.descriptor, foreign_segment.size, place) == (
            number,
            descriptor,
            SIZE,
            100,
        )
    assert foreign_segments.find(*span(memoryview(bytearray(8)))) is None


def test_what_is_removed_is_told_and_closed() -> None:
    foreign_segments = ForeignSegments()
    descriptor = memory_file(SIZE)
    memory = mapped(descriptor)
    number = foreign_segments.add(descriptor, SIZE, address_of(memory))
    told: list[int] = []
    foreign_segments.on_gone.append(told.append)
    foreign_segments.remove(number)
    assert told == [number]
    assert foreign_segments.find(*span(memory)) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert bytes(memory[:3]) == b"\0\0\0"


def test_what_begins_before_a_foreign_segment_or_ends_behind_it_is_no_part_of_it() -> None:
    foreign_segments = ForeignSegments()
    descriptor = memory_file(SIZE)
    memory = mapped(descriptor)
    foreign_segments.add(descriptor, SIZE - 100, address_of(memory))
    base = address_of(memory)
    assert foreign_segments.find(base - 1, 10) is None
    assert foreign_segments.find(base + SIZE - 150, 51) is None
    assert foreign_segments.find(base + SIZE - 150, 50) is not None
    foreign_segments.remove(FIRST)


def test_an_arena_is_a_foreign_segment_until_it_closes() -> None:
    foreign_segments = ForeignSegments()
    arena = Arena()
    foreign_segments.host(arena)
    view = arena.allocate(100_000)
    assert view is not None
    found = foreign_segments.find(*span(view))
    assert found is not None
    assert found[0].size == arena.segments[0].size
    told: list[int] = []
    foreign_segments.on_gone.append(told.append)
    arena.close()
    assert told == [found[0].number]
    assert foreign_segments.find(*span(view)) is None
