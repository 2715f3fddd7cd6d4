"""From tokens to text, a step at a time. Pure: whoever calls decodes.

A token need not be a whole character, and what it looks like may depend on the one before. So text is decoded from a
few tokens back on, and only what is new is handed out. What may be the start of a stop string waits until it is clear
whether it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_LONGEST: Final = 32
"""Tokens that are decoded again with each new one."""
_KEPT: Final = 6
"""Tokens to begin with, so that the first new one looks as it would after all that came before."""
_HALF: Final = "\ufffd"
"""What stands for a byte that is no character, or not yet."""
_HALVES: Final = 3
"""So many may become one character with the next token."""


class TextStream:
    """The text of one sequence."""

    def __init__(self, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0) -> None:
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._count = 0
        self._given = 0
        """Characters of the window's text that have been handed on."""
        self._held = ""
        """What may be the start of a stop string."""
        self.window: list[int] = []
        """The tokens to decode for ``take``."""
        self.stopped = False
        """A stop string has come; nothing is taken after it."""

    def add(self, tokens: Sequence[int]) -> None:
        """Take new tokens; their text is due with ``take``."""
        self._count += len(tokens)
        self.window.extend(tokens)

    def take(self, decoded: str, decode: Callable[[Sequence[int]], str], *, last: bool = False) -> str:
        """Return what is new and clear, given the text of ``window``. ``last``: no more tokens come."""
        clear = len(decoded) - (0 if last else _halves(decoded))
        self._held += decoded[self._given : clear]
        self._given = max(clear, self._given)
        # Not in the middle of a character, which would look otherwise without its beginning.
        if len(self.window) > _LONGEST and not _halves(decoded):
            self.window = self.window[-_KEPT:]
            again = decode(self.window)
            self._given = len(again) - _halves(again)
        return self._clear(last)

    def _clear(self, last: bool) -> str:
        if self._stop and self._count > self._min_tokens:
            found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
            if found:
                at, stop = min(found)
                text, self._held = self._held[: at + len(stop) * self._include_stop], ""
                self.stopped = True
                return text
        waits = 0 if last else self._start_of_stop()
        clear = len(self._held) - waits
        text, self._held = self._held[:clear], self._held[clear:]
        return text

    def _start_of_stop(self) -> int:
        """Return how many characters at the end may be the start of a stop string."""
        held, longest = self._held, 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(held)), longest, -1):
                if held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _halves(text: str) -> int:
    """Return how many characters at the end the next token may change."""
    return min(len(text) - len(text.rstrip(_HALF)), _HALVES)
