"""How long to wait before a message is sent again."""

from __future__ import annotations

from random import uniform
from typing import Final

_PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
_SPREAD: Final = 0.2
_LONGEST: Final = 60.0


class Retries:
    """The attempts that one message has: growing pauses, or those that the collector asks for."""

    def __init__(self) -> None:
        self._made = 0

    def after(self, wanted: float | None) -> float | None:
        """Return the seconds until the next attempt, None if there is none; ``wanted`` is what the collector said."""
        if self._made == len(_PAUSES):
            return None
        pause = _PAUSES[self._made]
        self._made += 1
        if wanted is not None:
            return min(wanted, _LONGEST)
        return pause * uniform(1 - _SPREAD, 1 + _SPREAD)  # servers that lost a collector together come back apart
