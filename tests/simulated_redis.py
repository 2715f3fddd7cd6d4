"""What the script of the leases does in Redis, in Python, so that the tests of leases need no server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nerite.admission.lease_exchange import LEASE_TTL


class SimulatedRedis:
    """Redis with the data of shared quotas, and a clock of its own."""

    def __init__(self) -> None:
        self.now = 1_000_000_000_000
        """Microseconds."""
        self.flush()

    def flush(self) -> None:
        """Lose all data."""
        self.epoch = 0
        self.servers: dict[str, int] = {}
        self.granted: dict[str, dict[str, int]] = {}
        self.buckets: dict[str, list[float]] = {}
        self.slots: dict[str, dict[str, tuple[int, int]]] = {}

    def execute(self, command: Sequence[bytes]) -> list[int]:
        """Return the reply to an exchange."""
        name, _, number, *words = command
        assert name == b"EVAL"
        keys, arguments = words[: int(number)], [word.decode() for word in words[int(number) :]]
        server, epoch, leaving, ttl = arguments[0], *map(int, arguments[1:4])
        assert ttl == LEASE_TTL
        old = self.now - ttl * 1_000_000
        self.servers = {each: at for each, at in self.servers.items() if at > old and each != server}
        if not leaving:
            self.servers[server] = self.now
        self.epoch = self.epoch or epoch
        reply = [self.epoch, max(len(self.servers), 1)]
        for index, key in enumerate(keys[3:]):
            kind, *numbers = map(int, arguments[4 + index].split())
            reply += (self._places if kind else self._bucket)(key.decode(), server, *numbers)
        if leaving:
            self.granted.pop(server, None)
        return reply

    def _held(self, before: int, free: int, least: int, need: int, spare: int) -> int:
        hold = min(need, free) if need > 0 and free >= least else 0
        hold += max(min(spare, (free - hold) // max(len(self.servers), 1)), 0)
        return max(hold, min(before, spare))

    def _bucket(
        self, key: str, server: str, known: int, rate: int, most: int, left: int, granted: int, *rest: int
    ) -> tuple[int, int]:
        used, *wishes = rest
        level = start = float(most)
        if key in self.buckets:
            before, at, capacity, first = self.buckets[key]
            more = max(self.now - at, 0) * rate / 60_000_000 + most - capacity
            level, start = before + more, min(first + more, most)
        if known not in (0, self.epoch) and left < start:
            level, start = level + left - start, left
        level = min(level, most)
        grants = self.granted.setdefault(server, {})
        granted = grants.get(key, granted)
        hold = self._held(granted - used, math.floor(level + granted - used), *wishes)
        level = min(level + granted - used - hold, most)
        self.buckets[key] = [level, self.now, most, start]
        grants[key] = used + hold
        return used + hold, math.floor(level)

    def _places(self, key: str, server: str, *numbers: int) -> tuple[int, int]:
        _, _, most, _, _, used, *wishes = numbers
        places = self.slots.setdefault(key, {})
        self.slots[key] = places = {each: place for each, place in places.items() if place[1] >= self.now}
        before = places.pop(server, (used, 0))[0] - used
        free = most - used - sum(count for count, _ in places.values())
        hold = self._held(before, free, *wishes)
        if used + hold:
            places[server] = (used + hold, self.now + LEASE_TTL * 1_000_000)
        return used + hold, free - hold


def reply_of(value: Any) -> list[int]:
    """Return a reply of Redis, which is a list of integers."""
    assert isinstance(value, list)
    return [int(each) for each in value]
