"""From an argument list to ``ServerOptions``: flag before environment before file before default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nerite.cli.assembly import assemble
from nerite.cli.flag import Flag, at
from nerite.cli.flags import BY_NAME, FLAGS
from nerite.cli.scanner import Given, Positional, scan
from nerite.cli.sources import OPTIONS_FILE, from_environment, from_file, strange_variables
from nerite.cli.usage_error import BadValue, HelpRequested, UsageError
from nerite.config.options import ServerOptions


class CommandLine(NamedTuple):
    """What a command line says."""

    options: ServerOptions
    warnings: list[str]
    """Lines for stderr: deprecated flags, settings that do not exist."""
    idle: list[Flag]
    """The flags that were used and have no effect in this version."""


def parse(
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


def _arguments(arguments: Sequence[str], program: str, repositories: bool) -> Iterable[Given]:
    for found in scan(arguments, program):
        match found:
            case Given(flag) if flag.name == "help":
                raise HelpRequested
            case Given():
                yield found
            case Positional(text) if repositories:
                yield Given(BY_NAME["model-repository"], text, text)
            case Positional(text):
                raise UsageError(f"Unexpected argument: {text}")


def _collect(given: Iterable[Given], warnings: list[str]) -> dict[str, Any]:
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
