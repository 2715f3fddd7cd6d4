"""JSON checked letter by letter, as Triton's parser goes through it: what ``json_error`` has to find, slowly."""

from __future__ import annotations

import math
import re
from typing import Final

from nerite.core.client_text import MAX_DEPTH
from nerite.transports.http.json_text import JsonError, TooDeep

_SPACE: Final = re.compile(rb"[ \t\n\r]*")
_NUMBER: Final = re.compile(rb"-?(?:0|[1-9][0-9]*)")
_DIGITS: Final = re.compile(rb"[0-9]+")
_PLAIN: Final = re.compile(rb'[^"\\\x00-\x1f]*')
_HEX: Final = re.compile(rb"[0-9a-fA-F]{4}")
_WORDS: Final = (b"true", b"false", b"null", b"NaN", b"Infinity", b"Inf", b"-Infinity", b"-Inf")
_ESCAPES: Final = b'"\\/bfnrt'


def check(text: bytes) -> None:
    """Raise ``JsonError`` for the first mistake in ``text``, ``TooDeep`` for too much nesting."""
    at = _space(text, 0)
    if at == len(text):
        raise JsonError("The document is empty.", at)
    at = _space(text, _value(text, at, 0))
    if at < len(text):
        raise JsonError("The document root must not be followed by other values.", at)


def _space(text: bytes, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _value(text: bytes, at: int, depth: int) -> int:
    """Check the value that begins at ``at``; return where it ends."""
    if depth > MAX_DEPTH:
        raise TooDeep
    first = text[at : at + 1]
    if first == b"{":
        return _object(text, at + 1, depth + 1)
    if first == b"[":
        return _array(text, at + 1, depth + 1)
    if first == b'"':
        return _string(text, at + 1)
    for word in _WORDS:
        if text.startswith(word, at):
            return at + len(word)
    if first and first in b"-0123456789":
        return _number(text, at)
    raise JsonError("Invalid value.", at)


def _object(text: bytes, at: int, depth: int) -> int:
    at = _space(text, at)
    if text.startswith(b"}", at):
        return at + 1
    while True:
        if not text.startswith(b'"', at):
            raise JsonError("Missing a name for object member.", at)
        at = _space(text, _string(text, at + 1))
        if not text.startswith(b":", at):
            raise JsonError("Missing a colon after a name of object member.", at)
        at = _space(text, _value(text, _space(text, at + 1), depth))
        if text.startswith(b"}", at):
            return at + 1
        if not text.startswith(b",", at):
            raise JsonError("Missing a comma or '}' after an object member.", at)
        at = _space(text, at + 1)


def _array(text: bytes, at: int, depth: int) -> int:
    at = _space(text, at)
    if text.startswith(b"]", at):
        return at + 1
    while True:
        at = _space(text, _value(text, at, depth))
        if text.startswith(b"]", at):
            return at + 1
        if not text.startswith(b",", at):
            raise JsonError("Missing a comma or ']' after an array element.", at)
        at = _space(text, at + 1)


def _string(text: bytes, at: int) -> int:
    while True:
        match = _PLAIN.match(text, at)
        at = match.end() if match else at
        byte = text[at : at + 1]
        if byte == b'"':
            return at + 1
        if byte != b"\\":
            # A text that ends, or a control character, which has to be escaped.
            raise JsonError(
                "Invalid escape character in string." if byte else "Missing a closing quotation mark in string.", at
            )
        if text[at + 1 : at + 2] == b"u":
            at = _code(text, at)
        elif text[at + 1 : at + 2] and text[at + 1] in _ESCAPES:
            at += 2
        else:
            raise JsonError("Invalid escape character in string.", at)


def _code(text: bytes, at: int) -> int:
    """Check the escape of a code, and the other half of a pair behind it."""
    match = _HEX.match(text, at + 2)
    if not match:
        raise JsonError("Incorrect hex digit after \\u escape in string.", at)
    code = int(match[0], 16)
    if not 0xD800 <= code < 0xE000:
        return match.end()
    low = _HEX.match(text, match.end() + 2)
    if code >= 0xDC00 or not text.startswith(b"\\u", match.end()) or low is None:
        raise JsonError("The surrogate pair in string is invalid.", at)
    if not 0xDC00 <= int(low[0], 16) < 0xE000:
        raise JsonError("The surrogate pair in string is invalid.", at)
    return low.end()


def _number(text: bytes, at: int) -> int:
    match = _NUMBER.match(text, at)
    if not match:
        raise JsonError("Invalid value.", at + 1)
    end = match.end()
    if text.startswith(b".", end):
        digits = _DIGITS.match(text, end + 1)
        if not digits:
            raise JsonError("Miss fraction part in number.", end + 1)
        end = digits.end()
    if text[end : end + 1] in (b"e", b"E"):
        sign = 1 if text[end + 1 : end + 2] in (b"+", b"-") else 0
        digits = _DIGITS.match(text, end + 1 + sign)
        if not digits:
            raise JsonError("Miss exponent in number.", end + 1 + sign)
        end = digits.end()
    if math.isinf(float(text[at:end])):
        raise JsonError("Number too big to be stored in double.", at)
    return end
