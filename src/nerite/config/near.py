"""What was probably meant by a name that is not known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from nerite.config.schema import MessageSchema

_LONGEST: Final = 100
"""Characters of a name that is compared with others: that takes time in the square of them."""
_MOST_LOOKED_AT: Final = 1000
_MOST_COMPARED: Final = 50
"""Names that are compared in full, of those that have most characters in common with the wrong one."""

LISTED: Final = "Remove it: it is none of the fields that are listed above."
"""What to do about a name where ``fields_of`` was told already."""
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


def field_remedy(wrong: str, message: MessageSchema, root: MessageSchema) -> tuple[str, str]:
    """Return the field of ``message`` that ``wrong`` was meant to be, or nothing, and what to do about it."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", wrong).lower().replace("-", "_")
    if snake in message.fields:
        return snake, f"Write {snake}."
    if meant := nearest(snake, message.fields, 0.85):
        return meant, f"Did you mean {meant}?"
    places = [".".join(place[:-1]) or "the top level" for place in root.places(snake)]
    if places:
        return "", f"'{snake}' is not part of this. It belongs to {' or '.join(places[:3])}."
    if meant := nearest(snake, message.fields):
        return meant, f"Did you mean {meant}?"
    return "", fields_of(message)


def fields_of(message: MessageSchema) -> str:
    """Return the remedy that lists the fields of ``message``."""
    return f"The fields here are: {', '.join(message.fields)}."
