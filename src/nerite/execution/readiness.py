"""Whether all of several can serve, each of which answers in its own time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

Answered: TypeAlias = Callable[[bool], None]


def ask_all(asked: Collection[Callable[[Answered], None]], answered: Answered) -> None:
    """Ask them side by side, and answer once, when the last has: True if all can, or if there are none."""
    waiting = len(asked)
    ready = True

    def one(answer: bool) -> None:
        nonlocal waiting, ready
        waiting -= 1
        ready = ready and answer
        if waiting == 0:
            answered(ready)

    if not asked:
        answered(True)
    for ask in asked:
        ask(one)
