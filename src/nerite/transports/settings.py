"""The logging and trace extensions: applies changes of settings, for HTTP and gRPC alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from nerite.core.client_text import checked_name
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
"""Settings that can be changed, in the order in which they are validated."""
_VERBOSE_LEVEL: Final = "log_verbose_level"
_MAX_VERBOSE: Final = 2**32 - 1
"""Maximum value that both protocols can represent."""


def change_log_settings(
    given: Iterable[tuple[str, Any]],
    read: Callable[[str, type, Any], Value],
    unknown_format: Callable[[str], NeriteError],
) -> None:
    """Change the log settings atomically. Unknown settings are ignored, as in Triton.

    ``read`` returns a value of the type of the setting, or raises the protocol's error.
    """
    requested = dict(given)
    if "log_file" in requested:
        raise Unsupported("log file location can not be updated through network protocol")
    settings = {name: read(name, kind, requested[name]) for name, kind in KINDS.items() if name in requested}
    if int(settings.get(_VERBOSE_LEVEL, 0)) > _MAX_VERBOSE:
        raise InvalidArgument(f"'{_VERBOSE_LEVEL}' must be from 0 to {_MAX_VERBOSE}")
    try:
        log.change(settings)
    except ValueError as error:
        raise unknown_format(str(error)) from None


# The trace extension.

_NUMBER: Final = re.compile(r"\s*([+-]?[0-9]+)")
_INT32: Final = 2**31
_FIELDS: Final = {
    "trace_level": "levels",
    "trace_rate": "rate",
    "trace_count": "count",
    "log_frequency": "log_frequency",
}
"""Settings that can be changed, in the order in which they are validated."""


def change_trace_settings(
    settings: TraceSettings,
    model: str,
    given: Mapping[str, Any],
    read: Callable[[str, Any], Sequence[str] | None],
) -> None:
    """Change the trace settings atomically. Unknown settings are ignored, as in Triton.

    ``read`` returns the texts of a setting, None if it is cleared, or raises the protocol's error.
    """
    if "trace_file" in given:
        raise Unsupported("trace file location can not be updated through network protocol")
    update: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        if name not in given:
            continue
        texts = read(name, given[name])
        for text in texts or ():
            checked_name(text, f"'{name}'")
        if texts is None:
            update[field] = None
        elif field != "levels":
            update[field] = _number(name, texts[0])
        elif (levels := _levels(texts)) is not None:
            update[field] = levels
    if update:
        settings.update(model, update)


def _levels(texts: Sequence[str]) -> frozenset[str] | None:
    """Return the valid levels of a list; None if it has none, in which case nothing changes."""
    if "OFF" in texts:
        if len(texts) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        return frozenset()
    return frozenset(LEVELS).intersection(texts) or None


def _number(name: str, text: str) -> int:
    """Return the number at the start of a text."""
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
