"""A mistake in a configuration: what is wrong in Triton's words, where it stands, and what to write instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from nerite.core.errors import InvalidArgument, NeriteError

FieldPath: TypeAlias = tuple[str | int, ...]
"""The way from the configuration to one of its parts: field names, places in lists, keys of maps."""

_MOST_TOLD: Final = 20
"""Mistakes in one file that people are told."""


class Position(NamedTuple):
    """A place in a text; both count from 1. 0 stands for: not in a text."""

    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One thing that keeps a configuration from being used."""

    message: str
    """Triton's text, or the text of Triton's parser."""
    remedy: str
    """The one edit that cures it. Never empty."""
    path: FieldPath = ()
    """The part that is wrong, as far as it is known."""
    file: str = ""
    line: int = 0
    column: int = 0
    error: type[NeriteError] = InvalidArgument
    """What becomes of it when it is told to a client."""
    elsewhere: bool = False
    """It is a mistake on this machine; on another it may be none."""
    client_message: str = ""
    """What Triton tells a client, where that is not ``message``."""

    @property
    def place(self) -> str:
        """``file:line:column``, as much of it as is known; the part's path where the text has no lines."""
        if self.line:
            return f"{self.file}:{self.line}:{self.column}"
        return ": ".join(part for part in (self.file, show_path(self.path)) if part)

    def as_error(self) -> NeriteError:
        """Return the error that a client is told: Triton's own text."""
        return self.error(self.client_message or self.message)

    def __str__(self) -> str:
        head = f"{self.place}: {self.message}" if self.place else self.message
        return f"{head}\n    {self.remedy}"


def mistake_text(mistakes: Iterable[Mistake]) -> Iterator[str]:
    """Yield each mistake as people read it; of many in one file the first ones, and how many there are more."""
    counts: dict[str, int] = {}
    for mistake in mistakes:
        counts[mistake.file] = count = counts.get(mistake.file, 0) + 1
        if count <= _MOST_TOLD:
            yield str(mistake)
    for file, count in counts.items():
        if count > _MOST_TOLD:
            more = count - _MOST_TOLD
            yield f"{file}: {more} more mistake{'s' if more > 1 else ''}\n    Correct those above first."


def show_path(path: FieldPath) -> str:
    """Print a path as people write it: ``input[0].dims[2]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A configuration's text: its name, and where in it each part stands."""

    file: str = ""
    positions: dict[FieldPath, Position] = field(default_factory=dict)

    def locate(self, path: FieldPath) -> Position:
        """Return where ``path`` stands; for a part that is not in the text, the nearest part around it."""
        for length in range(len(path), -1, -1):
            if (position := self.positions.get(path[:length])) is not None:
                return position
        return Position()

    def place(self, mistakes: Iterable[Mistake]) -> list[Mistake]:
        """Return ``mistakes`` with the file, and with line and column where they have none."""
        return [self._placed(mistake) for mistake in mistakes]

    def _placed(self, mistake: Mistake) -> Mistake:
        if mistake.file:
            return mistake
        line, column = (mistake.line, mistake.column) if mistake.line else self.locate(mistake.path)
        return dataclasses.replace(mistake, file=self.file, line=line, column=column)


# What was probably meant by a name that is not known.

_LONGEST: Final = 100
"""Characters of a name that is compared with others: that takes time in the square of them."""
_MOST_LOOKED_AT: Final = 1000
_MOST_COMPARED: Final = 50
"""Names that are compared in full, of those that have most characters in common with the wrong one."""

_ELSEWHERE: Final = {
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "FLOAT32": "TYPE_FP32",
    "FLOAT64": "TYPE_FP64",
    "HALF": "TYPE_FP16",
    "DOUBLE": "TYPE_FP64",
    "BFLOAT16": "TYPE_BF16",
    "INT": "TYPE_INT32",
    "LONG": "TYPE_INT64",
    "BYTES": "TYPE_STRING",
    "STR": "TYPE_STRING",
}
"""Data types under the names that other systems give them."""


def nearest(wrong: str, known: Iterable[str], closeness: float = 0.6) -> str:
    """Return the name in ``known`` that looks most like ``wrong``, or an empty string if none is that close.

    ``wrong`` may be what a client wrote. So this takes a few milliseconds at the most: of many names in ``known`` not
    all are compared, and for a very long one there is no suggestion.
    """
    if len(wrong) > _LONGEST:
        return ""
    import difflib  # only a mistake needs it, and starting has to be quick

    names = [name for name in islice(known, _MOST_LOOKED_AT) if len(name) <= _LONGEST]
    if len(names) > _MOST_COMPARED:
        letters = set(wrong)
        names.sort(key=lambda name: len(letters.symmetric_difference(name)) + abs(len(name) - len(wrong)))
        del names[_MOST_COMPARED:]
    matches = difflib.get_close_matches(wrong, names, n=1, cutoff=closeness)
    return matches[0] if matches else ""


def meant_value(wrong: str, values: Sequence[str]) -> str:
    """Return the enum value that ``wrong`` was meant to be, or an empty string: ``GPU`` is ``KIND_GPU``."""
    upper = wrong.upper().replace("-", "_")
    for value in values:
        if value == upper or value.endswith(f"_{upper}"):
            return value
    other = _ELSEWHERE.get(upper.removeprefix("TYPE_"), "")
    return other if other in values else nearest(upper, values)
