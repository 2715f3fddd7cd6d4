"""How many tokens a model makes of a text, before anybody has counted them: from the texts whose tokens were."""

from __future__ import annotations

import math
from typing import Final

from nerite.scheduling.tokens.forecast import Experience

_UNKNOWN: Final = 0.5
"""Tokens for a byte, as long as nothing is known: more than European languages and less than bytes alone have."""
_SURELY: Final = 0.5
"""Of what is usual, as much is there in any case."""


class TokenRatio:
    """Of one model."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen = Experience()

    def note(self, size: int, tokens: int) -> None:
        """Learn from a text of ``size`` bytes that became so many tokens."""
        if size:
            self._seen.note(tokens / size)

    def expected(self, size: int) -> int:
        """Return how many tokens a text will hardly exceed."""
        each = self._seen.mean + self._seen.deviation if self._seen.enough else _UNKNOWN
        return math.ceil(size * each)

    def least(self, size: int) -> int:
        """Return how many tokens it has in any case."""
        return int(size * self._seen.mean * _SURELY) if self._seen.enough else 0
