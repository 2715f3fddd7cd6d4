"""The command line of ``nerite client``: where the server is, and which of the commands is meant."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from nerite.cli.client.connection import add_connection, connected
from nerite.cli.command import new_parser, status_of
from nerite.cli.suggestion import did_you_mean
from nerite.client import ClientError

COMMANDS = {
    "ls": "list models, their versions and states",
    "infer": "run a model",
    "load": "load a model, or load it again",
    "unload": "unload a model",
    "stats": "what was counted about each model since it was loaded",
    "watch": "requests a second, and how long they took, until Ctrl-C",
}
"""Name and purpose of each command. ``nerite.cli.client.<name>`` is its module: ``add_arguments``, ``run``."""

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
    module = importlib.import_module(f"nerite.cli.client.{options.command}")
    description = (module.__doc__ or "").partition(": ")[2]
    command = new_parser(f"nerite client {options.command}", description, module.EXAMPLES)
    module.add_arguments(command)
    # These may stand behind the command as well; what is not there leaves what was before it.
    add_connection(command)
    options.run = module.run
    return command.parse_intermixed_args(options.rest, options)
