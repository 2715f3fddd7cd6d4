"""JSON as protobuf's parser takes it: names without quotes, strings in single ones, a comma behind the last element.

Triton reads the configuration of a load so. What else JSON does not have (comments, numbers in hexadecimal, words for
values) is refused, as it is there.
"""

from __future__ import annotations

import re
from typing import Any, Final

_SPACE: Final = re.compile(r"[ \t\n\v\f\r]*")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_WORDS: Final = {"true": True, "false": False, "null": None}
_PIECES: Final = {
    quote: re.compile(rf"([^{quote}\\]*)({quote}|\\u[0-9A-Fa-f]{{4}}|\\[^u])", re.DOTALL) for quote in "\"'"
}
_ESCAPES: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
"""Any other character stands for itself."""
_LONGEST: Final = 4_000
"""Digits of a whole number: Python refuses to read many more."""


def parse(text: str) -> Any:
    """Return the value that ``text`` is.

    Raises ``ValueError`` with the place of what is wrong, and ``RecursionError``.
    """
    value, at = _value(text, _space(text, 0))
    if at < len(text):
        raise _wrong("the end", text, at)
    return value


def _value(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins at a place, and where the next thing begins."""
    first = text[at : at + 1]
    if first == "{":
        return _object(text, _space(text, at + 1))
    if first == "[":
        return _array(text, _space(text, at + 1))
    if first and first in _PIECES:
        return _string(text, at)
    if (number := _NUMBER.match(text, at)) is not None and len(number[0]) < _LONGEST:
        whole = number[1] is None and number[2] is None
        return int(number[0]) if whole else float(number[0]), _space(text, number.end())
    word = _NAME.match(text, at)
    if word is None or word[0] not in _WORDS:
        raise _wrong("a value", text, at)
    return _WORDS[word[0]], _space(text, word.end())


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    while not text.startswith("}", at):
        name, at = _name(text, at)
        if not text.startswith(":", at):
            raise _wrong("':'", text, at)
        members[name], at = _value(text, _space(text, at + 1))
        at = _next(text, at, "}")
    return members, _space(text, at + 1)


def _array(text: str, at: int) -> tuple[list[Any], int]:
    elements = []
    while not text.startswith("]", at):
        element, at = _value(text, at)
        elements.append(element)
        at = _next(text, at, "]")
    return elements, _space(text, at + 1)


def _next(text: str, at: int, end: str) -> int:
    """Return where the next element begins, or where the ``end`` is."""
    if text.startswith(",", at):
        return _space(text, at + 1)
    if not text.startswith(end, at):
        raise _wrong(f"',' or '{end}'", text, at)
    return at


def _name(text: str, at: int) -> tuple[str, int]:
    if text[at : at + 1] in ('"', "'"):
        return _string(text, at)
    name = _NAME.match(text, at)
    if name is None or name[0] in _WORDS:
        raise _wrong("the name of a field", text, at)
    return name[0], _space(text, name.end())


def _string(text: str, at: int) -> tuple[str, int]:
    quote, began = _PIECES[text[at]], at
    pieces: list[str] = []
    at += 1
    while (piece := quote.match(text, at)) is not None:
        plain, end = piece.groups()
        pieces.append(plain)
        at = piece.end()
        if end[0] != "\\":
            # Halves of a character that come one after the other are one.
            whole = "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
            return whole, _space(text, at)
        pieces.append(chr(int(end[2:], 16)) if len(end) > 2 else _ESCAPES.get(end[1], end[1]))
    raise _wrong("the end of the string, which begins here,", text, began)


def _space(text: str, at: int) -> int:
    """Return where what is no white space begins."""
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _wrong(expected: str, text: str, at: int) -> ValueError:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    found = repr(text[at : at + 20]) if at < len(text) else "nothing"
    return ValueError(f"Expected {expected} at line {line} column {column}, got {found}")
