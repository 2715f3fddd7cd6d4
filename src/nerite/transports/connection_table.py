"""Which connections are open, and which of them are closed to make room or as unused: a decider without a clock."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol

_LOOK_AGAIN: Final = 1.0
"""Seconds after which a full table looks once more for connections that have become idle."""


class Listed(Protocol):
    """A connection, as the table sees it."""

    @property
    def busy(self) -> bool:
        """Whether a request is being received or answered."""

    @property
    def served(self) -> int:
        """A number that changes with each request."""

    def retire(self) -> None:
        """Close, as nothing is under way."""


class ConnectionTable:
    """Those of all ports. A connection costs nothing here while it is used: idle ones are found by looking."""

    def __init__(self, limit: int, idle_seconds: float) -> None:
        """0 is no limit."""
        self.limit = limit
        self._idle_seconds = idle_seconds
        self._noted: dict[Listed, tuple[int, float]] = {}
        """What each had served, and since when it has not served more."""
        self._idle: OrderedDict[Listed, int] = OrderedDict()
        """The longest idle first, with what they had served. Those that were used meanwhile are in it still."""
        self._looked_at = float("-inf")

    def __len__(self) -> int:
        return len(self._noted)

    @property
    def full(self) -> bool:
        """Whether one more would be too many."""
        return 0 < self.limit <= len(self._noted)

    def add(self, connection: Listed, now: float) -> None:
        """Note that a connection was accepted."""
        self._noted[connection] = (connection.served, now)
        self._idle[connection] = connection.served

    def remove(self, connection: Listed) -> None:
        """Note that a connection is closed. It may have been removed before."""
        self._noted.pop(connection, None)
        self._idle.pop(connection, None)

    def make_room(self, now: float) -> Listed | None:
        """Remove the connection that has been idle longest, and return it to be closed; None if all are busy."""
        found = self._longest_idle()
        if found is None and now - self._looked_at >= _LOOK_AGAIN:
            self._look(now)
            found = self._longest_idle()
        return found

    def idle(self, now: float) -> list[Listed]:
        """Remove the connections that have been idle for too long, and return them to be closed."""
        self._look(now)
        found = []
        if self._idle_seconds:
            for connection in self._idle:
                if now - self._noted[connection][1] < self._idle_seconds:
                    break
                found.append(connection)
            for connection in found:
                self.remove(connection)
        return found

    def _longest_idle(self) -> Listed | None:
        while self._idle:
            connection, served = self._idle.popitem(last=False)
            if connection.served == served and not connection.busy:
                self.remove(connection)
                return connection
        return None

    def _look(self, now: float) -> None:
        """Put those that are idle in order."""
        self._looked_at = now
        idle: list[tuple[float, int, Listed]] = []
        for number, (connection, (served, since)) in enumerate(self._noted.items()):
            if connection.busy or connection.served != served:
                self._noted[connection] = (connection.served, now)
            else:
                idle.append((since, number, connection))
        idle.sort()
        self._idle = OrderedDict((connection, connection.served) for _, _, connection in idle)
