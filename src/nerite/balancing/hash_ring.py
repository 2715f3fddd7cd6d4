"""Consistent hashing: an order of members for each key, which routers have in common without talking to each other.

A member that comes or goes changes the order only of the keys that it wins or loses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Final, TypeVar

_POINTS: Final = 64
"""Points of a member with a capacity of 1: the shares of keys differ by about an eighth."""
_DIGEST: Final = 64
_SIZE: Final = 4
"""Bytes of a digest, and of a point."""
_SPREAD: Final = 0x9E3779B1
"""An odd number: spreads keys that are close to each other."""
_MASK: Final = 2**32 - 1

VALUE = TypeVar("VALUE")


class HashRing:
    """Members by points on a ring."""

    def __init__(self, capacities: Mapping[str, float]) -> None:
        """Take the names of the members, with their capacities."""
        points = []
        for name, capacity in capacities.items():
            count = max(1, round(_POINTS * min(capacity, 16.0)))
            for start in range(0, count, _DIGEST // _SIZE):
                digest = blake2b(f"{start} {name}".encode(), digest_size=_DIGEST).digest()
                for number in range(min(count - start, _DIGEST // _SIZE)):
                    points.append((int.from_bytes(digest[_SIZE * number : _SIZE * (number + 1)]), name))
        points.sort()
        self._points = [point for point, _ in points]
        self._names = [name for _, name in points]

    def walk(self, key: int, among: Mapping[str, VALUE]) -> Iterator[VALUE]:
        """Yield the values of those members that are in ``among``, in the order of a key."""
        names = self._names
        start = bisect_left(self._points, (key * _SPREAD) & _MASK)
        seen = set()
        for place in range(start, start + len(names)):
            name = names[place % len(names)]
            if name not in seen:
                seen.add(name)
                if name in among:
                    yield among[name]
