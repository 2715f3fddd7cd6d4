"""Why sequences are over that did not end by themselves: for the error that their next request gets."""

from __future__ import annotations

from typing import Final

MOST: Final = 4096
"""Sequences remembered: the last ones."""


class EndedSequences:
    """Reasons by correlation id."""

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: dict[int | str, str] = {}

    def add(self, sequence_id: int | str, why: str) -> None:
        """Remember why a sequence is over."""
        self._reasons[sequence_id] = why
        if len(self._reasons) > MOST:
            del self._reasons[next(iter(self._reasons))]

    def forget(self, sequence_id: int | str) -> None:
        """Forget a sequence, because another one with its id begins."""
        self._reasons.pop(sequence_id, None)

    def why(self, sequence_id: int | str) -> str | None:
        """Return why a sequence is over, if it is known."""
        return self._reasons.get(sequence_id)
