"""On which member each sequence of a stateful model is.

A new sequence goes where consistent hashing says (``hash_ring.py``), so several routers in front of the same members
agree without talking to each other, as does a router that was restarted. The table is what keeps a sequence on its
member when members come and go.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final, NamedTuple

from nerite.balancing.member import RoutedRequest

TENANT_SHARE: Final = 0.75
"""Fraction of the places that the sequences of one tenant may take."""


class SequencePlace(NamedTuple):
    """Where a sequence is."""

    member: str
    ticket: int
    """Of the member's process: another one has not its state."""
    used_ns: int
    tenant: str
    """Whose it is."""


class SequenceTable:
    """Places of sequences, the least recently used first. Those that were idle for too long are forgotten."""

    def __init__(self, limit: int, idle: float) -> None:
        """``idle`` is in seconds."""
        self._limit = limit
        self._idle_ns = round(idle * 1e9)
        self._places: OrderedDict[int, SequencePlace] = OrderedDict()
        self._counts: Counter[str] = Counter()
        """Number of sequences by tenant."""

    def __len__(self) -> int:
        return len(self._places)

    def find(self, request: RoutedRequest) -> SequencePlace | None:
        """Return where the sequence of a request is, if that is known."""
        return self._places.get(_key(request))

    def obstacle(self, tenant: str, now_ns: int) -> str:
        """Forget who was idle for too long. Return why a tenant may begin no sequence; empty if it may."""
        places = self._places
        while places and next(iter(places.values())).used_ns + self._idle_ns <= now_ns:
            self._forget(next(iter(places)))
        if len(places) >= self._limit:
            return f"has {self._limit} sequences, as many as max-sequences allows"
        if tenant and self._counts[tenant] >= max(1, int(self._limit * TENANT_SHARE)):
            return f"has {self._counts[tenant]} sequences of tenant '{tenant}', the share of max-sequences for one"
        return ""

    def put(self, request: RoutedRequest, member: str, ticket: int, now_ns: int) -> None:
        """Note that a request of a sequence is sent to a member."""
        key = _key(request)
        if request.tenant and key not in self._places:
            self._counts[request.tenant] += 1
        self._places[key] = SequencePlace(member, ticket, now_ns, request.tenant)
        self._places.move_to_end(key)

    def remove(self, request: RoutedRequest) -> None:
        """Forget a sequence that has ended."""
        self._forget(_key(request))

    def _forget(self, key: int) -> None:
        place = self._places.pop(key, None)
        if place is not None and place.tenant:
            self._counts[place.tenant] -= 1
            if not self._counts[place.tenant]:
                del self._counts[place.tenant]


def _key(request: RoutedRequest) -> int:
    return hash((request.model, request.tenant, request.sequence))
