"""Learns how long a member takes from the moment it is wanted until it can take requests."""

from __future__ import annotations

from collections import deque
from typing import Final

_WEIGHT: Final = 0.3
"""Of the newest start in the average."""
_LONGEST: Final = 1800.0
"""Seconds after which a member that is wanted is not expected any more."""


class StartTimes:
    """Compares when members were wanted with when there were as many."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """That a start takes; 0: not known yet."""
        self._wanted: deque[float] = deque()
        """When each member that is not there yet was wanted."""
        self._ready: int | None = None

    @property
    def starting(self) -> int:
        """Number of members that are expected."""
        return len(self._wanted)

    def wanted(self, more: int, now: float) -> None:
        """Note that so many more members are wanted than before; fewer if negative."""
        for _ in range(more):
            self._wanted.append(now)
        for _ in range(min(-more, len(self._wanted))):
            self._wanted.pop()

    def observe(self, ready: int, now: float) -> None:
        """Note how many members are ready."""
        while self._wanted and now - self._wanted[0] > _LONGEST:
            self._wanted.popleft()
        for _ in range(ready - (ready if self._ready is None else self._ready)):
            if self._wanted:
                took = now - self._wanted.popleft()
                self.seconds += (_WEIGHT if self.seconds else 1.0) * (took - self.seconds)
        self._ready = ready
