"""Finds members of a JSON object without parsing values: in linear time and constant memory, whatever the text is.

The text is looked at in blocks, with operations on whole blocks: which quotes are escaped, which characters are in
strings, and how deeply brackets are nested. Only strings of the object itself are looked at one by one.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nerite.core.errors import InvalidArgument

_BLOCK: Final = 1 << 16
_EVEN: Final = int.from_bytes(b"\x55" * (_BLOCK // 8 + 1), "little")
_ODD: Final = _EVEN << 1
_SKIPPED: Final = 4096
"""Rest of a string from which its end is searched for instead of looked for in blocks."""
_RUN: Final = 64
"""Backslashes before a quote that are counted one by one."""
_MOST: Final = 2048
"""Names and texts that an object may have, not counting those in its members."""
_LONGEST: Final = 255
_SCALAR: Final = 16 * 1024
"""Bytes of a value that is read."""
_QUOTE, _BACKSLASH, _COLON, _BLANK = b'"\\: '
_ESCAPE: Final = 6
"""Bytes of an escaped character."""
_SPACE: Final = re.compile(rb"[ \t\r\n]*+")
_BEHIND_NAME: Final = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
_VALUE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[-+.0-9A-Za-z]++', re.DOTALL)

_Flags = NDArray[np.bool_]


class MalformedObject(InvalidArgument):
    """The text is not a JSON object."""


class MemberPlace(NamedTuple):
    """Where a member of an object is in the text."""

    name: int
    value: int


class WantedNames:
    """Names of members to be found. Each is ASCII without uppercase letters."""

    def __init__(self, *names: str) -> None:
        self.names: Final = frozenset(name.encode() for name in names)
        self.longest: Final = _ESCAPE * max(map(len, names))
        self._lengths = np.zeros(_LONGEST + 1, np.bool_)
        self._lengths[[len(name) for name in names]] = True
        self._first = np.zeros(256, np.bool_)
        self._first[[ord(letter) for name in names for letter in (name[0], name[0].upper())]] = True

    def resembled(self, chars: NDArray[np.uint8], starts: NDArray[np.intp], sizes: NDArray[np.intp]) -> _Flags:
        """Return which strings may be one of the names without escapes, given their quotes and sizes."""
        found: _Flags = self._lengths[np.minimum(sizes, _LONGEST)] & self._first[chars[starts + 1]]
        return found


def places_of(data: bytes | bytearray, at: int, wanted: WantedNames, *, last: bool) -> dict[str, MemberPlace]:
    """Return where the wanted members of the object at offset ``at`` are. ``last``: only space may follow the object.

    Names are compared without their escapes. Raises ``MalformedObject`` if there is no complete object, and
    ``InvalidArgument`` if a wanted name occurs twice, also in another case: parsers differ in which one counts.
    """
    search = _Search(data, _space_end(data, at), wanted)
    search.run()
    if last and _space_end(data, search.end) < len(data):
        raise MalformedObject("the body is not JSON: something follows the object")
    return search.found


def value_at(data: bytes | bytearray, at: int) -> Any:
    """Return the string, number or literal at an offset; None for anything else, and for what is very long."""
    found = _VALUE.match(data[at : at + _SCALAR])
    try:
        return None if found is None else orjson.loads(found[0])
    except orjson.JSONDecodeError:
        return None


def _space_end(data: bytes | bytearray, at: int) -> int:
    found = _SPACE.match(data, at)
    return at if found is None else found.end()


class _Search:
    """The search in one object."""

    def __init__(self, data: bytes | bytearray, at: int, wanted: WantedNames) -> None:
        self._data = data
        self._view = memoryview(data)
        self._at = at
        self._wanted = wanted
        self.found: dict[str, MemberPlace] = {}
        self.end = 0
        """Offset behind the object."""
        self._depth = 0
        self._inside = 0
        """1 if the block begins in a string."""
        self._escaped = 0
        """1 if the first character of the block is escaped."""
        self._opened = -1
        """Offset of the quote of a name or value that begins in an earlier block."""
        self._quotes = 0
        self._seen: set[bytes] = set()

    def run(self) -> None:
        """Find the members."""
        if not self._data.startswith(b"{", self._at):
            raise MalformedObject("the body is not a JSON object")
        while not self.end:
            if self._at >= len(self._data):
                raise MalformedObject("the body is not JSON: the object does not end")
            if self._inside and not self._escaped:
                self._skip_string()
            self._take_block()

    def _skip_string(self) -> None:
        """Go to the next quote if it is far away."""
        at = self._at
        quote = self._data.find(b'"', at)
        if quote < 0:
            raise MalformedObject("the body is not JSON: a string does not end")
        if quote - at >= _SKIPPED:
            before = bytes(self._view[quote - _RUN : quote])
            run = _RUN - len(before.rstrip(b"\\"))
            if run < _RUN:
                self._check_text(at, quote)
                self._at = quote
                self._escaped = run & 1

    def _check_text(self, at: int, stop: int) -> None:
        # Text of two bytes a character, which some parsers recognise, has NUL bytes, and JSON in UTF-8 has none.
        if self._data.find(b"\0", at, stop) >= 0:
            raise MalformedObject("the body is not JSON in UTF-8: it has NUL bytes")

    def _take_block(self) -> None:
        at = self._at
        stop = min(at + _BLOCK, len(self._data))
        self._check_text(at, stop)
        chars = np.frombuffer(self._view[at:stop], np.uint8)
        quotes = chars == _QUOTE
        slashes: _Flags | None = None
        if self._escaped or self._data.find(b"\\", at, stop) >= 0:
            slashes = chars == _BACKSLASH
            escaped, self._escaped = _escaped(slashes, self._escaped)
            quotes &= ~escaped
        inside = np.cumsum(quotes, dtype=np.int32)
        inside += self._inside
        inside &= 1
        folded = chars & 0xDF  # brackets and braces differ in this bit
        steps = (folded == ord("[")).view(np.int8) - (folded == ord("]")).view(np.int8)
        steps *= (inside ^ 1).astype(np.int8)
        depths = np.cumsum(steps, dtype=np.int32)
        depths += self._depth
        if depths.min() <= 0:
            size = int((depths <= 0).argmax())
            self.end = at + size + 1
            chars, quotes, depths = chars[:size], quotes[:size], depths[:size]
            slashes = None if slashes is None else slashes[:size]
        self._take_strings(chars, np.flatnonzero(quotes & (depths == 1)), slashes)
        self._at, self._depth, self._inside = stop, int(depths[-1]) if depths.size else 0, int(inside[-1])

    def _take_strings(self, chars: NDArray[np.uint8], quotes: NDArray[np.intp], slashes: _Flags | None) -> None:
        """Look at the strings of the object itself, given the offsets of their quotes in the block."""
        self._quotes += quotes.size
        if self._quotes > 2 * _MOST:
            raise InvalidArgument(f"the body has more than {_MOST} names and texts in one object")
        if self._opened >= 0 and quotes.size:
            self._look_at(self._opened, self._at + int(quotes[0]))
            quotes = quotes[1:]
            self._opened = -1
        if quotes.size & 1:
            self._opened = self._at + int(quotes[-1])
            quotes = quotes[:-1]
        if not quotes.size:
            return
        starts, stops = quotes[::2], quotes[1::2]
        sizes = stops - starts - 1
        following = chars[np.minimum(stops + 1, chars.size - 1)]
        likely = self._wanted.resembled(chars, starts, sizes)
        if slashes is not None:
            count = np.cumsum(slashes, dtype=np.int32)
            likely |= (count[starts] != count[stops]) & (sizes <= self._wanted.longest)
        likely &= (following == _COLON) | (following <= _BLANK) | (stops + 1 >= chars.size)
        for index in np.flatnonzero(likely):
            self._look_at(self._at + int(starts[index]), self._at + int(stops[index]))

    def _look_at(self, start: int, stop: int) -> None:
        """Take note of the string between two quotes if it is a wanted name."""
        if stop - start - 1 > self._wanted.longest:
            return
        behind = _BEHIND_NAME.match(self._data, stop + 1)
        if behind is None:
            return
        try:
            name = orjson.loads(self._data[start : stop + 1]).encode()
        except (orjson.JSONDecodeError, UnicodeEncodeError):
            return
        folded = name.lower()
        if folded not in self._wanted.names:
            return
        if folded in self._seen:
            raise InvalidArgument(f"the body has the member '{folded.decode()}' twice: send it once")
        self._seen.add(folded)
        if folded == name:
            self.found[name.decode()] = MemberPlace(start, behind.end())


def _escaped(slashes: _Flags, first: int) -> tuple[_Flags, int]:
    """Return which characters follow an odd number of backslashes, and 1 if the one behind the block does.

    ``first`` is 1 if that holds for the first character. The carry of an addition runs along each run of backslashes.
    """
    size = slashes.size
    runs = int.from_bytes(np.packbits(slashes, bitorder="little").tobytes(), "little") & ~first
    begins = runs & ~(runs << 1)
    found = ((runs + (begins & _EVEN)) & ~runs & _ODD) | ((runs + (begins & _ODD)) & ~runs & _EVEN) | first
    bits = np.unpackbits(np.frombuffer(found.to_bytes(_BLOCK // 8 + 1, "little"), np.uint8), bitorder="little")
    return bits[:size].view(np.bool_), int(bits[size])
