"""On which member each sequence of a stateful model is, and where new sequences go.

A new sequence goes to the member that rendezvous hashing says, weighted by capacity. So several routers in front of the
same members agree without talking to each other, as does a router that was restarted; the table is what keeps a
sequence on its member when members come and go.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple
from zlib import crc32

from nerite.balancing.member_load import MemberLoad

_MASK: Final = 2**64 - 1
_ODD: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
"""Multipliers that spread the bits of a number (splitmix64)."""


class SequencePlace(NamedTuple):
    """Where a sequence is."""

    member: str
    ticket: int
    """Of the member's process: another one has not its state."""
    used_ns: int


class SequenceTable:
    """Places of sequences, the least recently used first. Those that were idle for too long are forgotten."""

    def __init__(self, limit: int, idle: float) -> None:
        """``idle`` is in seconds."""
        self._limit = limit
        self._idle_ns = round(idle * 1e9)
        self._places: OrderedDict[int, SequencePlace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, model: str, sequence: str) -> SequencePlace | None:
        """Return where a sequence is, if that is known."""
        return self._places.get(hash((model, sequence)))

    def is_full(self, now_ns: int) -> bool:
        """Forget who was idle for too long. Returns whether there is no room for another sequence."""
        places = self._places
        while places and next(iter(places.values())).used_ns + self._idle_ns <= now_ns:
            places.popitem(last=False)
        return len(places) >= self._limit

    def put(self, model: str, sequence: str, member: str, ticket: int, now_ns: int) -> None:
        """Note that a request of a sequence is sent to a member."""
        key = hash((model, sequence))
        self._places[key] = SequencePlace(member, ticket, now_ns)
        self._places.move_to_end(key)

    def remove(self, model: str, sequence: str) -> None:
        """Forget a sequence that has ended."""
        self._places.pop(hash((model, sequence)), None)


def rendezvous(model: str, sequence: str, loads: Iterable[MemberLoad]) -> MemberLoad:
    """Return the member for a new sequence. ``loads`` must not be empty."""
    key = crc32(f"{model}\0{sequence}".encode())

    def draw(load: MemberLoad) -> float:
        mixed = ((key << 32 | crc32(load.member.name.encode())) * _ODD[0]) & _MASK
        mixed = ((mixed ^ mixed >> 30) * _ODD[1]) & _MASK
        return -math.log((mixed >> 11 | 1) / 2**53) / load.member.capacity

    return min(loads, key=draw)
