"""Memory that two processes share, for tensors too large to be sent through a socket.

Theory of operation. An ``Arena`` belongs to the process that writes into it. It consists of a few segments, each an
anonymous file (``memfd_create``) that both processes map. Its counterpart is a ``BufferBorrower`` in each process that
reads. Nothing has a name in the file system, so nothing is left behind when either process ends, and no limit of
/dev/shm applies.

Memory is reused when it has no more references, in both processes: ``allocate`` returns a view whose memory is freed
with the last view on it. ``BufferLeases`` keeps a view that is lent until the borrower returns its token; the borrower
returns a token when the last of *its* views is gone. So a model may keep an input as long as it likes, and a transport
may take its time to send an output: the memory waits for both.
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
from nerite.core.tensor import DeviceBuffer

MIN_SIZE = 64 * 1024
SEGMENT_SIZE = 64 * 1024 * 1024
BUDGET = 1024 * 1024 * 1024
TRIM_EVERY = 5.0
"""Seconds between calls of ``Arena.trim``: memory that is unused for twice as long is released."""
TRIM_STEP = 0.02
"""Seconds between two steps of ``Arena.trim``."""
TRIMMED_AT_ONCE = 8 * 1024 * 1024
"""Bytes that one call to the operating system releases."""


class Segment:
    """One mapped file."""

    __slots__ = ("base", "descriptor", "memory", "size")

    def __init__(self, descriptor: int, size: int, *, writable: bool = True) -> None:
        self.descriptor = descriptor
        self.size = size
        self.memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self.base = int(self.array(0, size).__array_interface__["data"][0])

    def array(self, offset: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a piece of it, as an array that exports the bytes and can have a weak reference."""
        return np.frombuffer(self.memory, np.uint8, size, offset)


class _Pieces:
    """The free pieces of one size, each as segment number and offset. Last in, first out."""

    __slots__ = ("empty", "places", "rested")

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self.rested = 0
        """Number of pieces, from the first on, that have been free since the last trim."""
        self.empty = 0
        """Number of those whose pages were released."""

    def take(self) -> tuple[int, int]:
        """Remove and return the last piece."""
        place = self.places.pop()
        left = len(self.places)
        if left < self.rested:
            self.rested = left
            self.empty = min(self.empty, left)
        return place


class Arena:
    """The owner's side: allocates memory, and finds the place of a view.

    Only one thread allocates and trims; views may be released on any thread.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.segments: list[Segment] = []
        self.on_segment: list[Callable[[Segment], None]] = []
        """Called with each new segment before memory in it is allocated."""
        self.on_close: list[Callable[[], None]] = []
        self._budget = budget
        self._used = 0
        self._next = 0
        self._pieces: dict[int, _Pieces] = {}
        """By size."""
        self.live: dict[int, weakref.ref[Any]] = {}

    def allocate(self, size: int) -> memoryview | None:
        """Return ``size`` writable bytes, freed with the last view on them; None if there is no memory left."""
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
            del self.live[key]
            free.append(place)

        self.live[key] = weakref.ref(array, back)
        return array.data

    def _cut(self, size: int) -> tuple[int, int] | None:
        """Return a piece that was never used; None if there is no space for one."""
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
        """Return a new segment; None if there is no descriptor or no memory left for one."""
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
        """Release the pages of pieces that were not used since the last trim.

        Works in steps of some milliseconds, between which the arena may be used for anything but another trim.
        """
        known = [*self._pieces.items()] if hasattr(mmap, "MADV_REMOVE") else []
        for size, pieces in known:
            while pieces.empty < pieces.rested:
                which = pieces.empty
                segment, offset = pieces.places[which]
                for at in range(offset, offset + size, TRIMMED_AT_ONCE):
                    self.segments[segment].memory.madvise(mmap.MADV_REMOVE, at, min(size, TRIMMED_AT_ONCE))
                    yield
                    if which >= pieces.rested:  # it is in use
                        break
                else:
                    pieces.empty = which + 1
        for _, pieces in known:
            pieces.rested = len(pieces.places)

    def place(self, address: int) -> tuple[int, int] | None:
        """Return segment number and offset of an address in this arena; None for other memory."""
        for number, segment in enumerate(self.segments):
            if 0 <= address - segment.base < segment.size:
                return number, address - segment.base
        return None

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last view. Nothing may be allocated afterwards."""
        for call in self.on_close:
            call()
        self.on_close.clear()
        for segment in self.segments:
            os.close(segment.descriptor)
        self.segments.clear()
        self._pieces.clear()
        self._budget = 0


class BufferLeases:
    """The views that one borrower has, kept until it returns their tokens."""

    __slots__ = ("leased", "mark")

    def __init__(self) -> None:
        self.leased: dict[int, tuple[memoryview | DeviceBuffer, int]] = {}
        self.mark = 0
        """Token of the last view that was lent."""

    def revoke(self, mark: int) -> None:
        """Revoke the leases since ``mark``, which the borrower was not told of."""
        while self.mark != mark:
            self.leased.pop(self.mark, None)
            self.mark = (self.mark - 1) & 0xFFFFFFFF

    def lend(self, view: memoryview | DeviceBuffer, offset: int) -> int:
        """Keep ``view``, which begins at ``offset`` of its segment; return its token."""
        self.mark = token = (self.mark + 1) & 0xFFFFFFFF
        self.leased[token] = (view, offset)
        return token

    def part(self, token: int, offset: int, size: int) -> memoryview | DeviceBuffer:
        """Return a part of a lent view, which the borrower returns as its own output."""
        view, start = self.leased[token]
        return view[offset - start : offset - start + size]

    def returned(self, token: int) -> None:
        """Drop a view that the borrower has released."""
        self.leased.pop(token, None)


class _BorrowedMemory:
    """Owner of borrowed memory of a GPU, and what keeps that allocated."""

    __slots__ = ("__weakref__", "_memory")

    def __init__(self, memory: object) -> None:
        self._memory = memory


class BufferBorrower:
    """The reader's side: views on memory of the other process, and the tokens of those that are released."""

    def __init__(self) -> None:
        self.released: list[int] = []
        """Tokens to return: see ``take_released``."""
        self._segments: dict[int, Segment] = {}
        self.live: dict[int, tuple[weakref.ref[Any], int, int, int, int]] = {}

    def add(self, number: int, descriptor: int, size: int, *, writable: bool = True) -> Segment:
        """Map a segment, and return it. ``descriptor`` is not needed afterwards. Raises ``OSError``."""
        segment = self._segments[number] = Segment(descriptor, size, writable=writable)
        return segment

    def forget(self, number: int) -> None:
        """Drop a segment: it is unmapped with the last view on it."""
        self._segments.pop(number, None)

    def close(self) -> None:
        """Drop all segments."""
        self._segments.clear()

    def view(self, segment: int, offset: int, size: int, token: int) -> memoryview:
        """Return a view on borrowed memory; ``token`` appears in ``released`` when the last view on it is gone."""
        array = self._segments[segment].array(offset, size)

        def gone(_: object) -> None:
            del self.live[token]
            self.released.append(token)

        address = self._segments[segment].base + offset
        self.live[token] = (weakref.ref(array, gone), address, size, segment, offset)
        return array.data

    def device_view(self, device: int, base: int, offset: int, size: int, token: int, memory: object) -> DeviceBuffer:
        """Return a view on memory of a pool, which begins at ``base``; as ``view`` does.

        ``memory`` is kept as long as the view.
        """
        owner = _BorrowedMemory(memory)

        def gone(_: object) -> None:
            del self.live[token]
            self.released.append(token)

        self.live[token] = (weakref.ref(owner, gone), base + offset, size, device, offset)
        return DeviceBuffer(device, base + offset, size, owner)

    def take_released(self) -> list[int]:
        """Return and remove the tokens to return."""
        released = self.released
        tokens = released[:]
        # Not ``clear``: another thread may release a view between the two lines.
        del released[: len(tokens)]
        return tokens

    def find(self, address: int, size: int) -> tuple[int, int, int] | None:
        """Return segment, offset and token of borrowed memory that contains these bytes; None if there is none."""
        # On a copy: another thread may release a view meanwhile.
        for token, (_, start, whole, segment, offset) in self.live.copy().items():
            if start <= address and address + size <= start + whole:
                return segment, offset + address - start, token
        return None


# Foreign segments: memory that a worker maps although it is not the arena of its model, so that tensors in it need not
# be copied.
#
# These are the arenas of other models, and the memory that other workers write their responses into: an output of one
# model is passed to the next in place. Memory that clients share is not included: they may truncate it (``regions``).

FIRST: Final = 1 << 16
"""Lowest number of a foreign segment; numbers below are segments of arenas."""


class ForeignSegment(NamedTuple):
    """A mapped file."""

    number: int
    descriptor: int
    size: int
    base: int
    """Address of its mapping in this process."""


class ForeignSegments:
    """All foreign segments of a server. For the loop's thread only."""

    def __init__(self) -> None:
        self.on_gone: list[Callable[[int], None]] = []
        """Called with the number of each foreign segment that is removed."""
        self._foreign_segments: dict[int, ForeignSegment] = {}
        self._by_base: list[tuple[int, int]] = []
        """Base address and number of each, sorted."""
        self._next = FIRST

    def add(self, descriptor: int, size: int, base: int) -> int:
        """Add a file, which is mapped at ``base``; return its number. Takes ownership of ``descriptor``."""
        number = self._next
        self._next += 1
        self._foreign_segments[number] = ForeignSegment(number, descriptor, size, base)
        bisect.insort(self._by_base, (base, number))
        return number

    def host(self, arena: Arena) -> None:
        """Add every segment of an arena, until it is closed."""

        def add(segment: Segment) -> None:
            try:
                descriptor = os.dup(segment.descriptor)
            except OSError:  # no descriptor is left: the data is copied for the workers of other models
                return
            arena.on_close.append(partial(self.remove, self.add(descriptor, segment.size, segment.base)))

        arena.on_segment.append(add)

    def remove(self, number: int) -> None:
        """Remove a foreign segment; processes that use it keep their mapping until they are done."""
        foreign_segment = self._foreign_segments.pop(number)
        self._by_base.remove((foreign_segment.base, number))
        os.close(foreign_segment.descriptor)
        for tell in tuple(self.on_gone):
            tell(number)

    def find(self, address: int, size: int) -> tuple[ForeignSegment, int] | None:
        """Return the foreign segment that contains these bytes, and their offset in it; None for other memory."""
        at = bisect.bisect_right(self._by_base, (address, self._next))
        if not at:
            return None
        foreign_segment = self._foreign_segments[self._by_base[at - 1][1]]
        place = address - foreign_segment.base
        return (foreign_segment, place) if place + size <= foreign_segment.size else None


# Descriptors received over a socket, also when this process has reached its limit of open descriptors.

_SPARES: Final = 8
_FOR_EACH: Final = 2
"""One for the descriptor itself, and one for the duplicate that Python keeps for a mapping."""

_DESCRIPTOR: Final = struct.Struct("i")

_spares: list[int] = []
"""Placeholder descriptors, closed to make room for received ones."""


def keep_spares() -> None:
    """Open placeholder descriptors, as far as possible. For the loop's thread, like ``received_descriptors``."""
    with contextlib.suppress(OSError):
        while len(_spares) < _SPARES:
            _spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def received_descriptors(line: socket.socket) -> int:
    """Return the next descriptor, to be mapped. Raises ``OSError`` if there is no room for it.

    To be followed by ``keep_spares``: a mapping may have used up placeholders.
    """
    while True:
        exhausted = not _spares
        for spare in _spares[-_FOR_EACH:]:
            os.close(spare)
        del _spares[-_FOR_EACH:]
        # A descriptor without room is lost when it is received, unless the message was only peeked at.
        # (``socket.recv_fds`` ignores flags.)
        _, found, _, _ = line.recvmsg(1, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_PEEK)
        if found:
            line.recv(1)
            descriptor: int = _DESCRIPTOR.unpack(found[0][2])[0]
            return descriptor
        if exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
