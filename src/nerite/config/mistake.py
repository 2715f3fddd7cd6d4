"""Mistakes in a configuration: what is wrong in Triton's words, the place in the file, and what to write instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from nerite.core.errors import InvalidArgument, NeriteError

FieldPath: TypeAlias = tuple[str | int, ...]
"""Path from the configuration to one of its parts: field names, indices of lists, keys of maps."""

_MAX_PRINTED: Final = 20
"""Mistakes per file that are printed."""


class Position(NamedTuple):
    """A place in a text, counted from 1; 0 if the place is not in a text."""

    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One reason why a configuration cannot be used."""

    message: str
    """Triton's text, or the text of Triton's parser."""
    remedy: str
    """The one edit that corrects it. Never empty."""
    path: FieldPath = ()
    """The part that is wrong, if it is known."""
    file: str = ""
    line: int = 0
    column: int = 0
    error: type[NeriteError] = InvalidArgument
    """Type of the error that a client receives."""
    elsewhere: bool = False
    """It is a mistake on this machine, and may be correct on another."""
    client_message: str = ""
    """The text for clients, where it differs from ``message``: Triton's, or one with the remedy."""

    @property
    def place(self) -> str:
        """``file:line:column``, as far as they are known; the path of the part if the text has no lines."""
        if self.line:
            return f"{self.file}:{self.line}:{self.column}"
        return ": ".join(part for part in (self.file, show_path(self.path)) if part)

    def as_error(self) -> NeriteError:
        """Return the error that a client receives, with Triton's own text."""
        return self.error(self.client_message or self.message)

    def __str__(self) -> str:
        head = f"{self.place}: {self.message}" if self.place else self.message
        return f"{head}\n    {self.remedy}"


def mistake_text(mistakes: Iterable[Mistake]) -> Iterator[str]:
    """Yield the first mistakes of each file as text for people, and the number of further ones."""
    counts: dict[str, int] = {}
    for mistake in mistakes:
        counts[mistake.file] = count = counts.get(mistake.file, 0) + 1
        if count <= _MAX_PRINTED:
            yield str(mistake)
    for file, count in counts.items():
        more = count - _MAX_PRINTED
        if more > 0:
            yield f"{file}: {more} more mistake{'s' if more > 1 else ''}\n    Correct those above first."


def show_path(path: FieldPath) -> str:
    """Return a path as text: ``input[0].dims[2]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Name of a configuration file, and the positions of the parts of the configuration in it."""

    file: str = ""
    positions: dict[FieldPath, Position] = field(default_factory=dict)

    def locate(self, path: FieldPath) -> Position:
        """Return the position of ``path``; for a part that is not in the text, that of the innermost part around it."""
        for length in range(len(path), -1, -1):
            if (position := self.positions.get(path[:length])) is not None:
                return position
        return Position()

    def place(self, mistakes: Iterable[Mistake]) -> list[Mistake]:
        """Return ``mistakes`` with file, line and column filled in where they are missing."""
        placed = []
        for mistake in mistakes:
            if not mistake.file:
                line, column = (mistake.line, mistake.column) if mistake.line else self.locate(mistake.path)
                mistake = dataclasses.replace(mistake, file=self.file, line=line, column=column)
            placed.append(mistake)
        return placed


# Suggestions for unknown names.

_LONGEST: Final = 100
"""Characters of a name that is compared: the time grows with their square."""
_MAX_CONSIDERED: Final = 1000
_MAX_COMPARED: Final = 50
"""Names that are compared in full: those that have most characters in common with the unknown name."""

_FOREIGN_DATA_TYPES: Final = {
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
"""Names that other systems give to data types."""


def nearest(wrong: str, known: Iterable[str], closeness: float = 0.6) -> str:
    """Return the name in ``known`` that is most similar to ``wrong``, or an empty string if none is similar enough.

    ``wrong`` may come from a client. The time is therefore bounded to a few milliseconds: not all of many names in
    ``known`` are compared, and there is no suggestion for a very long name.
    """
    if len(wrong) > _LONGEST:
        return ""
    import difflib  # needed for mistakes only; keeps the start fast

    names = [name for name in islice(known, _MAX_CONSIDERED) if len(name) <= _LONGEST]
    if len(names) > _MAX_COMPARED:
        letters = set(wrong)
        names.sort(key=lambda name: len(letters.symmetric_difference(name)) + abs(len(name) - len(wrong)))
        del names[_MAX_COMPARED:]
    matches = difflib.get_close_matches(wrong, names, n=1, cutoff=closeness)
    return matches[0] if matches else ""


def meant_value(wrong: str, values: Sequence[str]) -> str:
    """Return the enum value that ``wrong`` probably means, or an empty string: ``GPU`` means ``KIND_GPU``."""
    upper = wrong.upper().replace("-", "_")
    for value in values:
        if value == upper or value.endswith(f"_{upper}"):
            return value
    other = _FOREIGN_DATA_TYPES.get(upper.removeprefix("TYPE_"), "")
    return other if other in values else nearest(upper, values)
