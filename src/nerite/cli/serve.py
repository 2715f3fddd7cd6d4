"""``nerite serve`` and ``tritonserver``: parse the command line, configure the log, run the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from nerite.cli.command import UsageError, show
from nerite.cli.command_line import NERITE, CommandLine, EntryPoint, HelpRequested, parse_command_line, usage
from nerite.observability.log import install_logging, log


def run(arguments: Sequence[str], entry: EntryPoint = NERITE) -> int:
    """Serve until shut down; return the exit status. It is 1 for an invalid command line, as in Triton."""
    try:
        command = parse_command_line(arguments, os.environ, entry)
        log.configure(command.options.log)
    except HelpRequested:
        if entry.brief:
            show(usage(entry.synopsis))
            return 0
        print(usage(entry.synopsis), file=sys.stderr)
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
    help_text = usage(entry.synopsis)
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
