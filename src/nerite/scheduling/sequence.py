"""A sequence: requests that belong together, and what one leaves for the next."""

from __future__ import annotations

from typing import Any


class Sequence:
    """One sequence that is alive."""

    __slots__ = ("id", "state")

    def __init__(self, id: int | str) -> None:
        self.id = id
        self.state: Any = None
        """What the last request left for the next; belongs to ``execution/sequence_dress.py``."""
