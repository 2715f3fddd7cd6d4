"""Mistral: ``[TOOL_CALLS]``, and behind it a list of calls, or a name and its arguments."""

from __future__ import annotations

from typing import Final

from nerite.transports.openai.tools.call_reader import JsonReader
from nerite.transports.openai.tools.guided import GuidedCalls
from nerite.transports.openai.tools.parser import Arguments, BrokenCall, Call, Event, new_id
from nerite.transports.openai.tools.waiting import Waiting

_MARKER: Final = "[TOOL_CALLS]"
_BEFORE_ARGUMENTS: Final = "[ARGS]"
_LONGEST_NAME: Final = 256


def mistral_id() -> str:
    """Return an id as Mistral's templates demand it."""
    return new_id(9, "")


class MistralParser:
    """Text, and behind each marker a call or a list of them."""

    def __init__(self) -> None:
        self._waiting = Waiting(_MARKER)
        self._behind: str | None = None
        """What stands behind the marker, until it is clear what that is."""
        self._calls: GuidedCalls | None = None
        self._arguments: JsonReader | None = None

    def feed(self, text: str) -> list[Event]:
        """Take text; return what is certain by now. Raises ``BrokenCall``."""
        events: list[Event] = []
        rest: str | None = text
        while rest:
            if self._calls is not None:
                rest = self._list(self._calls, rest, events)
            elif self._arguments is not None:
                rest = self._object(self._arguments, rest, events)
            elif self._behind is not None:
                self._behind, rest = (self._behind + rest).lstrip(), ""
                rest = self._decide(events)
            else:
                said, rest = self._waiting.feed(rest)
                if said:
                    events.append(said)
                if rest is not None:
                    self._behind = ""
        return events

    def _decide(self, events: list[Event]) -> str:
        """Find out what stands behind the marker; return what is left to look at."""
        behind = self._behind or ""
        if behind.startswith("["):
            self._behind, self._calls = None, GuidedCalls(mistral_id)
            return behind
        name, brace, _ = behind.partition("{")
        if brace:
            self._behind, self._arguments = None, JsonReader()
            name = name.strip().removesuffix(_BEFORE_ARGUMENTS).strip()
            if not name or any(char.isspace() for char in name):
                raise BrokenCall(f"{name!r} is not the name of a function")
            events.append(Call(mistral_id(), name))
            return behind[behind.index("{") :]
        if len(behind) > _LONGEST_NAME:
            self._behind = None
            events.append(_MARKER + behind)
        return ""

    def _list(self, calls: GuidedCalls, text: str, events: list[Event]) -> str:
        at = 0
        while at < len(text):
            at, found = calls.take(text, at)
            events += found
            if calls.done:
                self._calls = None
                self._waiting.drop()
                return text[at:]
        return ""

    def _object(self, arguments: JsonReader, text: str, events: list[Event]) -> str:
        at, passed = arguments.take_all(text)
        events.append(Arguments(passed))
        if not arguments.done:
            return ""
        self._arguments = None
        self._waiting.drop()
        return text[at:]

    def finish(self) -> list[Event]:
        """Return what was held back: there is no more text."""
        text = self._waiting.finish() if self._behind is None else _MARKER + self._behind
        return [text] if text else []
