"""How many tokens a model makes of a text or an image, before anybody has counted them: from those that were."""

from __future__ import annotations

import math
from typing import Final

from nerite.scheduling.tokens.forecast import Experience

_OF_A_BYTE: Final = 0.5
"""Tokens, as long as nothing is known: more than European languages and less than bytes alone have."""
_SURELY: Final = 0.5
"""Of what is usual, as much is there in any case."""


class TokenRatio:
    """Of one model: tokens for each byte of a text, or for each image."""

    __slots__ = ("_seen", "_unknown")

    def __init__(self, unknown: float = _OF_A_BYTE) -> None:
        """``unknown``: tokens for each, as long as nothing is known."""
        self._unknown = unknown
        self._seen = Experience()

    def note(self, size: int, tokens: int) -> None:
        """Learn from so many bytes, or images, that became so many tokens."""
        if size:
            self._seen.note(tokens / size)

    def expected(self, size: int) -> int:
        """Return how many tokens so many will hardly exceed."""
        each = self._seen.mean + self._seen.deviation if self._seen.enough else self._unknown
        return math.ceil(size * each)

    def least(self, size: int) -> int:
        """Return how many tokens they have in any case."""
        return int(size * self._seen.mean * _SURELY) if self._seen.enough else 0
