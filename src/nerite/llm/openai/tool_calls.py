"""What parsers of tool calls have in common: the events that they make of text, and waiting for a marker."""

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
    """A call begins. Its arguments follow."""

    id: str
    name: str


class ToolArguments(NamedTuple):
    """A part of the arguments of the call that began last. The parts, joined, are a JSON object."""

    text: str


Event: TypeAlias = str | ToolCall | ToolArguments
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


def joined_calls(events: list[Event]) -> list[Event]:
    """Return the same with text next to text, and arguments next to arguments, in one piece."""
    whole: list[Event] = []
    for kind, alike in groupby(events, type):
        if kind is str:
            whole.append("".join(alike))  # type: ignore[arg-type]  # of this kind
        elif kind is ToolArguments:
            whole.append(ToolArguments("".join(each.text for each in alike)))  # type: ignore[union-attr]
        else:
            whole += alike
    return whole


# A JSON object that is a tool call, read as it comes: the name, and the arguments in parts that join to valid JSON.

_SPACE: Final = " \t\r\n"
_SCALAR: Final = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
"""In a string."""
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_ESCAPED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ARGUMENTS: Final = ("arguments", "parameters")
_PASSED: Final = "…"
"""Instead of a value that is passed on, and not kept."""


class JsonReader:
    """Checks a JSON object or list character by character, as deep as it may be."""

    __slots__ = ("_escape", "_open", "_scalar", "_string", "_wants", "done", "key_ended")

    def __init__(self) -> None:
        self._open: list[str] = []
        """The brackets that are open."""
        self._wants = "value"
        """Outside of strings: ``value``, ``first`` (a value or the end), ``key``, ``first key``, ``:`` or ``,``."""
        self._string = ""
        """``key`` or ``value`` within a string."""
        self._escape = 0
        """Characters of an escape that are still to come; below 0: the one that says which."""
        self._scalar = ""
        self.done = False
        self.key_ended = False
        """The character that came last ended a key."""

    @property
    def depth(self) -> int:
        """How many brackets are open."""
        return len(self._open)

    @property
    def between(self) -> bool:
        """Nothing is open but brackets: no string, and no number."""
        return not self._string and not self._scalar

    def take(self, text: str, at: int) -> tuple[int, str]:
        """Take a run of plain characters of a string, or the character at ``at``, whichever stands there.

        Return where the rest begins, and what was taken, or stands for it in JSON. Raises ``BrokenCall``.
        """
        if self._string and not self._escape:
            plain = _PLAIN.match(text, at)
            if plain is not None:
                self.key_ended = False
                return plain.end(), plain[0]
        return at + 1, self._feed(text[at])

    def take_all(self, text: str) -> tuple[int, str]:
        """Take what belongs to the value that is read; return as ``take``."""
        at = 0
        taken: list[str] = []
        while at < len(text) and not self.done:
            at, some = self.take(text, at)
            taken.append(some)
        return at, "".join(taken)

    def _feed(self, char: str) -> str:
        """Take a character; return it, or what stands for it in JSON."""
        self.key_ended = False
        if self._string:
            return self._in_string(char)
        if self._scalar:
            if char not in ",]}" and char not in _SPACE:
                self._scalar += char
                if len(self._scalar) > 400:
                    raise BrokenCall(f"{self._scalar[:20]}… is no value")
                return char
            self._end_scalar()
        if char in _SPACE:
            return char
        self._token(char)
        return char

    def _in_string(self, char: str) -> str:
        if self._escape < 0:
            if char not in '"\\/bfnrtu':
                raise BrokenCall(f"\\{char} is no escape")
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
                self._wants = ":"
            else:
                self._value_ended()
        elif char < " ":
            # Models write line breaks into strings, which JSON has another way for.
            return _ESCAPED.get(char) or f"\\u{ord(char):04x}"
        return char

    def _token(self, char: str) -> None:
        wants = self._wants
        if wants in (":", ","):
            self._between(char)
        elif char == '"':
            self._string = "key" if wants.endswith("key") else "value"
        elif char in "}]" and wants in ("first", "first key"):
            self._shut(char)
        elif wants.endswith("key"):
            raise BrokenCall(f"{char!r} where a key should be")
        elif char in "{[":
            self._open.append(char)
            self._wants = "first key" if char == "{" else "first"
        elif char.isascii() and (char.isalnum() or char == "-"):
            self._scalar = char
        else:
            raise BrokenCall(f"{char!r} where a value should be")

    def _between(self, char: str) -> None:
        if char == self._wants:
            self._wants = "value" if char == ":" or self._open[-1] == "[" else "key"
        elif char in "}]" and self._wants == ",":
            self._shut(char)
        else:
            raise BrokenCall(f"{char!r} where '{self._wants}' should be")

    def _shut(self, char: str) -> None:
        if self._open[-1] + char not in ("{}", "[]"):
            raise BrokenCall(f"{char!r} ends what {self._open[-1]!r} began")
        self._open.pop()
        self._value_ended()

    def _end_scalar(self) -> None:
        if not _SCALAR.fullmatch(self._scalar):
            raise BrokenCall(f"{self._scalar} is no value")
        self._scalar = ""
        self._value_ended()

    def _value_ended(self) -> None:
        self._wants = ","
        self.done = not self._open


class CallReader:
    """Reads one object: ``{"name": …, "arguments": {…}}``, with its keys in any order."""

    def __init__(self, new_id: Callable[[], str], *, strict: bool = False) -> None:
        """``strict``: an object without arguments is no call."""
        self._json = JsonReader()
        self._new_id = new_id
        self._strict = strict
        self._key = ""
        self._raw: list[str] = []
        """The key or the value that is read, in parts, as far as it is kept."""
        self._name = ""
        self._early = ""
        """ToolArguments that came before the name."""
        self._given = False
        """There were arguments."""
        self._quoted = False
        """The arguments are JSON in a string."""
        self.begun = False
        """The call was announced."""
        self.done = False

    def take(self, text: str, at: int) -> tuple[int, list[Event]]:
        """Take what stands in ``text`` at ``at``; return where the rest begins, and what is certain by now.

        Raises ``BrokenCall`` for what is not JSON, or no call.
        """
        depth = self._json.depth
        if not depth and text[at] not in _SPACE + "{":
            raise BrokenCall(f"{text[at]!r} where an object should be")
        at, whole = self._json.take(text, at)
        return at, self._taken(whole, depth)

    def _taken(self, whole: str, depth: int) -> list[Event]:
        """Return what is certain after a part of the object that began at a depth."""
        json = self._json
        if depth == 0:
            return []
        if json.depth == 0:
            return self._end_member() + self._end()
        if json.key_ended and depth == 1:
            self._key = str(_loads("".join(self._raw) + whole))
            self._raw = []
            if self._key in _ARGUMENTS and self._given:
                raise BrokenCall("there are arguments twice")
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
                raise BrokenCall(f"the arguments begin with {text!r}, and should be an object")
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
        """Take a member of the object whose value is complete."""
        key, raw, self._key, self._raw = self._key, "".join(self._raw).strip(), "", []
        if key == "name":
            name = _loads(raw)
            if not isinstance(name, str) or not name:
                raise BrokenCall("the name is no string")
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
            raise BrokenCall("there is no name")
        if self._strict and not self._given:
            raise BrokenCall("there are no arguments")
        return [] if self.begun else [*self._announce(), ToolArguments("{}")]


def _loads(raw: str) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BrokenCall(f"{raw} is no string: {error}") from None


def _unquoted(raw: str) -> str:
    """Return arguments that were written as JSON in a string."""
    text = str(_loads(raw)).strip() or "{}"
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BrokenCall(f"the arguments are a string that is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BrokenCall("the arguments are no object")
    return text


# Text that is passed on until a marker comes, and what is read behind the marker.

MOST_SPACE: Final = 1024
"""Characters of white space that wait for what comes after them: it is looked at again each time."""


class Waiting:
    """Text before a marker. White space next to calls belongs to nobody, if it is not more than that."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""
        self._end = ""
        self._dropping = False

    def drop(self, end: str = "") -> None:
        """Leave out the white space that comes now, and ``end`` if it is there."""
        self._end = end
        self._dropping = True

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take text; return what is certain, and what stands behind the marker if that has come."""
        self._held += text
        if self._dropping and not self._dropped():
            return "", None
        at = self._held.find(self._marker)
        if at >= 0:
            before, rest = self._held[:at].rstrip(), self._held[at + len(self._marker) :]
            self._held = ""
            return before, rest
        kept = len(self._held) - held(self._held, self._marker)
        said = self._held[:kept].rstrip()
        if kept - len(said) > MOST_SPACE:
            said = self._held[:kept]
        self._held = self._held[len(said) :]
        return said, None

    def _dropped(self) -> bool:
        """Drop what is to be dropped; return whether that is over."""
        self._held = self._held.lstrip()
        if self._end and self._held.startswith(self._end):
            self._held = self._held[len(self._end) :].lstrip()
            self._end = ""
        if not self._held or (self._end and self._end.startswith(self._held)):
            return False
        self._dropping = False
        return True

    def finish(self) -> str:
        """Return what was held back: no marker comes any more."""
        text, self._held = self._held, ""
        return "" if self._dropping and self._end.startswith(text) else text


class Attempt:
    """What begins as a call, and is text again where it turns out to be none."""

    def __init__(self, before: str, new_id: Callable[[], str], *, strict: bool = False) -> None:
        """``before`` is what stood before it, such as the marker. ``strict``: a call has arguments."""
        self._raw = [before]
        self._reader = CallReader(new_id, strict=strict)
        self.over = False
        self.failed = False

    def feed(self, text: str, events: list[Event]) -> str:
        """Take text, and add to the events; return what stands behind the call when it is ``over``."""
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
        """Return what was held back: there is no more text."""
        return [] if self._reader.begun else ["".join(self._raw)]
