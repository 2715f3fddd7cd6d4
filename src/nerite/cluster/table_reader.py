"""Reads tables of a cluster file key by key, and collects every mistake with file, line, key and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from nerite.config.mistake import nearest
from nerite.core.durations import duration_of

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and, of arrays of tables, indices."""
HEADER: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
"""Name of a header."""


class TableKey(NamedTuple):
    """A key of a table: the name of its setting, and how its value is read."""

    field: str
    read: Callable[[object], Any]


class TableReader:
    """Reads tables and collects mistakes; invalid values are replaced by their defaults."""

    def __init__(self, text: str, file: str) -> None:
        self._lines = _lines_of_keys(text)
        self._file = file
        self._folder = Path(file).parent
        self.mistakes: list[tuple[int, str]] = []
        """With the line of each; 0 if that is not known."""

    def read(self, path: KeyPath, table: object, keys: Mapping[str, TableKey]) -> dict[str, Any]:
        """Return the valid values of a table by the names of their settings."""
        if not isinstance(table, dict):
            self.wrong(path, f"must be a table: write [{_dotted(path)}] and its keys below")
            return {}
        self.refuse_unknown(path, table, tuple(keys))
        values = {}
        for key, value in table.items():
            if key in keys:
                try:
                    values[keys[key].field] = keys[key].read(value)
                except ValueError as error:
                    self.wrong((*path, key), str(error))
        return values

    def refuse_unknown(self, path: KeyPath, table: Mapping[str, Any], known: Sequence[str]) -> None:
        """Note keys that are not known."""
        for key in table:
            if key not in known:
                meant = nearest(key, known)
                hint = f"Did you mean {meant}?" if meant else f"There are: {', '.join(known)}."
                self.wrong((*path, key), f"is not known. {hint}")

    def beside(self, path: str) -> str:
        """Return a path of the file relative to the directory of the file."""
        return str(self._folder / path)

    def key_beside(self, key: str) -> str:
        """Return what ``read_key`` has read, with its file relative to the directory of the file."""
        header, _, value = key.partition("=")
        return f"{header}=@{self.beside(value[1:])}" if value.startswith("@") else key

    def wrong(self, path: KeyPath, what: str) -> None:
        """Note a mistake. ``what`` continues a sentence about the key."""
        line = next(
            (self._lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in self._lines), 0
        )
        place = f"{self._file}:{line}" if line else self._file
        self.mistakes.append((line, f"{place}: {_dotted(path)}: {what}"))


def _dotted(path: KeyPath) -> str:
    return ".".join(part if isinstance(part, str) else str(part + 1) for part in path)


_TABLE_LINE: Final = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?")
_ENTRY: Final = re.compile(r"\s*([^=#\[\]{}\"']+?|\"[^\"]*\"|'[^']*')\s*=")


def _lines_of_keys(text: str) -> dict[KeyPath, int]:
    """Return the lines of tables and keys, as far as they are written one on a line."""
    found: dict[KeyPath, int] = {}
    counts: dict[str, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE_LINE.match(line):
            table = tuple(part.strip().strip("\"'") for part in match[2].split("."))
            if match[1] == "[[":
                counts[match[2]] = counts.get(match[2], -1) + 1
                table = (*table, counts[match[2]])
            elif len(table) > 1 and table[0] in counts:
                table = (table[0], counts[str(table[0])], *table[1:])
            for length in range(1, len(table) + 1):
                found.setdefault(table[:length], number)
        elif match := _ENTRY.match(line):
            found.setdefault((*table, match[1].strip().strip("\"'")), number)
    return found


# How values are read. Each raises ``ValueError`` with what the value must be.


def read_port(value: object) -> int:
    """Return a port."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 65536:
        raise ValueError("must be a port from 0 to 65535; 0 picks a free one")
    return value


def read_text(value: object) -> str:
    """Return a text that is not empty."""
    if not isinstance(value, str) or not value or "\0" in value or len(value) > 4096:
        raise ValueError("must be a non-empty string")
    return value


def read_key(value: object) -> str:
    """Return a header and the value that it must have, or the file with it."""
    name, equals, key = value.partition("=") if isinstance(value, str) else ("", "", "")
    if not equals or not HEADER.fullmatch(name) or not key.removeprefix("@") or not key.isprintable():
        raise ValueError('must be HEADER=VALUE or HEADER=@FILE, as in "X-Admin-Key=@/run/secrets/key"')
    return str(value)


def read_flag(value: object) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def read_count(least: int, most: int) -> Callable[[object], int]:
    """Return a reader of integers in a range."""

    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"must be an integer from {least} to {most}")
        return value

    return read


def read_number(value: object) -> float:
    """Return a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("must be a number of at most 300 digits") from None


def read_amount(value: object) -> float:
    """Return an amount of a resource."""
    number = read_number(value)
    if not 0 <= number <= 1e6:
        raise ValueError("must be a number from 0 to 1000000")
    return number


def read_interval(value: object) -> float:
    """Return the seconds of a duration of at least 50 ms."""
    seconds = duration_of(value)
    if seconds < 0.05:
        raise ValueError("must be at least 50ms")
    return seconds


def read_one_of(values: Sequence[str]) -> Callable[[object], str]:
    """Return a reader of one of these texts."""

    def read(value: object) -> str:
        if value not in values:
            meant = nearest(value, values) if isinstance(value, str) else ""
            hint = f". Did you mean '{meant}'?" if meant else ""
            raise ValueError(f"must be one of {', '.join(values)}{hint}")
        return str(value)

    return read


def read_names(value: object) -> tuple[str, ...]:
    """Return names, at least one."""
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise ValueError('must be a list of names, as in ["batch"]')
    return tuple(value)
