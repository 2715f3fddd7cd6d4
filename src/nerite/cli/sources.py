"""Where values come from besides the command line: the environment and the options file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from nerite.cli.flag import Flag
from nerite.cli.flags import BY_NAME, FLAGS
from nerite.cli.scanner import Given
from nerite.cli.suggestion import did_you_mean
from nerite.cli.usage_error import UsageError
from nerite.config.near import nearest

OPTIONS_FILE = BY_NAME["options-file"]

_SETTABLE: dict[str, Flag] = {f.name: f for f in FLAGS if f.name not in ("help", OPTIONS_FILE.name)}
_BY_VARIABLE: dict[str, Flag] = {flag.environment: flag for flag in _SETTABLE.values()}
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")


def from_environment(environment: Mapping[str, str]) -> Iterator[Given]:
    """Yield what ``NERITE_<FLAG>`` variables set. A repeated flag has one value a line. Empty is not set."""
    for variable, flag in _BY_VARIABLE.items():
        text = environment.get(variable, "")
        # Kubernetes puts NERITE_METRICS_PORT=tcp://10.0.0.7:8002 into every pod that can see a service of the name
        # nerite-metrics. That is about the service, not about us.
        if not text or _SERVICE_LINK.match(text):
            continue
        for line in text.splitlines() if flag.join else [text]:
            yield Given(flag, line, variable)


def strange_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable that looks like a misspelt one of ours.

    A warning only, and only for near misses: other programs may have variables of the same beginning.
    """
    known = [*_BY_VARIABLE, OPTIONS_FILE.environment]
    for variable in environment:
        if variable.startswith("NERITE_") and variable not in known and (meant := nearest(variable, known, 0.9)):
            yield f"Warning: environment variable {variable} has no meaning; did you mean {meant}?"


def from_file(path: str) -> Iterator[Given]:
    """Yield what a TOML file sets: keys are flags without dashes, a repeated flag takes a list.

    Raises ``UsageError`` for a file that cannot be read, an unknown key, and a value of a type that no flag has.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read the options file '{path}': {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML and UTF-8 mistakes alike; the text says where
        raise UsageError(f"{path}: {error}") from None
    for key, value in table.items():
        place = _place(path, text, key)
        flag = _SETTABLE.get(key)
        if flag is None and key in BY_NAME:
            raise UsageError(f"option '{key}' in {place} has a meaning on the command line only")
        if flag is None:
            raise UsageError(f"unknown option '{key}' in {place}", remedy=did_you_mean(key, _SETTABLE))
        several = value if isinstance(value, list) and flag.join else [value]
        for one in several:
            if not isinstance(one, str | int | float):
                raise UsageError(f"option '{key}' in {place} cannot be {_noun(one)}")
            yield Given(flag, str(one).lower() if isinstance(one, bool) else str(one), f"{key} in {place}")


def _place(path: str, text: str, key: str) -> str:
    """Return ``path:line`` of a top-level key, or the path alone if the key is written in some unusual way."""
    match = re.search(rf"""^[ \t]*(?:["']{re.escape(key)}["']|{re.escape(key)})[ \t]*[=.]""", text, re.MULTILINE)
    match = match or re.search(rf"^[ \t]*\[+{re.escape(key)}\b", text, re.MULTILINE)
    return f"{path}:{text.count(chr(10), 0, match.start()) + 1}" if match else path


def _noun(value: object) -> str:
    match value:
        case list():
            return "a list"
        case dict():
            return "a table"
    return "a date or time"
