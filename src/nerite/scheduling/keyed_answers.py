"""Which answers are kept for who asks once more with the same key, and for how long.

An answer is there from the first question on. While somebody follows it, it goes on; when the last one is gone, it goes
on for a time of grace, and so long it is kept when it is complete. Somebody who asks the same with its key within that
time follows it, too. Who asks something else with its key is told so.

What is kept is bounded: of complete answers the oldest go first. An answer under way that is too long by itself is
given up: whoever follows it goes on, and nobody joins them any more.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

from nerite.scheduling.tokens.policy import KeepLimits

_SPARE: Final = 64
"""Ends of times of grace that count no more, which are kept beside as many as there are answers."""


class KeyedAnswer:
    """One answer. ``KeyedAnswers`` keeps the books on it, others read."""

    __slots__ = ("complete", "following", "kept", "key", "question", "size", "until")

    def __init__(self, key: Hashable, question: object) -> None:
        self.key = key
        self.question = question
        """Equal for those who ask the same."""
        self.following = 0
        """How many get it."""
        self.complete = False
        self.kept = False
        """Others may still join."""
        self.size = 0
        """Bytes of it that are kept."""
        self.until: int | None = None
        """The end of its grace; None while somebody follows what is not complete."""


A = TypeVar("A", bound=KeyedAnswer)


class KeyedAnswers(Generic[A]):
    """Those of a server."""

    def __init__(self, limits: KeepLimits) -> None:
        self.limits = limits
        self.size = 0
        """Bytes that are kept."""
        self._kept: dict[Hashable, A] = {}
        self._complete: dict[Hashable, A] = {}
        """Of those, the complete ones; the oldest first."""
        self._ends: list[tuple[int, int, Hashable]] = []
        """When times of grace end. An entry does not count whose answer has another by now."""
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[A]:
        return iter(self._kept.values())

    def ask(self, answer: A) -> A | None:
        """Return what is followed by somebody who asks for ``answer``: it, if it is new, or one from before.

        None: its key is that of another question.
        """
        found = self._kept.setdefault(answer.key, answer)
        if found.question != answer.question:
            return None
        found.kept = True
        found.following += 1
        if not found.complete:
            found.until = None
        return found

    def left(self, answer: A, now: int) -> bool:
        """Note that one is gone who followed; return whether the answer is to be stopped."""
        answer.following -= 1
        if answer.following or answer.complete:
            return False
        if not answer.kept or not self.limits.grace_ns:
            self.give_up(answer)
            return True
        self._grant(answer, now)
        return False

    def grew(self, answer: A, size: int) -> None:
        """Note that an answer has so many bytes more. It may be given up for that."""
        if not answer.kept:
            return
        answer.size += size
        self.size += size
        self._make_room()
        if self.size > self.limits.max_bytes:
            self.give_up(answer)

    def ended(self, answer: A, now: int, *, failed: bool) -> None:
        """Note that nothing more comes. What ``failed`` is no answer: who asks once more has it tried again."""
        answer.complete = True
        if not answer.kept:
            return
        if failed or not self.limits.grace_ns:
            self.give_up(answer)
            return
        self._complete[answer.key] = answer
        self._grant(answer, now)
        self._make_room()

    def give_up(self, answer: A) -> None:
        """Have nobody join any more: the next one with its key begins anew."""
        if answer.kept:
            answer.kept = False
            self.size -= answer.size
            del self._kept[answer.key]
            self._complete.pop(answer.key, None)

    def due(self, now: int) -> list[A]:
        """Forget what nobody came back for in time; return what of that is under way, and is to be stopped."""
        stopped = []
        while self._ends and self._ends[0][0] <= now:
            at, _, key = heapq.heappop(self._ends)
            answer = self._kept.get(key)
            if answer is not None and answer.until == at:
                self.give_up(answer)
                if not answer.complete:
                    stopped.append(answer)
        return stopped

    def next_time(self) -> int | None:
        """Return when to ask ``due``; None: not before something else happens."""
        return self._ends[0][0] if self._ends else None

    def follow(self, limits: KeepLimits) -> None:
        """Go on by other limits. A time of grace that has begun stays as it is."""
        self.limits = limits
        self._make_room()

    def _grant(self, answer: A, now: int) -> None:
        answer.until = now + self.limits.grace_ns
        heapq.heappush(self._ends, (answer.until, next(self._numbers), answer.key))
        if len(self._ends) > 2 * len(self._kept) + _SPARE:
            self._ends = [end for end in self._ends if (kept := self._kept.get(end[2])) and kept.until == end[0]]
            heapq.heapify(self._ends)

    def _make_room(self) -> None:
        """Forget complete answers, the oldest first, until the rest is not too much."""
        while self._complete and (len(self._complete) > self.limits.max_answers or self.size > self.limits.max_bytes):
            self.give_up(next(iter(self._complete.values())))
