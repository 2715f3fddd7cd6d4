"""Building blocks of tool call parsers: events, an incremental JSON reader, and the search for a marker in text."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import orjson

_LETTERS: Final = string.ascii_letters + string.digits


class ToolCall(NamedTuple):
    """Start of a tool call, whose arguments follow."""

    id: str
    name: str


class ToolArguments(NamedTuple):
    """A part of the arguments of the latest call. The joined parts are a JSON object."""

    text: str


class ReasoningText(NamedTuple):
    """A part of what the model thinks before it answers."""

    text: str


Event: TypeAlias = str | ReasoningText | ToolCall | ToolArguments
"""A string is text outside of thoughts and tool calls."""


class BrokenCall(Exception):
    """The model began a tool call but did not continue it with valid JSON."""


class ToolParser(Protocol):
    """Incremental parser for the text of one choice. Each is used once."""

    def feed(self, text: str) -> list[Event]:
        """Parse more text; return the events that are certain. Raises ``BrokenCall``."""

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text."""


def new_id(length: int = 24, prefix: str = "call_") -> str:
    """Return a random id for a call."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(length))


def held(text: str, marker: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``marker``."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


def joined_calls(events: list[Event]) -> list[Event]:
    """Return events with adjacent texts, thoughts and arguments merged."""
    whole: list[Event] = []
    for kind, alike in groupby(events, type):
        if kind is str:
            whole.append("".join(alike))  # type: ignore[arg-type]  # all are strings
        elif kind is ReasoningText or kind is ToolArguments:
            whole.append(kind("".join(each.text for each in alike)))  # type: ignore[union-attr]
        else:
            whole += alike
    return whole


# Incremental reading of JSON and of the JSON object that is a tool call

_SPACE: Final = " \t\r\n"
_SCALAR: Final = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
"""A run of ordinary characters in a string."""
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_ESCAPED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ARGUMENTS: Final = ("arguments", "parameters")
_NAMES: Final = ("name", "tool_name")
_PASSED: Final = "…"
"""Stands for a value that is passed on and not kept."""


class JsonReader:
    """Validates a JSON object or list incrementally, at any nesting depth."""

    __slots__ = ("_escape", "_expected", "_open", "_scalar", "_string", "done", "key_ended")

    def __init__(self) -> None:
        self._open: list[str] = []
        """Open brackets."""
        self._expected = "value"
        """Expected token outside of strings: ``value``, ``first`` (a value or the end), ``key``, ``first key``, ``:``
        or ``,``."""
        self._string = ""
        """``key`` or ``value`` within a string."""
        self._escape = 0
        """Remaining characters of an escape; negative: the character that selects the escape is next."""
        self._scalar = ""
        self.done = False
        self.key_ended = False
        """Whether the last character ended a key."""

    @property
    def depth(self) -> int:
        """The number of open brackets."""
        return len(self._open)

    @property
    def between(self) -> bool:
        """Whether the position is outside of strings and scalars."""
        return not self._string and not self._scalar

    def take(self, text: str, at: int) -> tuple[int, str]:
        """Consume a run of ordinary characters of a string, or otherwise the character at ``at``.

        Return the new position and the consumed text as valid JSON. Raises ``BrokenCall``.
        """
        if self._string and not self._escape:
            plain = _PLAIN.match(text, at)
            if plain is not None:
                self.key_ended = False
                return plain.end(), plain[0]
        return at + 1, self._feed(text[at])

    def take_all(self, text: str) -> tuple[int, str]:
        """Consume all that belongs to the value; return as ``take`` does."""
        at = 0
        taken: list[str] = []
        while at < len(text) and not self.done:
            at, some = self.take(text, at)
            taken.append(some)
        return at, "".join(taken)

    def _feed(self, char: str) -> str:
        """Consume a character; return it as valid JSON."""
        self.key_ended = False
        if self._string:
            return self._in_string(char)
        if self._scalar:
            if char not in ",]}" and char not in _SPACE:
                self._scalar += char
                if len(self._scalar) > 400:
                    raise BrokenCall(f"{self._scalar[:20]}… is not a value")
                return char
            self._end_scalar()
        if char in _SPACE:
            return char
        self._token(char)
        return char

    def _in_string(self, char: str) -> str:
        if self._escape < 0:
            if char not in '"\\/bfnrtu':
                raise BrokenCall(f"\\{char} is not an escape")
            self._escape = 4 if char == "u" else 0
        elif self._escape:
            if char not in _HEX:
                raise BrokenCall(f"{char!r} in an escape")
            self._escape -= 1
        elif char == "\\":
            self._escape = -1
        elif char == '"':
            self.key_ended = self._string == "key"
            self._string = ""
            if self.key_ended:
                self._expected = ":"
            else:
                self._value_ended()
        elif char < " ":
            # Models write line breaks into strings, which JSON requires to be escaped.
            return _ESCAPED.get(char) or f"\\u{ord(char):04x}"
        return char

    def _token(self, char: str) -> None:
        wants = self._expected
        if wants in (":", ","):
            self._separator(char)
        elif char == '"':
            self._string = "key" if wants.endswith("key") else "value"
        elif char in "}]" and wants in ("first", "first key"):
            self._close(char)
        elif wants.endswith("key"):
            raise BrokenCall(f"{char!r} where a key should be")
        elif char in "{[":
            self._open.append(char)
            self._expected = "first key" if char == "{" else "first"
        elif char.isascii() and (char.isalnum() or char == "-"):
            self._scalar = char
        else:
            raise BrokenCall(f"{char!r} where a value should be")

    def _separator(self, char: str) -> None:
        if char == self._expected:
            self._expected = "value" if char == ":" or self._open[-1] == "[" else "key"
        elif char in "}]" and self._expected == ",":
            self._close(char)
        else:
            raise BrokenCall(f"{char!r} where '{self._expected}' should be")

    def _close(self, char: str) -> None:
        if self._open[-1] + char not in ("{}", "[]"):
            raise BrokenCall(f"{char!r} ends what {self._open[-1]!r} began")
        self._open.pop()
        self._value_ended()

    def _end_scalar(self) -> None:
        if not _SCALAR.fullmatch(self._scalar):
            raise BrokenCall(f"{self._scalar} is not a value")
        self._scalar = ""
        self._value_ended()

    def _value_ended(self) -> None:
        self._expected = ","
        self.done = not self._open


class CallReader:
    """Incremental reader of one call: ``{"name": …, "arguments": {…}}``, with its keys in any order."""

    def __init__(self, new_id: Callable[[], str], *, strict: bool = False) -> None:
        """``strict``: an object without arguments is not a call."""
        self._json = JsonReader()
        self._new_id = new_id
        self._strict = strict
        self._key = ""
        self._raw: list[str] = []
        """The current key or value, in parts, as far as it is kept."""
        self._name = ""
        self._early = ""
        """Arguments that preceded the name."""
        self._given = False
        """Whether the object has arguments."""
        self._quoted = False
        """Whether the arguments are JSON in a string."""
        self.begun = False
        """Whether the ``ToolCall`` was returned."""
        self.done = False

    def take(self, text: str, at: int) -> tuple[int, list[Event]]:
        """Consume a part of ``text`` from ``at`` on; return the new position and the events that are certain.

        Raises ``BrokenCall`` if the text is not JSON or not a call.
        """
        depth = self._json.depth
        if not depth and text[at] not in _SPACE + "{":
            raise BrokenCall(f"{text[at]!r} where an object should be")
        at, whole = self._json.take(text, at)
        return at, self._taken(whole, depth)

    def _taken(self, whole: str, depth: int) -> list[Event]:
        """Return the events that are certain after ``whole``, which began at ``depth``."""
        json = self._json
        if depth == 0:
            return []
        if json.depth == 0:
            return self._end_member() + self._end()
        if json.key_ended and depth == 1:
            self._key = str(_loads("".join(self._raw) + whole))
            self._raw = []
            if self._key in _ARGUMENTS and self._given:
                raise BrokenCall("the call has arguments twice")
            self._given = self._given or self._key in _ARGUMENTS
            return []
        if depth == 1 and json.depth == 1 and json.between and whole in ",:":
            return self._end_member() if whole == "," else []
        return self._value(whole)

    def _value(self, text: str) -> list[Event]:
        if not self._raw and text in _SPACE:
            return []
        first = not self._raw
        if self._key not in _ARGUMENTS or self._quoted or not self.begun:
            self._raw.append(text)
        else:
            self._raw = [_PASSED]
        if self._key not in _ARGUMENTS:
            return []
        if first:
            if text not in '{"':
                raise BrokenCall(f"the arguments begin with {text!r}, but should be an object")
            self._quoted = text == '"'
            return self._begin() + self._pass(text)
        return self._pass(text)

    def _begin(self) -> list[Event]:
        if not self._name:
            return []
        if not self._quoted:
            self._raw = [_PASSED]
        return self._announce()

    def _announce(self) -> list[Event]:
        self.begun = True
        return [ToolCall(self._new_id(), self._name)]

    def _pass(self, text: str) -> list[Event]:
        return [ToolArguments(text)] if self.begun and not self._quoted else []

    def _end_member(self) -> list[Event]:
        """Handle a complete member of the object."""
        key, raw, self._key, self._raw = self._key, "".join(self._raw).strip(), "", []
        if key in _NAMES:
            name = _loads(raw)
            if not isinstance(name, str) or not name:
                raise BrokenCall("the name is not a string")
            self._name = name
            early, self._early = self._early, ""
            return [*self._announce(), ToolArguments(early)] if early else []
        if key not in _ARGUMENTS:
            return []
        if self._quoted:
            raw, self._quoted = _unquoted(raw), False
        elif self.begun:
            return []
        if not self.begun:
            self._early = raw
            return []
        return [ToolArguments(raw)]

    def _end(self) -> list[Event]:
        self.done = True
        if not self._name:
            raise BrokenCall("the call has no name")
        if self._strict and not self._given:
            raise BrokenCall("the call has no arguments")
        return [] if self.begun else [*self._announce(), ToolArguments("{}")]


def _loads(raw: str) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BrokenCall(f"{raw} is not a string: {error}") from None


def _unquoted(raw: str) -> str:
    """Return arguments that were written as JSON in a string."""
    text = str(_loads(raw)).strip() or "{}"
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BrokenCall(f"the arguments are a string that is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BrokenCall("the arguments are not an object")
    return text


# Text that is passed through until a marker, and calls after the marker

MAX_SPACE: Final = 1024
"""Maximum characters of white space that are held back, because held text is scanned again with each feed."""


class MarkerSearch:
    """Passes text through until a marker. White space next to calls is dropped, up to ``MAX_SPACE`` characters."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""
        self._end = ""
        self._dropping = False

    def drop(self, end: str = "") -> None:
        """Drop the white space that follows, and ``end`` if present."""
        self._end = end
        self._dropping = True

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text that is certain, and the text after the marker if it was found."""
        self._held += text
        if self._dropping and not self._dropped():
            return "", None
        at = self._held.find(self._marker)
        if at >= 0:
            before, rest = self._held[:at].rstrip(), self._held[at + len(self._marker) :]
            self._held = ""
            return before, rest
        kept = len(self._held) - held(self._held, self._marker)
        certain = self._held[:kept].rstrip()
        if kept - len(certain) > MAX_SPACE:
            certain = self._held[:kept]
        self._held = self._held[len(certain) :]
        return certain, None

    def _dropped(self) -> bool:
        """Drop white space and ``_end``; return whether dropping is complete."""
        self._held = self._held.lstrip()
        if self._end and self._held.startswith(self._end):
            self._held = self._held[len(self._end) :].lstrip()
            self._end = ""
        if not self._held or (self._end and self._end.startswith(self._held)):
            return False
        self._dropping = False
        return True

    def finish(self) -> str:
        """Return what was held back, at the end of the text."""
        text, self._held = self._held, ""
        return "" if self._dropping and self._end.startswith(text) else text


class TentativeCall:
    """Text that begins like a call, and is returned as text if it turns out not to be one."""

    def __init__(self, before: str, new_id: Callable[[], str], *, strict: bool = False) -> None:
        """``before`` is the text before the call, such as the marker. ``strict``: a call must have arguments."""
        self._raw = [before]
        self._reader = CallReader(new_id, strict=strict)
        self.over = False
        self.failed = False

    def feed(self, text: str, events: list[Event]) -> str:
        """Add text, and append to ``events``; return the text after the call once it is ``over``."""
        at = 0
        while at < len(text):
            begun, before = self._reader.begun, at
            try:
                at, found = self._reader.take(text, at)
            except BrokenCall:
                if self._reader.begun:
                    raise
                self.over = self.failed = True
                events.append("".join(self._raw) + text[at])
                return text[at + 1 :]
            events += found
            if not begun:
                self._raw.append(text[before:at])
            if self._reader.done:
                self.over = True
                return text[at:]
        return ""

    def finish(self) -> list[Event]:
        """Return what was held back, at the end of the text."""
        return [] if self._reader.begun else ["".join(self._raw)]
