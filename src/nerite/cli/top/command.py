"""What ``nerite top`` does: looks at the server, shows what happened, and obeys keys."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from nerite.cli.client.connection import add_connection, connected
from nerite.cli.command import new_parser, show, show_json, status_of, write
from nerite.cli.top.happening import ORDERS, Happening, Look, between, ordered, whole
from nerite.cli.top.keyboard import Keyboard
from nerite.cli.top.screen import KEYS, frame, table
from nerite.client import Client, ClientError
from nerite.client.address import Address
from nerite.client.error import Unreachable

_PROGRAM: Final = "nerite top"
_METRICS_PORT: Final = 8002
_FIRST: Final = 0.3
"""Seconds until there is something to see."""
_EPILOG: Final = """\
Keys: q ends, n r f l w m sort by name, requests, failures, p99, queue, memory.
Without a terminal, or with --once, it looks twice and prints a table.

It reads the repository index and the page of metrics, so it works with Triton as well, but for what only Nerite tells:
percentiles, memory and restarts. `nerite client watch` needs no metrics, and writes lines for a log.

Examples:
  nerite top
  nerite top resnet --sort p99
  nerite top --url gpu-3:8000 --once --json
"""


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    return status_of(_PROGRAM, lambda: _top(_parse(arguments)), ClientError)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = new_parser(_PROGRAM, "Show what a running server does, once a second.", _EPILOG)
    parser.add_argument("model", metavar="NAME", nargs="?", default="", help="only models with this in their names")
    parser.add_argument("--interval", metavar="SECONDS", type=_seconds, default=1.0, help="default: 1")
    parser.add_argument("--sort", choices=("name", *ORDERS), default="requests", help="default: requests")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--json", action="store_true", help="with --once: a list with all figures")
    add_connection(parser, url="localhost:8000")
    parser.add_argument(
        "--metrics-url", metavar="URL", default="", help=f"of the page of metrics (default: port {_METRICS_PORT})"
    )
    return parser.parse_args(list(arguments))


def _seconds(text: str) -> float:
    seconds = float(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait")
    return seconds


def _top(options: argparse.Namespace) -> int:
    address = Address.parse(options.url)
    metrics = Address.parse(options.metrics_url) if options.metrics_url else address._replace(port=_METRICS_PORT)
    with (
        connected(options) as client,
        Client(str(metrics), headers=dict(options.header), timeout=options.timeout) as counted,
    ):
        window = _Window(client, counted, options)
        if options.once or options.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            window.once()
        else:
            window.stay(str(address))
    return 0


class _Window:
    """The server as it is seen."""

    def __init__(self, client: Client, metrics: Client, options: argparse.Namespace) -> None:
        self._client = client
        self._metrics = metrics
        self._options = options
        self._sort: str = options.sort

    def once(self) -> None:
        """Print what happens in one interval."""
        first = self._look()
        time.sleep(self._options.interval)
        happened = self._between(first, self._look())
        if self._options.json:
            show_json([asdict(each) for each in happened])
        else:
            show("\n".join(table(happened)))

    def stay(self, server: str) -> None:
        """Show it until whoever looks wants no more."""
        before = after = self._look()
        lost = ""
        with Keyboard() as keyboard, contextlib.suppress(KeyboardInterrupt):
            pressed = keyboard.key(min(self._options.interval, _FIRST))
            while pressed != "q":
                self._sort = KEYS.get(pressed, self._sort)
                if not pressed:
                    try:
                        before, after, lost = after, self._look(), ""
                    except ClientError as error:  # it may come back: what was last seen stays, and the reason
                        lost = str(error).partition("\n")[0]
                if after.at > before.at:
                    happened = self._between(before, after)
                    size = shutil.get_terminal_size()
                    write(frame(server, whole(happened, after), table(happened), (size[0], size[1]), self._sort, lost))
                pressed = keyboard.key(self._options.interval)

    def _between(self, before: Look, after: Look) -> list[Happening]:
        return ordered(between(before, after), self._sort)

    def _look(self) -> Look:
        models = [each for each in self._client.models() if self._options.model in each.name]
        try:
            return Look(time.monotonic(), models, self._metrics.metrics())
        except Unreachable as error:
            remedy = "Its metrics should be there. Say where they are with --metrics-url HOST:PORT."
            raise ClientError(f"{error}\n    {remedy}") from error
