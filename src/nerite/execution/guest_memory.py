"""Shared memory that a worker maps though it is not the arena of its model, so that tensors there need not be copied.

The arenas of other models, and the memory that other workers write their answers into: an output of one model goes to
the next as it lies. What clients share is not among it: they may shorten it (``regions``).
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from nerite.execution.arena import Arena, Segment

FIRST: Final = 1 << 16
"""Numbers of guests begin here; below are the segments of arenas."""


class Guest(NamedTuple):
    """A file that is mapped."""

    number: int
    descriptor: int
    size: int
    base: int
    """Where in this process it is mapped."""


class GuestMemory:
    """Every guest there is. For the loop's thread only."""

    def __init__(self) -> None:
        self.on_gone: list[Callable[[int], None]] = []
        """Called with the number of each guest that is removed."""
        self._guests: dict[int, Guest] = {}
        self._by_base: list[tuple[int, int]] = []
        """Where each begins, and its number, ascending."""
        self._next = FIRST

    def add(self, descriptor: int, size: int, base: int) -> int:
        """Take in a file, which is mapped at ``base``; return its number. Takes over ``descriptor``."""
        number = self._next
        self._next += 1
        self._guests[number] = Guest(number, descriptor, size, base)
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
        guest = self._guests.pop(number)
        self._by_base.remove((guest.base, number))
        os.close(guest.descriptor)
        for tell in tuple(self.on_gone):
            tell(number)

    def find(self, address: int, size: int) -> tuple[Guest, int] | None:
        """Return the guest that so many bytes lie in, and their place in it; None for other memory."""
        at = bisect.bisect_right(self._by_base, (address, self._next))
        if not at:
            return None
        guest = self._guests[self._by_base[at - 1][1]]
        place = address - guest.base
        return (guest, place) if place + size <= guest.size else None
