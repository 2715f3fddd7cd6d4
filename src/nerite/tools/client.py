"""The command line of ``nerite client``: where the server is, and which of the commands is meant."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final

from nerite.cli.command import new_parser, show, show_json, show_table, status_of
from nerite.cli.errors import UsageError, did_you_mean
from nerite.client import Client, ClientError, ModelStatistics
from nerite.client.connection import Unreachable
from nerite.observability.log_records import render, terminal_width
from nerite.tools.client_infer import EXAMPLES, add_infer, content, run_infer

# The options of every command that asks a server: where it is, and what goes with each request.


def add_connection(parser: argparse.ArgumentParser, url: str | None = None) -> None:
    """Add the options, with ``url`` for where the server is. Without that, what is not given leaves no trace."""
    group = parser.add_argument_group("the server")
    where = "HOST:PORT of its HTTP port, or a URL (default: localhost:8000)"
    group.add_argument("--url", metavar="URL", default=argparse.SUPPRESS, help=where)
    group.add_argument(
        "--header",
        metavar="'NAME: VALUE'",
        action="append",
        type=_header,
        default=argparse.SUPPRESS,
        help="a header for each request; may be given several times",
    )
    limit = "how long to wait for an answer (default: 60)"
    group.add_argument("--timeout", metavar="SECONDS", type=float, default=argparse.SUPPRESS, help=limit)
    if url is not None:
        parser.set_defaults(url=url, header=[], timeout=60.0)


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[Client]:
    """Yield a client of the server that the options name. Where nobody is there, what is raised says what to do."""
    with remedied("HTTP"), Client(options.url, headers=dict(options.header), timeout=options.timeout) as client:
        yield client


@contextmanager
def remedied(port: str) -> Iterator[None]:
    """Say what to do where a server cannot be reached. ``port``: what its port has to be for."""
    try:
        yield
    except Unreachable as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            remedy = "Name the certificate of the authority that the server's is from: SSL_CERT_FILE=ca.pem."
        else:
            remedy = f"Is a server running there? Name another with --url HOST:PORT (the port for {port})."
        raise ClientError(f"{error}\n    {remedy}") from error


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"'{text}' is no header: write NAME: VALUE")
    return name.strip(), value.strip()


COMMANDS = {
    "ls": "list models, their versions and states",
    "infer": "run a model",
    "load": "load a model, or load it again",
    "unload": "unload a model",
    "stats": "what was counted about each model since it was loaded",
    "watch": "requests a second, and how long they took, until Ctrl-C",
}
"""Name and purpose of each command."""

_EPILOG = """\
commands:
{commands}

Works with every server that speaks KServe v2 over HTTP: Nerite, Triton, and others.
The exit status is 0 for success, 1 for a refusal or a server that cannot be reached, 2 for a wrong command line, 130
after Ctrl-C.

Examples:
  nerite client ls
  nerite client --url gpu-3:8000 infer scaler numbers='[1, 2, 3]'
  nerite client infer chat prompt='How are you?' --header 'Authorization: Bearer TOKEN'
  nerite client infer resnet --random
  nerite client stats

More about a command:  nerite client infer --help
"""


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    return status_of("nerite client", lambda: _ask(_parse(arguments)), ClientError)


def _ask(options: argparse.Namespace) -> int:
    with connected(options) as client:
        status: int = options.run(client, options)
        return status


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:{width}}{purpose}" for name, purpose in COMMANDS.items())
    usage = "nerite client [options] COMMAND ..."
    parser = new_parser("nerite client", "Ask a running server.", _EPILOG.format(commands=commands), usage)
    add_connection(parser, url="localhost:8000")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(list(arguments) or ["--help"])
    if options.command is None:
        parser.error(f"which command? One of: {', '.join(COMMANDS)}")
    if options.command not in COMMANDS:
        near = did_you_mean(options.command, COMMANDS)
        parser.error(" ".join(filter(None, (f"unknown command '{options.command}'.", near))))
    description, examples, add_arguments, run_command = _COMMANDS[options.command]
    command = new_parser(f"nerite client {options.command}", description, examples)
    add_arguments(command)
    # These may stand behind the command as well; what is not there leaves what was before it.
    add_connection(command)
    options.run = run_command
    return command.parse_intermixed_args(options.rest, options)


LOAD_EXAMPLES = """\
Examples:
  nerite client load scaler
  nerite client load scaler --config '{"max_batch_size": 16}'
  nerite client load scaler --config @scaler.json --file 1/model.py=new/model.py
"""


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--config", metavar="JSON", help="take this for config.pbtxt: JSON, or @FILE that has it")
    parser.add_argument(
        "--file",
        metavar="PATH=FILE",
        action="append",
        default=[],
        help="take FILE for the file PATH of the model's directory, and nothing else of it; needs --config; "
        "may be given several times",
    )


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
            f"'{word}' is no file of a model.", remedy="Write it as PATH=FILE, such as 1/model.py=model.py"
        )
    return path, content(file)


LS_EXAMPLES = """\
Examples:
  nerite client ls
  nerite client ls --json
"""


def add_ls(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run_ls(client: Client, options: argparse.Namespace) -> int:
    """Print the index; return the exit status."""
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
Times are means over requests: in the queue, and computed. A batch is what was executed at once.

Examples:
  nerite client stats
  nerite client stats scaler --json
"""
_HEADINGS = ("Model", "Version", "Requests", "Failures", "Queue ms", "Compute ms", "Mean batch")


def add_stats(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="this model alone")
    parser.add_argument("--json", action="store_true", help="print a JSON list of all counts, times in nanoseconds")


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
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--dependents", action="store_true", help="unload also the models that were loaded for it")


def run_unload(client: Client, options: argparse.Namespace) -> int:
    """Unload the model; return the exit status."""
    client.unload(options.model, dependents=options.dependents)
    show(f"{options.model} is being unloaded.")
    return 0


WATCH_EXAMPLES = """\
At a terminal the table stays in its place. Elsewhere there is a line for each model that was used.

Examples:
  nerite client watch
  nerite client watch scaler --interval 10 >> scaler.log
"""
_WATCH_HEADINGS = ("Model", "Version", "Requests/s", "Failures/s", "Queue ms", "Compute ms", "Mean batch")


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="this model alone")
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=1.0, help="default: 1")
    parser.add_argument("--count", metavar="N", type=int, default=0, help="end after N intervals")


def run_watch(client: Client, options: argparse.Namespace) -> int:
    """Print what happened in each interval; return the exit status."""
    height = 0
    before, began = client.statistics(options.model), time.monotonic()
    intervals = 0
    try:
        while not options.count or intervals < options.count:
            time.sleep(options.interval)
            after, ended = client.statistics(options.model), time.monotonic()
            happened = between(before, after)
            if sys.stdout.isatty():
                text = frame(happened, ended - began, terminal_width())
                show(f"\x1b[{height}F\x1b[J{text}" if height else text)
                height = text.count("\n") + 1
            else:
                show(lines(happened, ended - began, time.strftime("%H:%M:%S")))
            before, began = after, ended
            intervals += 1
    except KeyboardInterrupt:
        pass
    return 0


def between(before: Sequence[ModelStatistics], after: Sequence[ModelStatistics]) -> list[ModelStatistics]:
    """Return what was counted from one time to another, of the versions that there are at the second."""
    earlier = {(version.name, version.version): version for version in before}
    return [version.since(earlier.get((version.name, version.version))) for version in after]


def frame(happened: Sequence[ModelStatistics], seconds: float, width: int) -> str:
    """Return what happened in ``seconds`` as a table."""
    return render(
        _WATCH_HEADINGS, [(version.name, version.version, *_cells(version, seconds)) for version in happened], width
    )


def lines(happened: Sequence[ModelStatistics], seconds: float, clock: str) -> str:
    """Return what happened as a line for each version that was used; one that says so if none was."""
    said = []
    for version in happened:
        if version.requests:
            requests, failures, queue, compute, batch = _cells(version, seconds)
            said.append(
                f"{clock} {version.name} {version.version}: {requests} requests/s, {failures} failures/s, "
                f"queue {queue} ms, compute {compute} ms, batch {batch}"
            )
    return "\n".join(said) or f"{clock} no requests"


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
    "infer": ("Run a model, and print what it answers.", EXAMPLES, add_infer, run_infer),
    "load": (
        "Load a model, or load it again, and wait until it is ready.\n\n"
        "The server has to be in the control mode 'explicit'.",
        LOAD_EXAMPLES,
        add_load,
        run_load,
    ),
    "unload": (
        "Unload a model. Requests that it has are finished first.\n\n"
        "The server has to be in the control mode 'explicit'.",
        UNLOAD_EXAMPLES,
        add_unload,
        run_unload,
    ),
    "stats": (
        "Show what was counted about each version of each model since it was loaded.",
        STATS_EXAMPLES,
        add_stats,
        run_stats,
    ),
    "watch": (
        "Show requests a second, and how long they took, again and again until Ctrl-C.",
        WATCH_EXAMPLES,
        add_watch,
        run_watch,
    ),
}
"""By name: what it does, examples, its arguments, and the function that runs it."""
