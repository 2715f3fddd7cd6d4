"""Memory that two processes share, for tensors too large to push through a socket.

Theory of operation. An ``Arena`` belongs to the process that writes into it; it is a few segments, each an anonymous
file (``memfd_create``) that both processes map. Its other side is a ``Borrower`` in each process that reads. Nothing
has a name in the file system, so nothing is left behind when either side dies, and no limit of /dev/shm applies.

Who may use a piece of memory again, and when? The lifetime of the views answers that, in both processes: ``allocate``
returns a view whose memory comes back when the last view on it is gone. A view that is lent is kept, by ``Loans``,
until the borrower reports its token; the borrower reports a token when the last of *its* views is gone. So a model may
keep an input as long as it likes, and a transport may take its time to send an output: the memory waits for both.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

MIN_SIZE = 64 * 1024
SEGMENT_SIZE = 64 * 1024 * 1024
BUDGET = 1024 * 1024 * 1024


def anonymous_file(size: int) -> int:
    """Return a descriptor of ``size`` bytes of memory that have no name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("nerite", os.MFD_CLOEXEC)
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def address_of(view: memoryview) -> int:
    """Return where the bytes of ``view`` are."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Segment:
    """One mapped file, or a part of one."""

    __slots__ = ("_before", "base", "descriptor", "memory", "size")

    def __init__(self, descriptor: int, size: int, offset: int = 0, *, writable: bool = True) -> None:
        self.descriptor = descriptor
        self.size = size
        # Whole pages are mapped; what lies before the offset is left out afterwards.
        self._before = offset % mmap.ALLOCATIONGRANULARITY
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.memory = mmap.mmap(descriptor, self._before + size, offset=offset - self._before, access=access)
        self.base = int(self.array(0, size).__array_interface__["data"][0])

    def array(self, offset: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a piece of it: an object that exports the bytes, and whose end can be watched."""
        return np.frombuffer(self.memory, np.uint8, size, self._before + offset)


class Arena:
    """The owner's side: hands out memory, and knows where a view lies.

    Only one thread allocates; views may end in any thread.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.segments: list[Segment] = []
        self.on_segment: list[Callable[[Segment], None]] = []
        """Called with each new segment before anything in it is handed out."""
        self.on_close: list[Callable[[], None]] = []
        self._budget = budget
        self._used = 0
        self._next = 0
        self._free: dict[int, list[tuple[int, int]]] = {}
        self._live: dict[int, weakref.ref[Any]] = {}

    def allocate(self, size: int) -> memoryview | None:
        """Return ``size`` writable bytes that come back when the last view on them is gone; None if none are left."""
        rounded = max(MIN_SIZE, 1 << (size - 1).bit_length())
        place = self._take(rounded)
        if place is None:
            return None
        segment, offset = place
        array = self.segments[segment].array(offset, size)
        key = id(array)

        def back(_: object) -> None:
            del self._live[key]
            self._free.setdefault(rounded, []).append(place)

        self._live[key] = weakref.ref(array, back)
        return array.data

    def _take(self, size: int) -> tuple[int, int] | None:
        free = self._free.get(size)
        if free:
            return free.pop()
        if not self.segments or self._next + size > self.segments[-1].size:
            segment_size = max(SEGMENT_SIZE, size)
            if self._used + segment_size > self._budget:
                return None
            segment = Segment(anonymous_file(segment_size), segment_size)
            self.segments.append(segment)
            self._used += segment_size
            self._next = 0
            for announce in self.on_segment:
                announce(segment)
        offset = self._next
        self._next += size
        return len(self.segments) - 1, offset

    def trim(self) -> None:
        """Give pages back to the system if nothing is in use. Only for the thread that allocates."""
        if self._live or not hasattr(mmap, "MADV_REMOVE"):
            return
        for segment in self.segments:
            segment.memory.madvise(mmap.MADV_REMOVE)

    def place(self, address: int) -> tuple[int, int] | None:
        """Return segment number and offset of an address in this arena, None for one in other memory."""
        for number, segment in enumerate(self.segments):
            if 0 <= address - segment.base < segment.size:
                return number, address - segment.base
        return None

    def close(self) -> None:
        """Close the descriptors; the memory goes when the last view does. Nothing may be allocated afterwards."""
        for call in self.on_close:
            call()
        self.on_close.clear()
        for segment in self.segments:
            os.close(segment.descriptor)
        self.segments.clear()
        self._free.clear()
        self._budget = 0


class Loans:
    """The views that one borrower has, kept until it is done with them."""

    __slots__ = ("_out", "_token")

    def __init__(self) -> None:
        self._out: dict[int, tuple[memoryview, int]] = {}
        self._token = 0

    def lend(self, view: memoryview, offset: int) -> int:
        """Keep ``view``, which begins at ``offset`` of its segment; return its token."""
        self._token = token = (self._token + 1) & 0xFFFFFFFF
        self._out[token] = (view, offset)
        return token

    def part(self, token: int, offset: int, size: int) -> memoryview:
        """Return a part of what was lent, which the borrower hands back as its own output."""
        view, start = self._out[token]
        return view[offset - start : offset - start + size]

    def returned(self, token: int) -> None:
        """Note that the borrower is done with a view."""
        self._out.pop(token, None)


class Borrower:
    """The reader's side: views on what the other process maps, too, and a list of those that are done with."""

    def __init__(self) -> None:
        self.released: list[int] = []
        """Tokens to report: see ``take_released``."""
        self._segments: dict[int, Segment] = {}
        self._live: dict[int, tuple[weakref.ref[Any], int, int, int, int]] = {}

    def add(self, number: int, descriptor: int, size: int, offset: int = 0, *, writable: bool = True) -> Segment:
        """Map one more segment, and return it; takes ownership of ``descriptor``."""
        segment = self._segments[number] = Segment(descriptor, size, offset, writable=writable)
        os.close(descriptor)
        return segment

    def forget(self, number: int) -> None:
        """Let go of a segment: it is unmapped when the last view on it is gone."""
        self._segments.pop(number, None)

    def view(self, segment: int, offset: int, size: int, token: int) -> memoryview:
        """Return a view on borrowed memory; ``token`` appears in ``released`` when the last view on it is gone."""
        array = self._segments[segment].array(offset, size)

        def gone(_: object) -> None:
            del self._live[token]
            self.released.append(token)

        address = self._segments[segment].base + offset
        self._live[token] = (weakref.ref(array, gone), address, size, segment, offset)
        return array.data

    def take_released(self) -> list[int]:
        """Return the tokens to report, and forget them."""
        released = self.released
        tokens = released[:]
        # Not ``clear``: a view may end in another thread between the two lines.
        del released[: len(tokens)]
        return tokens

    def find(self, address: int, size: int) -> tuple[int, int, int] | None:
        """Return segment, offset and token if so many bytes lie within something borrowed just now, else None."""
        # Of a copy: a view may end in another thread meanwhile.
        for token, (_, start, whole, segment, offset) in self._live.copy().items():
            if start <= address and address + size <= start + whole:
                return segment, offset + address - start, token
        return None
