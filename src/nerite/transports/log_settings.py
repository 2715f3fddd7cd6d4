"""The logging extension: what both protocols make of a request to change what is logged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.observability.log import log

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


def change(
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
