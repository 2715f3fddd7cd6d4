"""How many tokens images become. The pipeline tells when an answer is complete; it is remembered by their size."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, TypeAlias

from nerite.backends.llm.demand import IMAGE_TOKENS

Size: TypeAlias = tuple[int, int]
"""Height and width."""

_MOST: Final = 4096
"""Sizes that are remembered."""


class ImageTokens:
    """Of one model. For the engine's thread alone."""

    def __init__(self) -> None:
        self._known: dict[Size, int] = {}

    def of(self, sizes: Collection[Size]) -> int:
        """Return how many tokens images of these sizes become; one of an unknown size as many as the largest so far."""
        largest = max(self._known.values(), default=IMAGE_TOKENS)
        return sum(self._known.get(size, largest) for size in sizes)

    def learn(self, sizes: Collection[Size], tokens: int) -> None:
        """Note that images became so many tokens. Of several sizes nobody can say which had how many."""
        if len(set(sizes)) != 1:
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        (size,) = set(sizes)
        self._known[size] = -(-tokens // len(sizes))
