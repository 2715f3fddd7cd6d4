"""What a cache is to those who ask it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from nerite.core.response import InferenceResponse
from nerite.observability.exposition import Family

Found: TypeAlias = Callable[[InferenceResponse | None], None]
"""Called once, on the loop's thread, with what is kept under a key: None if that is nothing."""


class ResponseCache(Protocol):
    """Keeps responses under keys. For the loop's thread only."""

    shared: bool
    """Other servers ask it, too: keys have to say what a model was made from, not when it was loaded."""

    def lookup(self, key: bytes, found: Found) -> None:
        """Look for a response; ``found`` is called before this returns, or when another machine has answered."""

    def insert(self, key: bytes, response: InferenceResponse) -> None:
        """Keep a response that succeeded: its bytes are copied. What cannot be kept is said in the log."""

    def families(self) -> list[Family]:
        """Return the cache's own metrics."""

    def close(self) -> None:
        """Give back what it holds outside this process."""
