"""Parses JSON as Triton does: accepts more than the standard allows, and rejects the rest with Triton's error texts."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from nerite.core.client_text import MAX_DEPTH, check_document
from nerite.core.errors import Internal, InvalidArgument

# Slow path: runs only after a fast parser has rejected the text, perhaps because of NaN or Infinity, which are numbers
# here. It reports the first error with the text and the offset of Triton's parser. Python's own parser finds the first
# place that neither parser accepts; an ``Outline`` finds what only Triton rejects. No Python code runs per character
# or element, because texts may be long.

_Letters = NDArray[np.uint8]

_BLOCK: Final = 1 << 20
"""Number of bytes whose depths are computed at once."""
_INFINITY: Final = np.frombuffer(b"Infinity", np.uint8)
_FRACTION: Final = np.frombuffer(b".0", np.uint8)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_SURROGATE_PAIR: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HEX: Final = re.compile(rb"[0-9a-fA-F]{4}")
_LARGE_EXPONENT: Final = re.compile(rb"[0-9][eE]\+?[0-9]{3}")
_LARGE_NUMBER: Final = re.compile(
    rb"(?<![0-9.eE+-])-?(?:[1-9][0-9]{199,}+(?:\.[0-9]++|(?!\.))(?:[eE][+-]?[0-9]++|(?![eE]))"
    rb"|(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?[eE]\+?[0-9]{3,}+)"
)
"""Numbers that may exceed a double, whose limit is 309 digits: at least 200 digits, or a three-digit exponent."""
_LONG_INTEGER: Final = re.compile(rb"(?<![0-9.eE+-])-?[1-9][0-9]{18,}+(?!\.[0-9]|[eE][+-]?[0-9])")
"""Integers that may exceed 64 bits: those with at least 19 digits."""
_NUMERIC: Final = b"0123456789.eE+-"


def _table(letters: bytes) -> NDArray[np.bool_]:
    found = np.zeros(256, np.bool_)
    found[list(letters)] = True
    return found


_OPENS: Final = _table(b"[{")
_CLOSES: Final = _table(b"]}")
_DIGITS: Final = _table(b"0123456789")
_BEGINS: Final = ~_table(b"]},: \t\n\r")
"""Characters that begin a value or a name, valid or not."""


class JsonError(Exception):
    """The first error in a JSON text."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(f"{what} at {at}")


class TooDeep(InvalidArgument):
    """Raised for a text that is nested deeper than ``MAX_DEPTH``."""

    def __init__(
        self, message: str = f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})", retry_after: int = 0
    ) -> None:
        super().__init__(message, retry_after)


class Outline:
    """A JSON text with its strings masked. It is valid up to the first error, and its offsets are those of the text."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._escapes = text.replace(rb"\\", b"__").replace(rb"\"", b"__")
        """The text with escaped quotes and backslashes masked: quotes delimit strings, backslashes begin escapes."""
        letters: _Letters = np.frombuffer(self._escapes, np.uint8)
        inside = np.cumsum(letters == ord('"'), dtype=np.uint8) & np.uint8(1)  # overflow does not change the parity
        self._letters: _Letters = np.where(inside, np.uint8(ord("_")), letters)
        """The text with the contents of its strings masked."""

    @cached_property
    def _plain(self) -> bytes:
        return self._letters.tobytes()

    def infinities(self) -> NDArray[np.int64]:
        """Return the end offsets of ``Inf``, which only Triton accepts."""
        letters = np.append(self._letters, np.zeros(_INFINITY.size, np.uint8))
        found = np.flatnonzero(letters == _INFINITY[0])
        for place in (1, 2):
            found = found[letters[found + place] == _INFINITY[place]]
        whole = np.ones(found.size, np.bool_)
        for place in range(3, _INFINITY.size):
            whole &= letters[found + place] == _INFINITY[place]
        return found[~whole] + 3

    def long_integers(self) -> NDArray[np.int64]:
        """Return the end offsets of integers that exceed 64 bits."""
        found = _LONG_INTEGER.finditer(self._plain) if self._has_digits(19) else ()
        return np.fromiter((each.end() for each in found if not _fits_64_bits(each[0])), np.int64)

    def too_deep(self) -> int | None:
        """Return the offset of the first value that is nested deeper than ``MAX_DEPTH``; None if none is."""
        depth = 0
        for start in range(0, self._letters.size, _BLOCK):
            block = self._letters[start : start + _BLOCK]
            opens = _OPENS[block]
            depths = np.cumsum(opens.view(np.int8) - _CLOSES[block].view(np.int8), dtype=np.int32) + depth
            deep = (depths - opens > MAX_DEPTH) & _BEGINS[block]
            if deep.any():
                return start + int(deep.argmax())
            depth = int(depths[-1])
        return None

    def _has_digits(self, count: int) -> bool:
        """Return whether ``count`` digits in a row may occur. False positives are possible, false negatives are not."""
        half = (count + 1) // 2  # a run of ``count`` digits always contains an aligned block of this size
        blocks = _DIGITS[self._letters[: self._letters.size // half * half]].reshape(-1, half)
        return bool(blocks.all(axis=1).any())

    def half_pair(self) -> int | None:
        """Return the offset of the first unpaired surrogate escape; None if none occurs."""
        if _SURROGATE.search(self._escapes) is None:
            return None
        found = _SURROGATE.search(_SURROGATE_PAIR.sub(b"____________", self._escapes))
        return None if found is None else found.start()

    def too_large(self) -> int | None:
        """Return the offset of the first number that exceeds a double; None if none does."""
        if not self._has_digits(200) and _LARGE_EXPONENT.search(self._plain) is None:
            return None
        infinite = np.flatnonzero(np.isinf([*map(float, _LARGE_NUMBER.findall(self._plain))]))
        if not infinite.size:
            return None
        return next(islice(_LARGE_NUMBER.finditer(self._plain), int(infinite[0]), None)).start()

    def in_array(self, at: int) -> bool:
        """Return whether an offset is inside an array, not an object."""
        before = self._letters[:at]
        brackets = before[_OPENS[before] | _CLOSES[before]]
        opens = _OPENS[brackets]
        depths = np.cumsum(opens.view(np.int8) * 2 - 1, dtype=np.int32)
        innermost = np.flatnonzero(opens & (depths == depths[-1]))[-1]
        return bool(brackets[innermost] == ord("["))

    @property
    def ends_in_escape(self) -> bool:
        """Whether the last character is a backslash that begins an escape."""
        return self._escapes.endswith(b"\\")


def loads_like_triton(text: bytes) -> Any:
    """Parse a text as Triton does. Raises ``JsonError`` for the first error, ``TooDeep`` if nesting is exceeded first.

    Integers beyond 64 bits become floating-point numbers. Bytes that are not UTF-8 become lone surrogates. A NUL ends
    the text.
    """
    text = text.partition(b"\0")[0]
    outline = Outline(text)
    infinities, integers = outline.infinities(), outline.long_integers()
    plain, places = text, np.empty(0, np.int64)
    if infinities.size or integers.size:
        # Rewrite what only Triton accepts so that Python parses it with the same result.
        places = np.concatenate((np.repeat(infinities, _INFINITY.size - 3), np.repeat(integers, _FRACTION.size)))
        added = np.concatenate((np.tile(_INFINITY[3:], infinities.size), np.tile(_FRACTION, integers.size)))
        plain = np.insert(np.frombuffer(text, np.uint8), places, added).tobytes()
    decoded = plain.decode("utf-8", "surrogateescape")
    found: list[tuple[int, Exception]] = []
    document: Any = None
    failure: RecursionError | None = None
    try:
        document = json.loads(decoded)
    except json.JSONDecodeError as error:
        at = len(decoded[: error.pos].encode("utf-8", "surrogateescape"))
        # Map the error offset back to the original text: subtract the characters inserted before it.
        places.sort(kind="stable")
        at -= int(np.searchsorted(places + np.arange(places.size), at))
        found.append(_json_error(text, outline, error.msg, at))
    except RecursionError as error:  # nested too deeply, which is reported below
        failure = error
    # If several errors are at the same offset, depth takes precedence, then the syntax error.
    if (deep := outline.too_deep()) is not None:
        found.insert(0, (deep, TooDeep()))
    if (half := outline.half_pair()) is not None:
        found.append((half, JsonError("The surrogate pair in string is invalid.", half)))
    if (large := outline.too_large()) is not None:
        found.append((large, JsonError("Number too big to be stored in double.", large)))
    try:
        if found:
            raise min(found, key=itemgetter(0))[1]
        if failure is not None:
            raise failure
    finally:  # break the reference cycle: an exception refers to this frame, which refers to it and to the text
        found.clear()
        failure = None
    return document


def _fits_64_bits(digits: bytes) -> bool:
    """Return whether an integer fits into 64 bits, signed or unsigned."""
    return len(digits) <= 20 and -(1 << 63) <= int(digits) < 1 << 64


def _json_error(text: bytes, outline: Outline, said: str, at: int) -> tuple[int, Exception]:
    """Translate an error of Python's parser into Triton's; return its offset and the error."""
    what = "Invalid value."
    if said.startswith("Expecting property name"):
        what = "Missing a name for object member."
    elif said.startswith("Expecting ':'"):
        what = "Missing a colon after a name of object member."
    elif said.startswith(("Expecting ',' delimiter", "Extra data")):
        what, at = _behind_value(text, outline, at, last=said.startswith("Extra"))
    elif said.startswith("Illegal trailing comma"):
        if not outline.in_array(at):
            what = "Missing a name for object member."
        at = len(text) - len(text[at + 1 :].lstrip(b" \t\n\r"))
    elif said.startswith("Unterminated string"):
        what, at = _unterminated(text, outline)
    elif said.startswith("Invalid control character"):
        what = "Invalid escape character in string."
    elif said.startswith("Invalid \\uXXXX"):
        if _HEX.match(text, at + 1):  # the text ends after the escape
            what, at = _unterminated(text, outline)
        else:
            what, at = "Incorrect hex digit after \\u escape in string.", at - 1
    elif said.startswith("Invalid \\escape"):
        what = "Invalid escape character in string."
    elif at == len(text) and not text.strip(b" \t\n\r"):
        what = "The document is empty."
    elif text.startswith(b"-", at):
        at += 1
    return at, JsonError(what, at)


def _behind_value(text: bytes, outline: Outline, at: int, *, last: bool) -> tuple[str, int]:
    """Return text and offset of the error for invalid input after a value, which may be an incomplete number."""
    next_letter = text[at : at + 1]
    if next_letter in (b".", b"e", b"E") and text[at - 1 : at].isdigit():
        number = text[len(text[:at].rstrip(_NUMERIC)) : at].lower()
        if b"e" not in number:
            if next_letter != b".":
                return "Miss exponent in number.", at + 1 + text.startswith((b"+", b"-"), at + 1)
            if b"." not in number:
                return "Miss fraction part in number.", at + 1
    if last:
        return "The document root must not be followed by other values.", at
    kind = "']' after an array element." if outline.in_array(at) else "'}' after an object member."
    return f"Missing a comma or {kind}", at


def _unterminated(text: bytes, outline: Outline) -> tuple[str, int]:
    """Return text and offset of the error for a text that ends inside a string."""
    if outline.ends_in_escape:
        return "Invalid escape character in string.", len(text) - 1
    return "Missing a closing quotation mark in string.", len(text)


LARGE: Final = 128 * 1024
"""Largest JSON in bytes that is parsed or written on the event loop; takes at most about 25 ms in the worst case."""


def _whole_document(document: Any) -> Any:
    """Return ``document``: all of its strings must be valid UTF-8."""
    return document


def parse_json(text: bytes, text_of: Callable[[Any], Any] = _whole_document) -> Any:
    """Parse JSON, with NaN and Infinity as numbers and integers beyond 64 bits as floating-point numbers.

    Strings in the part of the document that ``text_of`` returns must be valid UTF-8; in all others, bytes that are not
    UTF-8 become lone surrogates. Raises ``Internal`` with Triton's texts, ``InvalidArgument`` for too deep nesting and
    for text that is not UTF-8.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        document = loads_like_triton(text.removeprefix(codecs.BOM_UTF8))
    except JsonError as error:
        raise Internal(f"failed to parse the request JSON buffer: {error}") from None
    if not _is_utf8(text):
        check_document(text_of(document))
    return document


def parse_settings(body: memoryview) -> Any:
    """Parse the JSON body of an administrative request, which may not be large. Raises like ``parse_json``."""
    if len(body) > LARGE:
        raise InvalidArgument(f"the body has {len(body)} bytes, more than the {LARGE} that such a request may have")
    return parse_json(bytes(body))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
