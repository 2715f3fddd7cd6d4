"""The logging extension: what both protocols make of a request to change what is logged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from nerite.core.client_text import checked
from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.observability.log import log
from nerite.observability.trace import LEVELS, TraceSettings

Value: TypeAlias = bool | int | str
KINDS: Final[dict[str, type]] = {
    "log_info": bool,
    "log_warning": bool,
    "log_error": bool,
    "log_verbose_level": int,
    "log_format": str,
}
"""The settings that can be changed, in the order in which they are looked at."""
_LEVEL: Final = "log_verbose_level"
_MOST_VERBOSE: Final = 2**32 - 1
"""As much as both protocols can tell."""


def change_log_settings(
    given: Iterable[tuple[str, Any]],
    read: Callable[[str, type, Any], Value],
    unknown_format: Callable[[str], NeriteError],
) -> None:
    """Change what is logged: all of it, or nothing. Settings that there are not are left out, as Triton does.

    ``read`` returns a value of the kind that a setting has, or raises the protocol's error.
    """
    asked = dict(given)
    if "log_file" in asked:
        raise Unsupported("log file location can not be updated through network protocol")
    settings = {name: read(name, kind, asked[name]) for name, kind in KINDS.items() if name in asked}
    if int(settings.get(_LEVEL, 0)) > _MOST_VERBOSE:
        raise InvalidArgument(f"'{_LEVEL}' must be from 0 to {_MOST_VERBOSE}")
    try:
        log.change(settings)
    except ValueError as error:
        raise unknown_format(str(error)) from None


# The trace extension: what both protocols make of a request to change what is traced.

_NUMBER: Final = re.compile(r"\s*([+-]?[0-9]+)")
_INT32: Final = 2**31
_FIELDS: Final = {
    "trace_level": "levels",
    "trace_rate": "rate",
    "trace_count": "count",
    "log_frequency": "log_frequency",
}
"""The settings that can be changed, in the order in which they are looked at."""


def change_trace_settings(
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
