"""``nerite client``: its command line, and most of its commands."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from nerite.cli.command import (
    UsageError,
    add_repeated,
    did_you_mean,
    new_parser,
    show,
    show_json,
    show_table,
    status_of,
)
from nerite.client import Client, ClientError, ModelStatistics
from nerite.core.text import render_table, terminal_width
from nerite.tools.client_infer import EXAMPLES, add_infer, content, run_infer
from nerite.tools.connection import add_connection, connected

COMMANDS = {
    "ls": "list models, their versions and states",
    "infer": "run a model",
    "load": "load or reload a model",
    "unload": "unload a model",
    "stats": "show statistics of each model since it was loaded",
    "watch": "show request rates and latencies until Ctrl-C",
}
"""Name and purpose of each command."""

_EPILOG = """\
commands:
{commands}

Works with any server that speaks the KServe v2 protocol over HTTP, such as Nerite and Triton.
The exit status is 0 for success, 1 if the server rejects the request or cannot be reached, 2 for an invalid command
line, 130 after Ctrl-C.

Examples:
  nerite client ls
  nerite client --url gpu-3:8000 infer scaler numbers='[1, 2, 3]'
  nerite client infer chat prompt='How are you?' --header 'Authorization: Bearer TOKEN'
  nerite client infer resnet --random
  nerite client stats

Help on a command:  nerite client infer --help
"""


def run(arguments: Sequence[str]) -> int:
    """Run the command that the command line names; return the exit status."""
    return status_of("nerite client", lambda: _run(_parse(arguments)), ClientError)


def _run(options: argparse.Namespace) -> int:
    with connected(options) as client:
        status: int = options.run(client, options)
        return status


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:{width}}{purpose}" for name, purpose in COMMANDS.items())
    usage = "nerite client [options] COMMAND ..."
    parser = new_parser("nerite client", "Query a running server.", _EPILOG.format(commands=commands), usage)
    add_connection(parser)
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(list(arguments) or ["--help"])
    if options.command is None:
        parser.error(f"a command is required: {', '.join(COMMANDS)}")
    if options.command not in COMMANDS:
        near = did_you_mean(options.command, COMMANDS)
        parser.error(" ".join(filter(None, (f"unknown command '{options.command}'.", near))))
    description, examples, add_arguments, run_command = _COMMANDS[options.command]
    command = new_parser(f"nerite client {options.command}", description, examples)
    add_arguments(command)
    # Connection options may also follow the command; those that do not keep the values given before it.
    add_connection(command, url=None)
    options.run = run_command
    return command.parse_intermixed_args(options.rest, options)


LOAD_EXAMPLES = """\
Examples:
  nerite client load scaler
  nerite client load scaler --config '{"max_batch_size": 16}'
  nerite client load scaler --config @scaler.json --file 1/model.py=new/model.py
"""


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--config", metavar="JSON", help="use this instead of config.pbtxt: JSON, or @FILE")
    file = "serve FILE as PATH in the model's directory, whose other files are not used; requires --config"
    add_repeated(parser, "--file", "PATH=FILE", file)


def run_load(client: Client, options: argparse.Namespace) -> int:
    """Load the model; return the exit status."""
    config = options.config
    if config is not None and config.startswith("@"):
        config = content(config[1:]).decode(errors="replace")
    client.load(options.model, config=config, files=dict(map(_file, options.file)))
    show(f"{options.model} is loaded.")
    return 0


def _file(word: str) -> tuple[str, bytes]:
    path, equals, file = word.partition("=")
    if not equals:
        raise UsageError(
            f"'{word}' is not of the form PATH=FILE.", remedy="Write for example: --file 1/model.py=model.py"
        )
    return path, content(file)


LS_EXAMPLES = """\
Examples:
  nerite client ls
  nerite client ls --json
"""


def add_ls(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run_ls(client: Client, options: argparse.Namespace) -> int:
    """Print the repository index; return the exit status."""
    versions = client.models()
    if options.json:
        show_json([asdict(version) for version in versions])
    elif versions:
        rows = [(entry.name, entry.version, entry.state or "not loaded", entry.reason) for entry in versions]
        show_table(("Model", "Version", "State", "Reason"), rows)
    else:
        show("The repository is empty.")
    return 0


STATS_EXAMPLES = """\
Queue and compute times are means over requests. A batch is a set of requests that were executed together.

Examples:
  nerite client stats
  nerite client stats scaler --json
"""
_HEADINGS = ("Model", "Version", "Requests", "Failures", "Queue ms", "Compute ms", "Mean batch")


def add_stats(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="show only this model")
    parser.add_argument("--json", action="store_true", help="print all statistics as a JSON list, times in nanoseconds")


def run_stats(client: Client, options: argparse.Namespace) -> int:
    """Print the statistics; return the exit status."""
    found = client.statistics(options.model)
    if options.json:
        show_json([asdict(version) for version in found])
    else:
        show_table(_HEADINGS, [_row(version) for version in found])
    return 0


def _row(version: ModelStatistics) -> tuple[str, ...]:
    return (
        version.name,
        version.version,
        str(version.requests),
        str(version.fail.count),
        f"{version.queue.mean_ms:.3f}",
        f"{version.mean_compute_ms:.3f}",
        f"{version.mean_batch:.1f}",
    )


UNLOAD_EXAMPLES = """\
Examples:
  nerite client unload scaler
  nerite client unload an_ensemble --dependents
"""


def add_unload(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--dependents", action="store_true", help="also unload the models that were loaded for it")


def run_unload(client: Client, options: argparse.Namespace) -> int:
    """Unload the model; return the exit status."""
    client.unload(options.model, dependents=options.dependents)
    show(f"{options.model} is being unloaded.")
    return 0


WATCH_EXAMPLES = """\
On a terminal the table is updated in place. Otherwise one line is printed for each model that was used.

Examples:
  nerite client watch
  nerite client watch scaler --interval 10 >> scaler.log
"""
_WATCH_HEADINGS = ("Model", "Version", "Requests/s", "Failures/s", "Queue ms", "Compute ms", "Mean batch")


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="show only this model")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=1.0, help="time between updates (default: 1)"
    )
    parser.add_argument("--count", metavar="N", type=int, default=0, help="stop after N intervals")


def run_watch(client: Client, options: argparse.Namespace) -> int:
    """Print the statistics of each interval; return the exit status."""
    height = 0
    before, began = client.statistics(options.model), time.monotonic()
    intervals = 0
    try:
        while not options.count or intervals < options.count:
            time.sleep(options.interval)
            after, ended = client.statistics(options.model), time.monotonic()
            changes = between(before, after)
            if sys.stdout.isatty():
                text = frame(changes, ended - began, terminal_width())
                show(f"\x1b[{height}F\x1b[J{text}" if height else text)
                height = text.count("\n") + 1
            else:
                show(lines(changes, ended - began, time.strftime("%H:%M:%S")))
            before, began = after, ended
            intervals += 1
    except KeyboardInterrupt:
        pass
    return 0


def between(before: Sequence[ModelStatistics], after: Sequence[ModelStatistics]) -> list[ModelStatistics]:
    """Return the difference of two snapshots, for each version in the second."""
    earlier = {(version.name, version.version): version for version in before}
    return [version.since(earlier.get((version.name, version.version))) for version in after]


def frame(happened: Sequence[ModelStatistics], seconds: float, width: int) -> str:
    """Return the statistics of an interval of ``seconds`` as a table."""
    return render_table(
        _WATCH_HEADINGS, [(version.name, version.version, *_cells(version, seconds)) for version in happened], width
    )


def lines(happened: Sequence[ModelStatistics], seconds: float, clock: str) -> str:
    """Return the statistics of an interval as one line per version that had requests, or a line that says none did."""
    rows = []
    for version in happened:
        if version.requests:
            requests, failures, queue, compute, batch = _cells(version, seconds)
            rows.append(
                f"{clock} {version.name} {version.version}: {requests} requests/s, {failures} failures/s, "
                f"queue {queue} ms, compute {compute} ms, batch {batch}"
            )
    return "\n".join(rows) or f"{clock} no requests"


def _cells(version: ModelStatistics, seconds: float) -> tuple[str, str, str, str, str]:
    return (
        f"{version.requests / seconds:.1f}",
        f"{version.fail.count / seconds:.1f}",
        f"{version.queue.mean_ms:.3f}",
        f"{version.mean_compute_ms:.3f}",
        f"{version.mean_batch:.1f}",
    )


_COMMANDS: Final = {
    "ls": ("List the models of the repository, their versions and states.", LS_EXAMPLES, add_ls, run_ls),
    "infer": ("Run a model and print its outputs.", EXAMPLES, add_infer, run_infer),
    "load": (
        "Load or reload a model, and wait until it is ready.\n\n"
        "The server must run with --model-control-mode=explicit.",
        LOAD_EXAMPLES,
        add_load,
        run_load,
    ),
    "unload": (
        "Unload a model after its pending requests have finished.\n\n"
        "The server must run with --model-control-mode=explicit.",
        UNLOAD_EXAMPLES,
        add_unload,
        run_unload,
    ),
    "stats": (
        "Show statistics of each model version since it was loaded.",
        STATS_EXAMPLES,
        add_stats,
        run_stats,
    ),
    "watch": (
        "Show request rates and latencies at regular intervals until Ctrl-C.",
        WATCH_EXAMPLES,
        add_watch,
        run_watch,
    ),
}
"""Description, examples, argument definitions and implementation of each command."""
