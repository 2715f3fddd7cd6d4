"""Which members hold what, in bounded memory: beginnings of prompts, sessions and LoRA adapters, by their hashes.

The least recently used keys are forgotten first. A key has at most eight holders, the newest of them; a *ticket* is the
number of a member's process, so what a lost or restarted member held is forgotten by no longer knowing its ticket.
Keys are divided over shards, so that a dictionary that grows or shrinks never keeps a request waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

ENTRY: Final = 320
"""Bytes that a key with its holders takes at most, measured."""
MOST_HOLDERS: Final = 8
_SHARDS: Final = 64
_MASK: Final = _SHARDS - 1


class HolderIndex:
    """Holders of keys, by ticket."""

    def __init__(self, limit: int) -> None:
        """``limit`` is in bytes."""
        self._most = max(1, limit // ENTRY // _SHARDS)
        self._shards = [OrderedDict[int, tuple[int, ...]]() for _ in range(_SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    @property
    def used(self) -> int:
        """Bytes in use, estimated from above."""
        return len(self) * ENTRY

    def holders(self, key: int) -> tuple[int, ...]:
        """Return the tickets of the members that hold a key, the newest first."""
        return self._shards[key & _MASK].get(key, ())

    def deepest(self, keys: Sequence[int]) -> int:
        """Return the place of the last key that anybody holds, or -1.

        ``keys`` go from the shortest beginning to the longest: who holds one holds those before it.
        """
        shards = self._shards
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) >> 1
            key = keys[middle]
            if key in shards[key & _MASK]:
                low = middle + 1
            else:
                high = middle
        return low - 1

    def held(self, keys: Sequence[int], ticket: int) -> int:
        """Return the place of the last key that this member holds, or -1."""
        place = self.deepest(keys)
        while place >= 0 and ticket not in self.holders(keys[place]):
            place -= 1
        return place

    def add(self, keys: Sequence[int], ticket: int) -> None:
        """Note that a member holds these keys from now on."""
        shards = self._shards
        fresh = (ticket,)
        for key in keys:
            shard = shards[key & _MASK]
            known = shard.get(key)
            if known is None:
                shard[key] = fresh
                if len(shard) > self._most:
                    shard.popitem(last=False)
            else:
                shard.move_to_end(key)
                if known[0] != ticket:
                    shard[key] = (ticket, *[each for each in known if each != ticket][: MOST_HOLDERS - 1])

    def move(self, key: int, ticket: int) -> None:
        """Note that a member alone holds a key from now on."""
        shard = self._shards[key & _MASK]
        shard[key] = (ticket,)
        shard.move_to_end(key)
        if len(shard) > self._most:
            shard.popitem(last=False)
