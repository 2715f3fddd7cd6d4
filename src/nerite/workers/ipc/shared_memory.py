"""Memory that two processes share, for tensors too large to push through a socket.

Theory of operation. An ``Arena`` belongs to the process that writes into it; it is a few segments, each an anonymous
file (``memfd_create``) that both processes map. Its other side is a ``BufferBorrower`` in each process that reads.
Nothing has a name in the file system, so nothing is left behind when either side dies, and no limit of /dev/shm
applies.

Who may use a piece of memory again, and when? The lifetime of the views answers that, in both processes: ``allocate``
returns a view whose memory comes back when the last view on it is gone. A view that is lent is kept, by
``BufferLeases``, until the borrower reports its token; the borrower reports a token when the last of *its* views is
gone. So a model may keep an input as long as it likes, and a transport may take its time to send an output: the memory
waits for both.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.core.memory import memory_file

MIN_SIZE = 64 * 1024
SEGMENT_SIZE = 64 * 1024 * 1024
BUDGET = 1024 * 1024 * 1024
TRIM_EVERY = 5.0
"""Seconds from one ``Arena.trim`` to the next: what is not used for twice as long has no memory."""
TRIM_STEP = 0.02
"""Seconds between two steps of it."""
_TRIMMED_AT_ONCE = 8 * 1024 * 1024


def address_of(view: memoryview) -> int:
    """Return where the bytes of ``view`` are."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Segment:
    """One mapped file."""

    __slots__ = ("base", "descriptor", "memory", "size")

    def __init__(self, descriptor: int, size: int, *, writable: bool = True) -> None:
        self.descriptor = descriptor
        self.size = size
        self.memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self.base = int(self.array(0, size).__array_interface__["data"][0])

    def array(self, offset: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a piece of it: an object that exports the bytes, and whose end can be watched."""
        return np.frombuffer(self.memory, np.uint8, size, offset)


class _Pieces:
    """The free pieces of one size, each as segment number and offset. What came back last is used first."""

    __slots__ = ("empty", "places", "rested")

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self.rested = 0
        """So many, from the first on, have been free since the last trim."""
        self.empty = 0
        """So many of those have no pages."""

    def take(self) -> tuple[int, int]:
        """Remove and return the last piece."""
        place = self.places.pop()
        left = len(self.places)
        if left < self.rested:
            self.rested = left
            self.empty = min(self.empty, left)
        return place


class Arena:
    """The owner's side: hands out memory, and knows where a view lies.

    Only one thread allocates and trims; views may end in any thread.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.segments: list[Segment] = []
        self.on_segment: list[Callable[[Segment], None]] = []
        """Called with each new segment before anything in it is handed out."""
        self.on_close: list[Callable[[], None]] = []
        self._budget = budget
        self._used = 0
        self._next = 0
        self._pieces: dict[int, _Pieces] = {}
        """By size."""
        self._live: dict[int, weakref.ref[Any]] = {}

    def allocate(self, size: int) -> memoryview | None:
        """Return ``size`` writable bytes that come back when the last view on them is gone; None if none are left."""
        rounded = max(MIN_SIZE, 1 << (size - 1).bit_length())
        pieces = self._pieces.get(rounded)
        if pieces is None:
            pieces = self._pieces[rounded] = _Pieces()
        place = pieces.take() if pieces.places else self._cut(rounded)
        if place is None:
            return None
        segment, offset = place
        array = self.segments[segment].array(offset, size)
        key = id(array)
        free = pieces.places

        def back(_: object) -> None:
            del self._live[key]
            free.append(place)

        self._live[key] = weakref.ref(array, back)
        return array.data

    def _cut(self, size: int) -> tuple[int, int] | None:
        """Return a piece that was never used; None if there is no room for one."""
        if not self.segments or self._next + size > self.segments[-1].size:
            segment_size = max(SEGMENT_SIZE, size)
            if self._used + segment_size > self._budget:
                return None
            segment = self._segment(segment_size)
            if segment is None:
                return None
            self.segments.append(segment)
            self._used += segment_size
            self._next = 0
            for announce in self.on_segment:
                announce(segment)
        offset = self._next
        self._next += size
        return len(self.segments) - 1, offset

    def _segment(self, size: int) -> Segment | None:
        """Return a new segment; None if no descriptor or no memory is left for one."""
        try:
            descriptor = memory_file(size)
        except OSError:
            return None
        try:
            return Segment(descriptor, size)
        except (OSError, ValueError):
            os.close(descriptor)
            return None

    def trim(self) -> Iterator[None]:
        """Give the pages of those pieces back to the system that were not used since the last trim.

        In steps of some milliseconds, between which anything else may be done with the arena, but for another trim.
        """
        known = [*self._pieces.items()] if hasattr(mmap, "MADV_REMOVE") else []
        for size, pieces in known:
            while pieces.empty < pieces.rested:
                which = pieces.empty
                segment, offset = pieces.places[which]
                for at in range(offset, offset + size, _TRIMMED_AT_ONCE):
                    self.segments[segment].memory.madvise(mmap.MADV_REMOVE, at, min(size, _TRIMMED_AT_ONCE))
                    yield
                    if which >= pieces.rested:  # It is in use.
                        break
                else:
                    pieces.empty = which + 1
        for _, pieces in known:
            pieces.rested = len(pieces.places)

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
        self._pieces.clear()
        self._budget = 0


class BufferLeases:
    """The views that one borrower has, kept until it is done with them."""

    __slots__ = ("_out", "mark")

    def __init__(self) -> None:
        self._out: dict[int, tuple[memoryview, int]] = {}
        self.mark = 0
        """The token of what was lent last."""

    def revoke(self, mark: int) -> None:
        """Take back what was lent since ``mark``: the borrower was not told of it."""
        while self.mark != mark:
            self._out.pop(self.mark, None)
            self.mark = (self.mark - 1) & 0xFFFFFFFF

    def lend(self, view: memoryview, offset: int) -> int:
        """Keep ``view``, which begins at ``offset`` of its segment; return its token."""
        self.mark = token = (self.mark + 1) & 0xFFFFFFFF
        self._out[token] = (view, offset)
        return token

    def part(self, token: int, offset: int, size: int) -> memoryview:
        """Return a part of what was lent, which the borrower hands back as its own output."""
        view, start = self._out[token]
        return view[offset - start : offset - start + size]

    def returned(self, token: int) -> None:
        """Note that the borrower is done with a view."""
        self._out.pop(token, None)


class BufferBorrower:
    """The reader's side: views on what the other process maps, too, and a list of those that are done with."""

    def __init__(self) -> None:
        self.released: list[int] = []
        """Tokens to report: see ``take_released``."""
        self._segments: dict[int, Segment] = {}
        self._live: dict[int, tuple[weakref.ref[Any], int, int, int, int]] = {}

    def add(self, number: int, descriptor: int, size: int, *, writable: bool = True) -> Segment:
        """Map one more segment, and return it. ``descriptor`` is not needed afterwards. Raises ``OSError``."""
        segment = self._segments[number] = Segment(descriptor, size, writable=writable)
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


# Shared memory that a worker maps though it is not the arena of its model, so that tensors there need not be copied.
#
# The arenas of other models, and the memory that other workers write their answers into: an output of one model goes
# to the next as it lies. What clients share is not among it: they may shorten it (``regions``).

FIRST: Final = 1 << 16
"""Numbers of guests begin here; below are the segments of arenas."""


class ForeignSegment(NamedTuple):
    """A file that is mapped."""

    number: int
    descriptor: int
    size: int
    base: int
    """Where in this process it is mapped."""


class ForeignSegments:
    """Every guest there is. For the loop's thread only."""

    def __init__(self) -> None:
        self.on_gone: list[Callable[[int], None]] = []
        """Called with the number of each guest that is removed."""
        self._foreign_segments: dict[int, ForeignSegment] = {}
        self._by_base: list[tuple[int, int]] = []
        """Where each begins, and its number, ascending."""
        self._next = FIRST

    def add(self, descriptor: int, size: int, base: int) -> int:
        """Take in a file, which is mapped at ``base``; return its number. Takes over ``descriptor``."""
        number = self._next
        self._next += 1
        self._foreign_segments[number] = ForeignSegment(number, descriptor, size, base)
        bisect.insort(self._by_base, (base, number))
        return number

    def host(self, arena: Arena) -> None:
        """Have every segment of an arena as a guest for as long as it is open."""

        def add(segment: Segment) -> None:
            try:
                descriptor = os.dup(segment.descriptor)
            except OSError:  # no descriptor is left: what lies there is copied for the workers of other models
                return
            arena.on_close.append(partial(self.remove, self.add(descriptor, segment.size, segment.base)))

        arena.on_segment.append(add)

    def remove(self, number: int) -> None:
        """Forget a guest; whoever reads it at that moment keeps the mapping until done."""
        foreign_segment = self._foreign_segments.pop(number)
        self._by_base.remove((foreign_segment.base, number))
        os.close(foreign_segment.descriptor)
        for tell in tuple(self.on_gone):
            tell(number)

    def find(self, address: int, size: int) -> tuple[ForeignSegment, int] | None:
        """Return the guest that so many bytes lie in, and their place in it; None for other memory."""
        at = bisect.bisect_right(self._by_base, (address, self._next))
        if not at:
            return None
        foreign_segment = self._foreign_segments[self._by_base[at - 1][1]]
        place = address - foreign_segment.base
        return (foreign_segment, place) if place + size <= foreign_segment.size else None


# Descriptors that come over a socket, also where this process may have no more open than it has.

_SPARES: Final = 8
_FOR_EACH: Final = 2
"""One is the descriptor's own, one is that which Python keeps of what it maps."""

_DESCRIPTOR: Final = struct.Struct("i")

_spares: list[int] = []
"""Descriptors of nothing, whose places others take."""


def keep_spares() -> None:
    """Have some to spare, as far as that is possible now. For the loop's thread, as ``received``."""
    with contextlib.suppress(OSError):
        while len(_spares) < _SPARES:
            _spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def received_descriptors(line: socket.socket) -> int:
    """Return the descriptor that comes next, to be mapped. Raises ``OSError`` if there is no place for it.

    ``keep_spares`` is to follow: a mapping may have had to take the place of some.
    """
    while True:
        exhausted = not _spares
        for spare in _spares[-_FOR_EACH:]:
            os.close(spare)
        del _spares[-_FOR_EACH:]
        # What there is no place for is lost, unless it was only looked at.
        # (``socket.recv_fds`` leaves flags out.)
        _, found, _, _ = line.recvmsg(1, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_PEEK)
        if found:
            line.recv(1)
            descriptor: int = _DESCRIPTOR.unpack(found[0][2])[0]
            return descriptor
        if exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
