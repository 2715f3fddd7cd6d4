"""What parsers of tool calls have in common: the events that they make of text, and waiting for a marker."""

from __future__ import annotations

import secrets
import string
from itertools import groupby
from typing import Final, NamedTuple, Protocol, TypeAlias

_LETTERS: Final = string.ascii_letters + string.digits


class Call(NamedTuple):
    """A call begins. Its arguments follow."""

    id: str
    name: str


class Arguments(NamedTuple):
    """A part of the arguments of the call that began last. The parts, joined, are a JSON object."""

    text: str


Event: TypeAlias = str | Call | Arguments
"""A string is text that is no call."""


class BrokenCall(Exception):
    """A call that was begun cannot be ended: what the model writes is not JSON."""


class ToolParser(Protocol):
    """Reads the text of one choice. Each is used once."""

    def feed(self, text: str) -> list[Event]:
        """Take text; return what is certain by now. Raises ``BrokenCall``."""

    def finish(self) -> list[Event]:
        """Return what was held back: there is no more text."""


def new_id(length: int = 24, prefix: str = "call_") -> str:
    """Return an id for a call."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(length))


def held(text: str, marker: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``marker``."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


def joined(events: list[Event]) -> list[Event]:
    """Return the same with text next to text, and arguments next to arguments, in one piece."""
    whole: list[Event] = []
    for kind, alike in groupby(events, type):
        if kind is str:
            whole.append("".join(alike))  # type: ignore[arg-type]  # of this kind
        elif kind is Arguments:
            whole.append(Arguments("".join(each.text for each in alike)))  # type: ignore[union-attr]
        else:
            whole += alike
    return whole
