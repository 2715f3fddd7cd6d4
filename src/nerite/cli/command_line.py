"""From an argument list to ``ServerOptions``: flag before environment before file before default."""

from __future__ import annotations

import re
import shutil
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nerite.cli.errors import BadValue, HelpRequested, UsageError, did_you_mean
from nerite.cli.flags import BY_NAME, FLAGS, GROUPS, Flag, at
from nerite.cli.option_assembly import assemble
from nerite.config.mistake import nearest
from nerite.config.options import ServerOptions

# Takes an argument list apart by the rules of getopt_long, which Triton uses.
#
# ``--name=value`` or ``--name value`` (the next argument is the value, whatever it looks like); any prefix that fits
# one flag only; flags and other arguments in any order; ``--`` ends the flags. Nothing is read or checked beyond
# that.


class GivenFlag(NamedTuple):
    """A flag and the text given for it, from any source. ``label`` says where, for messages."""

    flag: Flag
    text: str
    label: str


class Positional(NamedTuple):
    """An argument that is not a flag."""

    text: str


def scan(arguments: Sequence[str], program: str) -> Iterator[GivenFlag | Positional]:
    """Yield the flags in order, then the other arguments in order.

    Raises ``UsageError`` when it comes to something that is not a flag, so that a wrong value before it is found
    first. ``program`` stands before such messages.
    """
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            others.extend(rest)
        elif argument.startswith("--"):
            yield _given(argument, rest, program)
        elif argument.startswith("-") and argument != "-":
            raise UsageError(f"{program}: invalid option -- '{argument[1]}'", early=True)
        else:
            others.append(argument)
    yield from map(Positional, others)


def _given(argument: str, rest: Iterator[str], program: str) -> GivenFlag:
    name, equals, text = argument[2:].partition("=")
    flag = _find(name, argument, program)
    if not flag.kind.label:
        if equals:
            raise UsageError(f"{program}: option '--{flag.name}' doesn't allow an argument", early=True)
        text = "true"
    elif not equals:
        following = next(rest, None)
        if following is None:
            raise UsageError(f"{program}: option '--{flag.name}' requires an argument", early=True)
        text = following
    return GivenFlag(flag, text, f"--{flag.name}")


def _find(name: str, argument: str, program: str) -> Flag:
    if name in BY_NAME:
        return BY_NAME[name]
    fitting = [flag for flag in FLAGS if flag.name.startswith(name)]
    # Ours come second: an abbreviation that was clear before we added a flag stays clear.
    fitting = [flag for flag in fitting if not flag.ours] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        possibilities = " ".join(f"'--{flag.name}'" for flag in fitting)
        raise UsageError(f"{program}: option '{argument}' is ambiguous; possibilities: {possibilities}", early=True)
    raise UsageError(
        f"{program}: unrecognized option '{argument}'", remedy=did_you_mean(name, BY_NAME, "--"), early=True
    )


# Where values come from besides the command line: the environment and the options file.

OPTIONS_FILE = BY_NAME["options-file"]

_SETTABLE: dict[str, Flag] = {f.name: f for f in FLAGS if f.name not in ("help", OPTIONS_FILE.name)}
_BY_VARIABLE: dict[str, Flag] = {flag.environment: flag for flag in _SETTABLE.values()}
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")


def from_environment(environment: Mapping[str, str]) -> Iterator[GivenFlag]:
    """Yield what ``NERITE_<FLAG>`` variables set. A repeated flag has one value a line. Empty is not set."""
    for variable, flag in _BY_VARIABLE.items():
        text = environment.get(variable, "")
        # Kubernetes puts NERITE_METRICS_PORT=tcp://10.0.0.7:8002 into every pod that can see a service of the name
        # nerite-metrics. That is about the service, not about us.
        if not text or _SERVICE_LINK.match(text):
            continue
        for line in text.splitlines() if flag.join else [text]:
            yield GivenFlag(flag, line, variable)


def strange_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable that looks like a misspelt one of ours.

    A warning only, and only for near misses: other programs may have variables of the same beginning.
    """
    known = [*_BY_VARIABLE, OPTIONS_FILE.environment]
    for variable in environment:
        if variable.startswith("NERITE_") and variable not in known and (meant := nearest(variable, known, 0.9)):
            yield f"Warning: environment variable {variable} has no meaning; did you mean {meant}?"


def from_file(path: str) -> Iterator[GivenFlag]:
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
            yield GivenFlag(flag, str(one).lower() if isinstance(one, bool) else str(one), f"{key} in {place}")


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


class CommandLine(NamedTuple):
    """What a command line says."""

    options: ServerOptions
    warnings: list[str]
    """Lines for stderr: deprecated flags, settings that do not exist."""
    idle: list[Flag]
    """The flags that were used and have no effect in this version."""


def parse_command_line(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    program: str,
    *,
    repositories: bool = False,
    address: str = "0.0.0.0",
) -> CommandLine:
    """Read ``arguments``. With ``repositories`` an argument that is not a flag is a model repository.

    ``address`` is where ports listen of which nothing is said.

    Raises ``UsageError`` for the first mistake in Triton's order, and ``HelpRequested`` if that is no mistake but
    ``--help``. Reads the options file; touches nothing else.
    """
    warnings: list[str] = []
    flags = _collect(_arguments(arguments, program, repositories), warnings)
    values = _collect(from_environment(environment), warnings)
    warnings.extend(strange_variables(environment))
    if path := flags.get(OPTIONS_FILE.name) or environment.get(OPTIONS_FILE.environment):
        values = {**_collect(from_file(path), warnings), **values}
    values = {**values, **flags}
    options, more = assemble(values, environment, address)
    return CommandLine(options, warnings + more, _idle(values, options))


def _arguments(arguments: Sequence[str], program: str, repositories: bool) -> Iterable[GivenFlag]:
    for found in scan(arguments, program):
        match found:
            case GivenFlag(flag) if flag.name == "help":
                raise HelpRequested
            case GivenFlag():
                yield found
            case Positional(text) if repositories:
                yield GivenFlag(BY_NAME["model-repository"], text, text)
            case Positional(text):
                raise UsageError(f"Unexpected argument: {text}")


def _collect(given: Iterable[GivenFlag], warnings: list[str]) -> dict[str, Any]:
    """Read the values of one source, joining those of a repeated flag; raises ``UsageError`` for the first bad one."""
    values: dict[str, Any] = {}
    for flag, text, label in given:
        try:
            value = flag.kind.read(text)
            if flag.join:
                value = flag.join(values[flag.key], value) if flag.key in values else value
        except BadValue as error:
            where = f"{label} {error.within}".rstrip()
            raise UsageError(f'Bad option: "{where}".\n{error}') from None
        values[flag.key] = value
        if flag.deprecated:
            warnings.append(flag.deprecated.format(value=value))
    return values


def _idle(values: Mapping[str, Any], options: ServerOptions) -> list[Flag]:
    default = ServerOptions()
    return [
        flag
        for flag in FLAGS
        if flag.accepted and (at(options, flag.field) != at(default, flag.field) if flag.field else flag.name in values)
    ]


# The text of ``--help``, from the table of flags.

_SOURCES = (
    "Every flag can also be set by an environment variable, --http-port by NERITE_HTTP_PORT, or in a TOML file that "
    "--options-file or NERITE_OPTIONS_FILE names. A flag goes before the environment, the environment before the "
    "file. A flag may be shortened as long as it stays clear which one is meant."
)


def usage(synopsis: str, width: int = 0) -> str:
    """Return the whole text for a terminal of ``width`` columns; 0 asks the terminal."""
    width = max(50, min(width or shutil.get_terminal_size((100, 24)).columns, 120))
    lines = [f"Usage: {synopsis}"]
    for group in GROUPS:
        lines += ["", f"{group}:"] if group else [""]
        for flag in FLAGS:
            if flag.group == group:
                lines.extend(_entry(flag, width))
    return "\n".join([*lines, "", *textwrap.wrap(_SOURCES, width)])


def description(flag: Flag) -> str:
    """Return what a flag means, its default, and whether it has an effect."""
    text = flag.help
    if flag.default:
        text += f" Default: {flag.default}."
    if flag.accepted:
        text += f" (No effect: {flag.accepted}.)"
    return text


def _entry(flag: Flag, width: int) -> Iterator[str]:
    yield f"  --{flag.name} <{flag.kind.label}>" if flag.kind.label else f"  --{flag.name}"
    yield from textwrap.wrap(
        description(flag), width, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False
    )
