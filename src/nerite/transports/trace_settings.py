"""The trace extension: what both protocols make of a request to change what is traced."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument, Unsupported
from nerite.observability.trace_settings import LEVELS, TraceSettings

_NUMBER: Final = re.compile(r"\s*([+-]?[0-9]+)")
_INT32: Final = 2**31
_FIELDS: Final = {
    "trace_level": "levels",
    "trace_rate": "rate",
    "trace_count": "count",
    "log_frequency": "log_frequency",
}
"""The settings that can be changed, in the order in which they are looked at."""


def change(
    settings: TraceSettings,
    model: str,
    given: Mapping[str, Any],
    read: Callable[[str, Any], Sequence[str] | None],
) -> None:
    """Change what is traced: all of it, or nothing. Settings that there are not are left out, as Triton does.

    ``read`` returns the texts that a setting is given, None where it is cleared, or raises the protocol's error.
    """
    if "trace_file" in given:
        raise Unsupported("trace file location can not be updated through network protocol")
    update: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        if name not in given:
            continue
        texts = read(name, given[name])
        for text in texts or ():
            checked(text, f"'{name}'")
        if texts is None:
            update[field] = None
        elif field != "levels":
            update[field] = _number(name, texts[0])
        elif (levels := _levels(texts)) is not None:
            update[field] = levels
    if update:
        settings.update(model, update)


def _levels(texts: Sequence[str]) -> frozenset[str] | None:
    """Return the levels of a list; None where it has none that there is, which changes nothing."""
    if "OFF" in texts:
        if len(texts) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        return frozenset()
    return frozenset(LEVELS).intersection(texts) or None


def _number(name: str, text: str) -> int:
    """Return the number that a text begins with."""
    found = _NUMBER.match(text)
    if found is None:
        raise InvalidArgument(f"Unable to parse '{name}', got: {text}")
    number = int(found[1])
    low, high = (-1, _INT32 - 1) if name == "trace_count" else (0, 2 * _INT32 - 1)
    if low < 0 and -_INT32 <= number < low:
        raise InvalidArgument(f"Unable to parse '{name}'. Expecting value >= -1, got:{text}")
    if not low <= number < _INT32:
        raise InvalidArgument(f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {text}")
    return number
