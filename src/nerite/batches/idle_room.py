"""How many items of a model run at once in capacity that is otherwise idle: learnt from the server's refusals.

A pure decider. The server refuses an item at once if it has no idle room for it, so the number of items under way is
found as TCP finds the bandwidth of a path: it doubles until the first refusal, then grows by one for each round of
answers, and a refusal sets it to what is still under way.
"""

from __future__ import annotations

from typing import Final

_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.5
"""Seconds from a refusal to the next attempt: they double with each refusal in a row."""


class IdleRoom:
    """Decides how many items of one tenant and model may be under way in the server's idle room."""

    def __init__(self, most: int) -> None:
        """``most`` is the maximum number."""
        self._most = most
        self._window = 1.0
        self._doubles = True
        """No item was refused yet."""
        self._pause = _FIRST_PAUSE
        self._rests_until = 0.0
        self._answered = False
        """An item was answered since the last refusal."""
        self.under_way = 0

    @property
    def window(self) -> int:
        """Number of items that may be under way at once."""
        return int(self._window)

    def admits(self, now: float) -> bool:
        """Return whether one more item may begin."""
        return self.under_way < self.window and now >= self._rests_until

    def wakes(self, now: float) -> float | None:
        """Return when the pause after a refusal ends; None if there is none."""
        return self._rests_until if now < self._rests_until else None

    def begun(self) -> None:
        """Record that an item was submitted."""
        self.under_way += 1

    def answered(self) -> None:
        """Record that an item was executed, whatever its answer is."""
        self.under_way -= 1
        self._answered = True
        self._window = min(self._window + (1.0 if self._doubles else 1.0 / self._window), float(self._most))

    def refused(self, now: float, retry_after: float = 0.0) -> None:
        """Record that an item was refused or preempted; the server may name seconds after which to try again."""
        self.under_way -= 1
        self._doubles = False
        self._window = float(max(self.under_way, 1))
        self._pause = _FIRST_PAUSE if self._answered else min(self._pause * 2, _LONGEST_PAUSE)
        self._answered = False
        self._rests_until = max(self._rests_until, now + max(self._pause, min(retry_after, 60.0)))

    def withdrawn(self) -> None:
        """Record that an item was cancelled."""
        self.under_way -= 1
