"""Shared memory whose lifetime is that of the views on it. Owner and borrower are in one process here."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.core.memory import memory_file
from nerite.core.tensor import address_of
from nerite.workers.ipc import shared_memory as module
from nerite.workers.ipc.shared_memory import Arena, BufferBorrower, BufferLeases, Segment

KB = 1024
MB = 1024 * KB


def span(view: memoryview) -> tuple[int, int]:
    """Where a view is, and how long."""
    return address_of(view), len(view)


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Small: segments of 1 MB, 2 MB in all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEGMENT_SIZE", MB)
        made = Arena(budget=2 * MB)
        yield made
        made.close()


def taken(of: Arena, size: int) -> memoryview:
    view = of.allocate(size)
    assert view is not None
    return view


def trim(of: Arena) -> None:
    for _ in of.trim():
        pass


def test_a_view_has_the_size_that_was_asked_for_and_can_be_written(arena: Arena) -> None:
    for size in (1, 100, 64 * KB, 64 * KB + 1, 1_000_000):
        view = taken(arena, size)
        assert (len(view), view.format, view.readonly) == (size, "B", False)
        view[:] = b"\xaa" * size


def test_views_that_live_do_not_overlap(arena: Arena) -> None:
    views = [taken(arena, size) for size in (100, 70 * KB, 100, 200 * KB, 64 * KB)]
    for number, view in enumerate(views):
        view[:] = bytes([number]) * len(view)
    assert [set(view.tobytes()) for view in views] == [{number} for number in range(5)]


def test_memory_comes_back_with_the_last_view_on_it(arena: Arena) -> None:
    view = taken(arena, 64 * KB)
    place = arena.place(address_of(view))
    part = np.frombuffer(view[100:200], np.uint8)[::2]
    del view
    other = taken(arena, 64 * KB)
    assert arena.place(address_of(other)) != place
    del part
    assert arena.place(address_of(taken(arena, 40 * KB))) == place


def test_there_is_nothing_beyond_the_budget(arena: Arena) -> None:
    views = [taken(arena, MB) for _ in range(2)]
    assert arena.allocate(MB) is None
    assert arena.allocate(1) is None
    views.pop()
    assert arena.allocate(MB) is not None


def test_what_is_larger_than_a_segment_gets_one_of_its_own() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEGMENT_SIZE", MB)
        arena = Arena(budget=5 * MB)
        assert len(taken(arena, 3 * MB)) == 3 * MB
        assert [segment.size for segment in arena.segments] == [4 * MB]
        assert len(taken(arena, KB)) == KB
        assert [segment.size for segment in arena.segments] == [4 * MB, MB]
        assert arena.allocate(2 * MB) is None
        arena.close()


def test_place_of_a_view(arena: Arena) -> None:
    first, second = taken(arena, MB), taken(arena, MB)
    assert arena.place(address_of(first)) == (0, 0)
    assert arena.place(address_of(second)) == (1, 0)
    assert arena.place(address_of(first[12345:12346])) == (0, 12345)
    assert arena.place(address_of(second[MB - 1 :])) == (1, MB - 1)
    assert arena.place(address_of(memoryview(bytearray(100)))) is None
    assert arena.place(address_of(memoryview(bytes(100)))) is None


def test_segments_are_announced_before_anything_in_them_is_handed_out(arena: Arena) -> None:
    told: list[tuple[Segment, int]] = []
    arena.on_segment.append(lambda segment: told.append((segment, len(views))))
    views: list[memoryview] = []
    for _ in range(4):
        views.append(taken(arena, 500 * KB))
    assert [count for _, count in told] == [0, 2]
    assert [segment for segment, _ in told] == arena.segments


@pytest.mark.skipif(not hasattr(module.mmap, "MADV_REMOVE"), reason="the system takes no pages of files back")
def test_trim_gives_back_the_pages_of_what_was_not_used_since_the_last(arena: Arena) -> None:
    def full() -> list[bool]:
        return [bool(arena.segments[0].array(place * 64 * KB, 64 * KB).any()) for place in range(3)]

    views = [taken(arena, 64 * KB) for _ in range(3)]
    for view in views:
        view[:] = b"\xaa" * 64 * KB
    del view
    for _ in range(2):
        views.pop(1)  # The third comes back last, and is used again first.
    trim(arena)
    assert full() == [True] * 3
    again = taken(arena, 64 * KB)
    assert again[0] == 0xAA
    del again
    trim(arena)
    assert full() == [True, False, True]
    trim(arena)
    assert full() == [True, False, False]
    assert views[0][0] == 0xAA
    other = [taken(arena, 64 * KB) for _ in range(2)]
    other[0][:] = other[1][:] = b"\xbb" * 64 * KB
    trim(arena)
    del other
    trim(arena)
    assert full() == [True] * 3
    views.clear()
    for _ in range(2):
        trim(arena)
    assert full() == [False] * 3


@pytest.mark.skipif(not hasattr(module.mmap, "MADV_REMOVE"), reason="the system takes no pages of files back")
def test_what_is_used_between_two_steps_of_a_trim_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_SIZE", MB)
    monkeypatch.setattr(module, "TRIMMED_AT_ONCE", 64 * KB)
    arena = Arena(budget=2 * MB)
    view = taken(arena, 256 * KB)
    view[:] = b"\xaa" * 256 * KB
    del view
    trim(arena)
    steps = arena.trim()
    next(steps)
    view = taken(arena, 256 * KB)
    view[:] = b"\xbb" * 256 * KB
    assert list(steps) == []
    assert set(view) == {0xBB}
    del view
    for _ in range(2):
        trim(arena)
    assert not arena.segments[0].array(0, 256 * KB).any()
    arena.close()


def test_views_may_end_in_any_thread(arena: Arena) -> None:
    views = [taken(arena, 64 * KB) for _ in range(16)]

    def drop() -> None:
        while views:
            views.pop()

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    segments = len(arena.segments)
    assert len([taken(arena, 64 * KB) for _ in range(16)]) == 16
    assert len(arena.segments) == segments


def test_after_close_there_is_nothing_and_what_lives_lives_on(arena: Arena) -> None:
    view = taken(arena, 64 * KB)
    view[:4] = b"abcd"
    (descriptor,) = (segment.descriptor for segment in arena.segments)
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert view[:4] == b"abcd"
    assert arena.allocate(64 * KB) is None
    arena.close()


SIZES = st.sampled_from((1, 1000, 64 * KB, 65 * KB, 130 * KB, 600 * KB))


@settings(max_examples=50)
@given(st.lists(st.one_of(SIZES, st.integers(-20, -1), st.none()), max_size=40))
def test_nothing_is_overwritten_while_it_lives(operations: list[int | None]) -> None:
    """Numbers allocate, negative ones drop, None trims. Every view keeps the pattern that was written to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEGMENT_SIZE", MB)
        arena = Arena(budget=2 * MB)
        live: list[tuple[memoryview, int]] = []
        for number, operation in enumerate(operations):
            if operation is None:
                trim(arena)
            elif operation > 0:
                view = arena.allocate(operation)
                if view is not None:
                    view[:] = bytes([number]) * operation
                    live.append((view, number))
                del view
            elif live:
                live.pop(operation % len(live))
            assert all(view[0] == view[-1] == number for view, number in live)
        assert all(set(view.tobytes()) == {number} for view, number in live)
        live.clear()
        sizes = {operation for operation in operations if operation is not None and operation > 0}
        for size in sizes:  # what was there once is there again
            assert arena.allocate(size) is not None or len(operations) > 2
        arena.close()


# Lending and borrowing.


@pytest.fixture
def borrower(arena: Arena) -> BufferBorrower:
    made = BufferBorrower()
    arena.on_segment.append(lambda segment: made.add(arena.segments.index(segment), segment.descriptor, segment.size))
    return made


def test_both_sides_see_the_same_bytes(arena: Arena, borrower: BufferBorrower) -> None:
    mine = taken(arena, 64 * KB)
    mine[:5] = b"hello"
    segment, offset = arena.place(address_of(mine)) or (-1, -1)
    yours = borrower.view(segment, offset, 64 * KB, 7)
    assert yours[:5] == b"hello"
    assert (len(yours), yours.readonly) == (64 * KB, False)
    yours[:5] = b"HELLO"
    assert mine[:5] == b"HELLO"


def test_a_token_is_released_with_the_last_view(arena: Arena, borrower: BufferBorrower) -> None:
    taken(arena, 1)
    one, other = borrower.view(0, 0, 100, 1), borrower.view(0, 4096, 100, 2)
    part = np.frombuffer(one[10:], np.uint8)
    del one
    assert borrower.released == []
    del part
    assert borrower.released == [1]
    del other
    assert borrower.released == [1, 2]


def test_what_is_taken_out_to_be_reported_is_no_longer_there(arena: Arena, borrower: BufferBorrower) -> None:
    taken(arena, 1)
    for token in (5, 6):
        borrower.view(0, 0, 100, token)
    assert borrower.take_released() == [5, 6]
    assert borrower.take_released() == []
    borrower.view(0, 0, 100, 7)
    assert borrower.take_released() == [7]


def test_a_borrowed_view_is_found_again(arena: Arena, borrower: BufferBorrower) -> None:
    taken(arena, 1)
    view = borrower.view(0, 4096, 1000, 3)
    assert borrower.find(*span(view)) == (0, 4096, 3)
    assert borrower.find(*span(view[10:20])) == (0, 4106, 3)
    assert borrower.find(*span(memoryview(np.frombuffer(view, np.uint8)[999:]))) == (0, 5095, 3)
    assert borrower.find(*span(memoryview(bytearray(10)))) is None
    beyond = borrower.view(0, 4096, 1001, 4)
    assert borrower.find(*span(beyond)) == (0, 4096, 4)
    del beyond
    assert borrower.find(*span(view[5:])) == (0, 4101, 3)
    del view
    assert borrower.find(*span(memoryview(bytearray(10)))) is None


def test_views_may_end_while_another_is_looked_for(arena: Arena, borrower: BufferBorrower) -> None:
    """A model's thread drops its inputs whenever it likes."""
    taken(arena, 1)
    views = [borrower.view(0, 64 * number, 64, number) for number in range(2000)]
    wanted = borrower.view(0, 64 * 3000, 64, 3000)
    stop = threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def drop() -> None:
        while views and not stop.is_set():
            views.pop()

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        while thread.is_alive():
            assert borrower.find(*span(wanted)) == (0, 64 * 3000, 3000)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert sorted(borrower.take_released()) == list(range(2000))


def test_lent_views_live_until_they_are_returned(arena: Arena) -> None:
    buffer_leases = BufferLeases()
    view = taken(arena, 64 * KB)
    view[:5] = b"hello"
    segment, offset = arena.place(address_of(view)) or (-1, -1)
    token = buffer_leases.lend(view, offset)
    del view
    assert arena.place(address_of(taken(arena, 64 * KB))) != (segment, offset)
    assert buffer_leases.part(token, offset + 1, 3) == b"ell"
    buffer_leases.returned(token)
    assert arena.place(address_of(taken(arena, 64 * KB))) == (segment, offset)
    buffer_leases.returned(token)


def test_every_loan_has_a_token_of_its_own(arena: Arena) -> None:
    buffer_leases = BufferLeases()
    view = taken(arena, 100)
    tokens = [buffer_leases.lend(view, 0) for _ in range(100)]
    assert len(set(tokens)) == 100
    assert all(0 < token <= 0xFFFFFFFF for token in tokens)


def test_a_closed_borrower_unmaps_what_is_not_viewed() -> None:
    descriptor = memory_file(MB)
    borrower = BufferBorrower()
    unused, viewed = (weakref.ref(borrower.add(number, descriptor, MB).memory) for number in range(2))
    view = borrower.view(1, 0, 5, 1)
    borrower.close()
    assert unused() is None
    assert bytes(view) == bytes(5)
    del view
    assert viewed() is None
    assert borrower.take_released() == [1]
    os.close(descriptor)


def test_a_file_to_read_only() -> None:
    descriptor = memory_file(MB)
    os.pwrite(descriptor, b"hello", 5000)
    borrower = BufferBorrower()
    borrower.add(7, descriptor, MB, writable=False)
    view = borrower.view(7, 5000, 5, 1)
    assert bytes(view) == b"hello"
    assert view.readonly
    os.pwrite(descriptor, b"j", 5000)
    assert bytes(view) == b"jello"
    assert borrower.find(*span(view[1:3])) == (7, 5001, 1)
    borrower.forget(7)
    borrower.forget(7)
    assert bytes(view) == b"jello"
    del view
    assert borrower.take_released() == [1]
    os.close(descriptor)
