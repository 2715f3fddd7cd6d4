from __future__ import annotations

import os

import pytest

from nerite.execution.arena import Segment, address_of, anonymous_file
from nerite.execution.guest_memory import FIRST, GuestMemory

SIZE = 10_000


def span(view: memoryview) -> tuple[int, int]:
    """Where a view is, and how long."""
    return address_of(view), len(view)


def mapped(descriptor: int, offset: int = 0, size: int = SIZE) -> memoryview:
    return Segment(descriptor, size, offset).array(0, size).data


def test_views_are_found_by_where_they_are() -> None:
    guests = GuestMemory()
    assert guests.find(*span(memoryview(bytearray(8)))) is None
    one, two = anonymous_file(SIZE), anonymous_file(5000 + SIZE)
    first, second = mapped(one), mapped(two, 5000)
    assert [guests.add(one, 0, first), guests.add(two, 5000, second)] == [FIRST, FIRST + 1]
    for number, descriptor, offset, memory in ((FIRST, one, 0, first), (FIRST + 1, two, 5000, second)):
        found = guests.find(*span(memory[100:200]))
        assert found is not None
        guest, place = found
        assert (guest.number, guest.descriptor, guest.offset, guest.size, place) == (
            number,
            descriptor,
            offset,
            SIZE,
            100,
        )
    assert guests.find(*span(memoryview(bytearray(8)))) is None


def test_what_is_removed_is_told_and_closed() -> None:
    guests = GuestMemory()
    descriptor = anonymous_file(SIZE)
    memory = mapped(descriptor)
    number = guests.add(descriptor, 0, memory)
    told: list[int] = []
    guests.on_gone.append(told.append)
    guests.remove(number)
    assert told == [number]
    assert guests.find(*span(memory)) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert bytes(memory[:3]) == b"\0\0\0"
