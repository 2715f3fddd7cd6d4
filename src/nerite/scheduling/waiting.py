"""Who waits for whom, and whether anything can come of it. Pure.

A request that a model sends to another model waits for an instance of that; while instances wait in their turn for
answers, they may all wait for each other, and for ever. Then every way leads to somebody who waits. Where one way leads
to an instance that is free, or at work by itself, that will be free sooner or later: no reason to worry.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Waiting = TypeVar("Waiting", bound=Hashable)


def deadlocked(start: Waiting, ways: Callable[[Waiting], Sequence[Waiting]]) -> list[Waiting]:
    """Return all that wait for ever if ``start`` does, with ``start`` in front; else nothing.

    ``ways`` says what somebody waits for: any of these will do, and none means that the wait ends by itself.
    """
    waiting: dict[Waiting, None] = {}
    ahead = [start]
    while ahead:
        each = ahead.pop()
        if each not in waiting:
            further = ways(each)
            if not further:
                return []
            waiting[each] = None
            ahead += further
    return list(waiting)


def ring(start: Waiting, ways: Callable[[Waiting], Sequence[Waiting]]) -> list[Waiting]:
    """Return some that wait each for the next, the last one for one that is in the list before it.

    ``start`` waits for ever, as ``deadlocked`` has found.
    """
    chain: dict[Waiting, None] = {}
    while start not in chain:
        chain[start] = None
        start = ways(start)[0]
    return [*chain, start]
