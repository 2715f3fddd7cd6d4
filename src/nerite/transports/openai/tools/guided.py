"""Calls that the model has no choice but to write: its text is held to their schema, and is nothing else."""

from __future__ import annotations

from collections.abc import Callable

from nerite.transports.openai.tools.call_reader import CallReader, JsonReader
from nerite.transports.openai.tools.parser import Arguments, BrokenCall, Call, Event


class GuidedCall:
    """The text is the arguments of one function."""

    def __init__(self, name: str, new_id: Callable[[], str]) -> None:
        self._name = name
        self._new_id = new_id
        self._json = JsonReader()

    def feed(self, text: str) -> list[Event]:
        """Take text; return what is certain by now. Raises ``BrokenCall``."""
        events: list[Event] = []
        if not self._json.done and not self._json.depth:
            text = text.lstrip()
            if text and text[0] != "{":
                raise BrokenCall(f"{text[0]!r} where an object should be")
            if text:
                events.append(Call(self._new_id(), self._name))
        if text and not self._json.done:
            events.append(Arguments(self._json.take_all(text)[1]))
        return events

    def finish(self) -> list[Event]:
        """Return nothing: nothing is held back."""
        return []


class GuidedCalls:
    """The text is a list of calls."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._call: CallReader | None = None
        self._open = False
        self.done = False
        """The list is complete."""

    def feed(self, text: str) -> list[Event]:
        """Take text; return what is certain by now. Raises ``BrokenCall``."""
        events: list[Event] = []
        at = 0
        while at < len(text):
            at, found = self.take(text, at)
            events += found
        return events

    def take(self, text: str, at: int) -> tuple[int, list[Event]]:
        """Take what stands in ``text`` at ``at``; return where the rest begins, and what is certain by now."""
        if self._call is not None:
            taken = self._call.take(text, at)
            if self._call.done:
                self._call = None
            return taken
        char = text[at]
        if self.done or char.isspace() or (char == "," and self._open):
            return at + 1, []
        if char == "[" and not self._open:
            self._open = True
        elif char == "]" and self._open:
            self.done = True
        elif char == "{" and self._open:
            self._call = CallReader(self._new_id)
            return self._call.take(text, at)
        else:
            raise BrokenCall(f"{char!r} where a list of calls should be")
        return at + 1, []

    def finish(self) -> list[Event]:
        """Return nothing: what began and has no name yet is not worth telling."""
        return []
