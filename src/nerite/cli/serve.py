"""``nerite serve`` and ``tritonserver``: parse the command line, configure the log, run the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nerite.cli.command import show
from nerite.cli.command_line import CommandLine, parse_command_line, usage
from nerite.cli.errors import HelpRequested, UsageError
from nerite.observability.log import install_logging, log


@dataclass(frozen=True)
class Manner:
    """Conventions of the command under one of its two names."""

    program: str
    synopsis: str
    repositories: bool
    """Arguments that are not flags are model repositories."""
    brief: bool
    """``--help`` exits with status 0, and an error prints a short usage instead of the full help."""
    address: str
    """Address that ports listen on by default."""

    def parse(self, arguments: Sequence[str], environment: Mapping[str, str]) -> CommandLine:
        """Parse a command line; raise what ``parse_command_line`` raises."""
        return parse_command_line(
            arguments, environment, self.program, repositories=self.repositories, address=self.address
        )


NERITE = Manner(
    "nerite serve", "nerite serve [flags] [repository ...]", repositories=True, brief=True, address="127.0.0.1"
)
TRITON = Manner("tritonserver", "tritonserver [options]", repositories=False, brief=False, address="0.0.0.0")


def run(arguments: Sequence[str], manner: Manner = NERITE) -> int:
    """Serve until shut down; return the exit status. It is 1 for an invalid command line, as in Triton."""
    try:
        command = manner.parse(arguments, os.environ)
        log.configure(command.options.log)
    except HelpRequested:
        if manner.brief:
            show(usage(manner.synopsis))
            return 0
        print(usage(manner.synopsis), file=sys.stderr)
        return 1
    except UsageError as error:
        print(complaint(error, manner), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write the log file '{error.filename}': {error.strerror}", file=sys.stderr)
        return 1
    _log_warnings(command)
    install_logging(log)
    # Imported here so that --help and invalid flags are answered without loading the server.
    from nerite.server_process import run as run_server

    return run_server(command.options)


def complaint(error: UsageError, manner: Manner) -> str:
    """Return the text to print for an invalid command line, in the order in which Triton prints it."""
    text = "\n".join(filter(None, (error.text, error.remedy)))
    if not error.usage:
        return text
    if manner.brief:
        return f"{text}\n\nUsage: {manner.synopsis}\nAll flags: {manner.program} --help"
    help_text = usage(manner.synopsis)
    return f"{error.text}\n{help_text}\n\n{error.remedy}" if error.early else f"{help_text}\n\n{text}\n"


def _log_warnings(command: CommandLine) -> None:
    for warning in command.warnings:
        # Printed as Triton prints them, unless every line of the log must be a JSON object.
        if log.format == "json":
            log.warning(warning.removeprefix("Warning: "))
        else:
            print(warning, file=sys.stderr)
    if command.idle:
        names = ", ".join(f"--{flag.name} ({flag.accepted})" for flag in command.idle)
        log.warning(f"flags that have no effect in this version: {names}")
