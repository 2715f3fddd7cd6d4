"""On which member each sequence of a stateful model is.

A new sequence goes where consistent hashing says (``hash_ring.py``), so several routers in front of the same members
agree without talking to each other, as does a router that was restarted. The table is what keeps a sequence on its
member when members come and go.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


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
