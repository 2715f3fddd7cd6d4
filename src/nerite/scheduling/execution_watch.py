"""When an execution lasts so long that somebody may ask what it is at: a decider without a clock.

Some models compute for minutes, and that is no news. So what counts as long is learned: an execution is told once it
has taken longer than ``limit``, and more than twice as long as the longest that came to an end before it.
"""

from __future__ import annotations

_LONGER = 2


class ExecutionWatch:
    """Over the executions of one instance, looked at from time to time. Times are seconds."""

    __slots__ = ("_begun", "_last", "_limit", "_longest", "_number", "_told")

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._number: int | None = None
        """Of the execution that was under way when somebody last looked."""
        self._begun = self._last = 0.0
        """When that was seen for the first time, and for the last."""
        self._longest = 0.0
        self._told = False

    def look(self, number: int | None, now: float) -> float | None:
        """Return how long the execution ``number`` has lasted at least, if that is to be told now: once for each.

        ``number`` is None while nothing is executed; no two executions in a row have the same.
        """
        if number != self._number:
            if self._number is not None:
                self._longest = max(self._longest, self._last - self._begun)
            self._number, self._begun, self._told = number, now, False
        self._last = now
        lasted = now - self._begun
        if number is None or self._told or lasted < max(self._limit, _LONGER * self._longest):
            return None
        self._told = True
        return lasted
