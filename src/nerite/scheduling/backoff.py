"""How long to wait before something that failed is tried again. A pure decider: it is told the time."""

from __future__ import annotations


class Backoff:
    """Doubles the wait with each failure; begins again after a while without one. Times in seconds."""

    __slots__ = ("_failures", "_last", "first", "limit", "quiet")

    def __init__(self, first: float = 0.1, limit: float = 30.0, quiet: float = 60.0) -> None:
        self.first = first
        self.limit = limit
        self.quiet = quiet
        self._failures = 0
        self._last = 0.0

    def failed(self, now: float) -> float:
        """Note a failure; return how long to wait. The first one in a while is worth a try at once."""
        if self._failures and now - self._last > self.quiet:
            self._failures = 0
        self._last = now
        self._failures += 1
        if self._failures == 1:
            return 0.0
        # 2 to the thousandth is beyond a float; a limit is reached long before 2 to the hundredth.
        return min(self.limit, self.first * 2.0 ** min(self._failures - 2, 100))
