"""Until when those that wait can still be in time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Final

from nerite.scheduling.tokens.refusal import Limit
from nerite.scheduling.tokens.ticket import State, Ticket

_HUSKS: Final = 64
"""Entries of those that wait no more that are kept in any case; beyond, no more than a few for each one that waits."""


class LastMoments:
    """Of the requests in one queue. Whoever waits no more is forgotten by itself."""

    __slots__ = ("_entries", "_numbers")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Limit, Ticket]] = []
        self._numbers = itertools.count()

    def add(self, ticket: Ticket, moments: Iterable[tuple[int, Limit]], waiting: int) -> None:
        """Note until when a request can wait, one of ``waiting``."""
        if len(self._entries) > 4 * waiting + _HUSKS:
            self._entries = [entry for entry in self._entries if entry[3].state is State.WAITING]
            heapq.heapify(self._entries)
        for at, limit in moments:
            heapq.heappush(self._entries, (at, next(self._numbers), limit, ticket))

    def next(self) -> int | None:
        """Return when the next one is over; None if nobody's is."""
        entries = self._entries
        while entries and entries[0][3].state is not State.WAITING:
            heapq.heappop(entries)
        return entries[0][0] if entries else None

    def over(self, now: int) -> Iterator[tuple[Ticket, Limit]]:
        """Take out whoever waits and cannot be in time any more, and by which limit."""
        while self._entries and self._entries[0][0] <= now:
            _, _, limit, ticket = heapq.heappop(self._entries)
            if ticket.state is State.WAITING:
                yield ticket, limit
