"""A mistake in a configuration: what is wrong in Triton's words, where it stands, and what to write instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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


def told(mistakes: Iterable[Mistake]) -> Iterator[str]:
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
class Source:
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
