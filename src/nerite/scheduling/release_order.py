"""Answers in the order of the questions (``preserve_ordering``), however the instances finish."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class ReleaseOrder(Generic[Answer]):
    """Keeps an answer back until everyone who began before has theirs."""

    __slots__ = ("_first", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[list[Answer]] = deque()
        self._first = 0

    def begin(self) -> int:
        """Take a place in the order; return its number."""
        self._waiting.append([])
        return self._first + len(self._waiting) - 1

    def finish(self, place: int, answer: Answer) -> list[Answer]:
        """Note the answer of ``place``; return the answers that may leave now, in order."""
        self._waiting[place - self._first].append(answer)
        released: list[Answer] = []
        while self._waiting and self._waiting[0]:
            released += self._waiting.popleft()
            self._first += 1
        return released
