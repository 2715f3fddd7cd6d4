"""Llama 3: the whole answer is ``{"name": …, "parameters": …}``, or several behind semicolons, or it is text.

``<|python_tag|>`` may stand before it.
"""

from __future__ import annotations

from typing import Final

from nerite.transports.openai.tools.parser import Event, new_id
from nerite.transports.openai.tools.waiting import MOST_SPACE, Attempt, Waiting

_TAG: Final = "<|python_tag|>"


class Llama3Parser:
    """An object at the beginning, behind the tag or behind another call is a call if it looks like one."""

    def __init__(self) -> None:
        self._waiting = Waiting(_TAG)
        self._attempt: Attempt | None = None
        self._fresh = True
        """A call may begin here."""
        self._called = False
        self._space = ""
        """What stood between here and the call before."""

    def feed(self, text: str) -> list[Event]:
        """Take text; return what is certain by now. Raises ``BrokenCall``."""
        events: list[Event] = []
        rest: str | None = text
        while rest:
            if self._attempt is not None:
                rest = self._attempt.feed(rest, events)
                if self._attempt.over:
                    self._fresh = self._called = not self._attempt.failed
                    self._attempt = None
            elif self._fresh:
                rest = self._begin(rest)
            else:
                said, rest = self._waiting.feed(rest)
                if said:
                    events.append(said)
                self._fresh = rest is not None
        return events

    def _begin(self, text: str) -> str:
        """Look at where a call may begin; return what is left to look at."""
        stripped = text.lstrip(" \t\r\n;" if self._called else " \t\r\n")
        if not self._called:
            self._space += text[: len(text) - len(stripped)]
        if not stripped and len(self._space) <= MOST_SPACE:
            return ""
        before, self._space, self._fresh = self._space, "", False
        if stripped.startswith("{"):
            self._attempt = Attempt("" if self._called else before, new_id, strict=True)
            return stripped
        if self._called:
            self._waiting.drop()
        return stripped if self._called else before + stripped

    def finish(self) -> list[Event]:
        """Return what was held back: there is no more text."""
        if self._attempt is not None:
            return self._attempt.finish()
        text = ("" if self._called else self._space) + self._waiting.finish()
        return [text] if text else []
