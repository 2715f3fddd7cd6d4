"""The command line of the server (``nerite serve``, ``tritonserver``): parsed, explained by its help, and run.

A flag takes precedence over the environment, the environment over the options file, the file over the default. Why
this is not argparse: docs/decisions/0015-command-line.md.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nerite.cli.command import UsageError, did_you_mean, show
from nerite.cli.flags import BY_NAME, FLAGS, GROUPS, HELP, OPTIONS_FILE, at
from nerite.cli.option_assembly import assemble
from nerite.config.flag import BadValue, Flag
from nerite.config.mistake import nearest
from nerite.config.options import ServerOptions
from nerite.observability.log import install_logging, log


@dataclass(frozen=True)
class EntryPoint:
    """One of the two programs that start a server, and its conventions."""

    program: str
    synopsis: str
    repositories: bool
    """Arguments that are not flags are model repositories."""
    brief: bool
    """``--help`` exits with status 0, and an error prints a short usage instead of the full help."""
    address: str
    """Address that ports listen on by default."""
    about: str = ""
    """What the arguments may be, for the help."""


NERITE = EntryPoint(
    "nerite serve",
    "nerite serve [flags] [repository ...]",
    repositories=True,
    brief=True,
    address="127.0.0.1",
    about="A repository is a directory of models, as Triton's. FILE.py or FILE.py:NAME are functions that are served "
    "as models; with --reload they are loaded again whenever a file is saved. ORG/NAME or hf:ORG/NAME@REVISION is "
    "downloaded from the Hugging Face hub (--offline: only what is here is used; --trust: code of the publisher may "
    "run), mlflow:URI is a model of MLflow, and a model file, such as FILE.gguf, is served alone.",
)
TRITON = EntryPoint("tritonserver", "tritonserver [options]", repositories=False, brief=False, address="0.0.0.0")


class HelpRequested(Exception):
    """Raised for ``--help`` if no error precedes it on the command line."""


class CommandLine(NamedTuple):
    """A parsed command line."""

    options: ServerOptions
    warnings: list[str]
    """Lines for stderr: deprecated flags, settings that do not exist."""
    ineffective: list[Flag]
    """Flags that are set and have no effect in this version."""


class GivenFlag(NamedTuple):
    """A flag and its text from any source. ``label`` names the source in messages."""

    flag: Flag
    text: str
    label: str


def parse_command_line(
    arguments: Sequence[str], environment: Mapping[str, str], entry: EntryPoint = NERITE
) -> CommandLine:
    """Parse ``arguments``; read the options file if one is named, and nothing else.

    Raises ``UsageError`` for the first error in Triton's order, and ``HelpRequested`` for a ``--help`` before it.
    """
    warnings: list[str] = []
    flags = _values(scan(arguments, entry), warnings)
    values = _values(from_environment(environment), warnings)
    warnings.extend(_misspelled_variables(environment))
    if path := flags.get(OPTIONS_FILE.name) or environment.get(OPTIONS_FILE.environment):
        values = {**_values(from_file(path), warnings), **values}
    values = {**values, **flags}
    options, more = assemble(values, environment, entry.address)
    return CommandLine(options, warnings + more, _ineffective(values, options))


def _values(given: Iterable[GivenFlag], warnings: list[str]) -> dict[str, Any]:
    """Read the values of one source; join those of a repeated flag."""
    values: dict[str, Any] = {}
    for flag, text, label in given:
        if flag is HELP:
            raise HelpRequested
        try:
            value = flag.kind.read(text)
            if flag.join and flag.key in values:
                value = flag.join(values[flag.key], value)
        except BadValue as error:
            where = f"{label} {error.within}".rstrip()
            raise UsageError(f'Bad option: "{where}".\n{error}') from None
        values[flag.key] = value
        if flag.deprecated:
            warnings.append(flag.deprecated.format(value=value))
    return values


def _ineffective(values: Mapping[str, Any], options: ServerOptions) -> list[Flag]:
    default = ServerOptions()
    return [flag for flag in FLAGS if flag.no_effect and at(options, flag.field) != at(default, flag.field)]


# The argument list, by the rules of getopt_long, which Triton uses: ``--name=value`` or ``--name value`` (the next
# argument is the value, whatever it looks like); any unambiguous prefix of a name; flags and other arguments in any
# order; ``--`` ends the flags.


def scan(arguments: Sequence[str], entry: EntryPoint) -> Iterator[GivenFlag]:
    """Yield the flags in order, then the other arguments in order, as repositories.

    Lazy, so that an invalid value before an unknown flag is reported first, as by Triton.
    """
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            others.extend(rest)
        elif argument.startswith("--"):
            yield _given(argument, rest, entry.program)
        elif argument.startswith("-") and argument != "-":
            raise UsageError(f"{entry.program}: invalid option -- '{argument[1]}'", early=True)
        else:
            others.append(argument)
    for other in others:
        if not entry.repositories:
            raise UsageError(f"Unexpected argument: {other}")
        yield GivenFlag(BY_NAME["model-repository"], other, other)


def _given(argument: str, rest: Iterator[str], program: str) -> GivenFlag:
    name, equals, value = argument[2:].partition("=")
    flag = _find(name, argument, program)
    text: str | None = value
    if not flag.kind.label:
        if equals:
            raise UsageError(f"{program}: option '--{flag.name}' doesn't allow an argument", early=True)
        text = "true"
    elif not equals:
        text = next(rest, None)
    if text is None:
        raise UsageError(f"{program}: option '--{flag.name}' requires an argument", early=True)
    return GivenFlag(flag, text, f"--{flag.name}")


def _find(name: str, argument: str, program: str) -> Flag:
    if name in BY_NAME:
        return BY_NAME[name]
    matches = [flag for flag in FLAGS if flag.name.startswith(name)]
    # Triton's flags come first: an abbreviation that is unambiguous for Triton stays so beside ours.
    matches = [flag for flag in matches if not flag.ours] or matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        possibilities = " ".join(f"'--{flag.name}'" for flag in matches)
        raise UsageError(f"{program}: option '{argument}' is ambiguous; possibilities: {possibilities}", early=True)
    raise UsageError(
        f"{program}: unrecognized option '{argument}'", remedy=did_you_mean(name, BY_NAME, "--"), early=True
    )


# The environment and the options file.

_SETTABLE: dict[str, Flag] = {flag.name: flag for flag in FLAGS if flag not in (HELP, OPTIONS_FILE)}
_BY_VARIABLE: dict[str, Flag] = {flag.environment: flag for flag in _SETTABLE.values()}
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")


def from_environment(environment: Mapping[str, str]) -> Iterator[GivenFlag]:
    """Yield what ``NERITE_<FLAG>`` variables set. A repeated flag has one value per line. An empty one is not set."""
    for variable, flag in _BY_VARIABLE.items():
        text = environment.get(variable, "")
        # Kubernetes sets NERITE_METRICS_PORT=tcp://10.0.0.7:8002 in every pod that can see a service named
        # nerite-metrics. Such a variable describes the service and is no flag.
        if not text or _SERVICE_LINK.match(text):
            continue
        for line in text.splitlines() if flag.join else [text]:
            yield GivenFlag(flag, line, variable)


def _misspelled_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable that looks like a misspelled one of ours.

    A warning only, and only for near misses: other programs may have variables with the same prefix.
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
    except (ValueError, RecursionError) as error:  # errors in TOML and UTF-8 alike; the text says where
        raise UsageError(f"{path}: {error}") from None
    for key, value in table.items():
        place = _place(path, text, key)
        flag = _SETTABLE.get(key)
        if flag is None and key in BY_NAME:
            raise UsageError(f"option '{key}' in {place} has a meaning on the command line only")
        if flag is None:
            raise UsageError(f"unknown option '{key}' in {place}", remedy=did_you_mean(key, _SETTABLE))
        for item in value if isinstance(value, list) and flag.join else [value]:
            if not isinstance(item, str | int | float):
                noun = "a list" if isinstance(item, list) else "a table" if isinstance(item, dict) else "a date or time"
                raise UsageError(f"option '{key}' in {place} cannot be {noun}")
            yield GivenFlag(flag, str(item).lower() if isinstance(item, bool) else str(item), f"{key} in {place}")


def _place(path: str, text: str, key: str) -> str:
    """Return ``path:line`` of a top-level key, or the path alone if the key is written in some unusual way."""
    match = re.search(rf"""^[ \t]*(?:["']{re.escape(key)}["']|{re.escape(key)})[ \t]*[=.]""", text, re.MULTILINE)
    match = match or re.search(rf"^[ \t]*\[+{re.escape(key)}\b", text, re.MULTILINE)
    return f"{path}:{text.count(chr(10), 0, match.start()) + 1}" if match else path


# The help.

_SOURCES = (
    "Every flag can also be set by an environment variable (--http-port by NERITE_HTTP_PORT), or in the TOML file that "
    "--options-file or NERITE_OPTIONS_FILE names. A flag takes precedence over the environment, the environment over "
    "the file. A flag may be abbreviated to any prefix that fits no other flag."
)


def usage(entry: EntryPoint, width: int = 0) -> str:
    """Return the help for a terminal of ``width`` columns; 0 stands for the width of this terminal."""
    width = max(50, min(width or shutil.get_terminal_size((100, 24)).columns, 120))
    lines = [f"Usage: {entry.synopsis}"]
    if entry.about:
        lines += ["", *textwrap.wrap(entry.about, width)]
    for group in GROUPS:
        lines += ["", f"{group}:"] if group else [""]
        for flag in FLAGS:
            if flag.group == group:
                lines.append(f"  --{flag.name} <{flag.kind.label}>" if flag.kind.label else f"  --{flag.name}")
                lines += _indented(flag, width)
    return "\n".join([*lines, "", *textwrap.wrap(_SOURCES, width)])


def _indented(flag: Flag, width: int) -> list[str]:
    """Return what a flag does, its default, and whether it has an effect."""
    text = flag.help
    if flag.default:
        text += f" Default: {flag.default}."
    if flag.no_effect:
        text += f" (No effect: {flag.no_effect}.)"
    margin = " " * 8
    return textwrap.wrap(text, width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


def run(arguments: Sequence[str], entry: EntryPoint = NERITE) -> int:
    """Serve until shut down; return the exit status. It is 1 for an invalid command line, as in Triton."""
    try:
        command = parse_command_line(arguments, os.environ, entry)
        log.configure(command.options.log)
    except HelpRequested:
        if entry.brief:
            show(usage(entry))
            return 0
        print(usage(entry), file=sys.stderr)
        return 1
    except UsageError as error:
        print(complaint(error, entry), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write the log file '{error.filename}': {error.strerror}", file=sys.stderr)
        return 1
    _log_warnings(command)
    install_logging(log)
    # Imported here so that --help and invalid flags are answered without loading the server.
    from nerite.server_process import run as run_server

    return run_server(command.options)


def complaint(error: UsageError, entry: EntryPoint) -> str:
    """Return the text to print for an invalid command line, in the order in which Triton prints it."""
    text = "\n".join(filter(None, (error.text, error.remedy)))
    if not error.usage:
        return text
    if entry.brief:
        return f"{text}\n\nUsage: {entry.synopsis}\nAll flags: {entry.program} --help"
    help_text = usage(entry)
    return f"{error.text}\n{help_text}\n\n{error.remedy}" if error.early else f"{help_text}\n\n{text}\n"


def _log_warnings(command: CommandLine) -> None:
    for warning in command.warnings:
        # Printed as Triton prints them, unless every line of the log must be a JSON object.
        if log.format == "json":
            log.warning(warning.removeprefix("Warning: "))
        else:
            print(warning, file=sys.stderr)
    if command.ineffective:
        names = ", ".join(f"--{flag.name} ({flag.no_effect})" for flag in command.ineffective)
        log.warning(f"flags that have no effect in this version: {names}")
