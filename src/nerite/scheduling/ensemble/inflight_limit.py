"""How many requests of one step may be under way at once, over all requests to the ensemble."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

GIVES_WAY_NS: Final = 300 * 1_000_000_000
"""Who waits longer than this begins all the same, as with Triton: a model that hangs must not hang the ensemble."""

_T = TypeVar("_T")


class InflightLimit(Generic[_T]):
    """Those who want to begin wait here, first come first served, while the step has as much to do as it may have."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._under_way = 0
        self._waiting: deque[tuple[_T, int]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(self, who: _T, now: int) -> bool:
        """Return whether ``who`` may begin now; if not, it waits."""
        if self._under_way < self._most and not self._waiting:
            self._under_way += 1
            return True
        self._waiting.append((who, now))
        return False

    def leave(self) -> _T | None:
        """Note that one is done; return who begins in its place."""
        self._under_way -= 1
        if self._waiting and self._under_way < self._most:
            return self._begin()
        return None

    def overdue(self, now: int) -> list[_T]:
        """Return those who waited too long: they begin now."""
        late = []
        while self._waiting and self._waiting[0][1] + GIVES_WAY_NS <= now:
            late.append(self._begin())
        return late

    def wake_at(self) -> int | None:
        """Return when to ask for ``overdue``; None while nobody waits."""
        return self._waiting[0][1] + GIVES_WAY_NS if self._waiting else None

    def withdraw(self, gave_up: Callable[[_T], bool]) -> None:
        """Let those wait no longer who gave up."""
        self._waiting = deque(entry for entry in self._waiting if not gave_up(entry[0]))

    def _begin(self) -> _T:
        who, _ = self._waiting.popleft()
        self._under_way += 1
        return who
