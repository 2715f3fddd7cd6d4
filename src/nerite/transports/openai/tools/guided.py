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
        arguments = ""
        for char in text:
            if self._json.done:
                break
            if not self._json.depth:
                if char.isspace():
                    continue
                if char != "{":
                    raise BrokenCall(f"{char!r} where an object should be")
                events.append(Call(self._new_id(), self._name))
            arguments += self._json.feed(char)
        if arguments:
            events.append(Arguments(arguments))
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
        for char in text:
            events += self.feed_one(char)
        return events

    def feed_one(self, char: str) -> list[Event]:
        """Take a character."""
        if self._call is not None:
            events = self._call.feed(char)
            if self._call.done:
                self._call = None
            return events
        if self.done or char.isspace() or (char == "," and self._open):
            return []
        if char == "[" and not self._open:
            self._open = True
        elif char == "]" and self._open:
            self.done = True
        elif char == "{" and self._open:
            self._call = CallReader(self._new_id)
            return self._call.feed(char)
        else:
            raise BrokenCall(f"{char!r} where a list of calls should be")
        return []

    def finish(self) -> list[Event]:
        """Return nothing: what began and has no name yet is not worth telling."""
        return []
