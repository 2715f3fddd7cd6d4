"""Memory that clients have shared with the server, and that workers map too, so that its tensors need not be copied."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, NamedTuple

from nerite.execution.arena import address_of

FIRST: Final = 1 << 16
"""Numbers of guests begin here; below are the segments of arenas."""


class Guest(NamedTuple):
    """A part of a client's file."""

    number: int
    descriptor: int
    """Of the file."""
    offset: int
    """Where in the file it begins."""
    size: int
    base: int
    """Where in this process it is mapped."""


class GuestMemory:
    """Every guest there is. For the loop's thread only."""

    def __init__(self) -> None:
        self.on_gone: list[Callable[[int], None]] = []
        """Called with the number of each guest that is removed."""
        self._guests: dict[int, Guest] = {}
        self._next = FIRST

    def add(self, descriptor: int, offset: int, memory: memoryview) -> int:
        """Take in a part of a file, which is mapped at ``memory``; return its number. Takes over ``descriptor``."""
        number = self._next
        self._next += 1
        self._guests[number] = Guest(number, descriptor, offset, len(memory), address_of(memory))
        return number

    def remove(self, number: int) -> None:
        """Forget a guest; whoever reads it at that moment keeps the mapping until done."""
        os.close(self._guests.pop(number).descriptor)
        for tell in tuple(self.on_gone):
            tell(number)

    def find(self, address: int, size: int) -> tuple[Guest, int] | None:
        """Return the guest that so many bytes lie in, and their place in it; None for other memory."""
        for guest in self._guests.values():
            if guest.base <= address and address + size <= guest.base + guest.size:
                return guest, address - guest.base
        return None
