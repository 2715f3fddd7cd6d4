"""``nerite background``: shows the loops beside the requests, and retries or discards what they have set aside."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nerite.cli.command import UsageError, new_parser, show, show_json, show_table, status_of
from nerite.client import Client, ClientError
from nerite.tools.connection import add_connection, connected

_EPILOG: Final = """\
Loops, units and what to do are described in docs/background.md. LOOP and UNIT are names as list prints them. Where
there are tenants, a server asks for the keys of the categories statistics (list) and model-repository (retry, discard),
and a router for its admin-key.

The exit status of list is 1 if a loop is stalled or has set something aside.

Examples:
  nerite background
  nerite background --url gpu-3:8000 --header 'X-Admin-Key: sesame' --json
  nerite background retry batches batch_68a1
  nerite background retry --all
  nerite background discard batches --all
"""
_COMMANDS: Final = ("list", "retry", "discard")
_LOOPS: Final = ("Loop", "State", "Waiting", "Failures", "Restarts", "Set aside")
_UNITS: Final = ("Loop", "Unit", "Tenant", "Since", "Error")


def run(arguments: Sequence[str]) -> int:
    """List the loops, or retry or discard what they have set aside; return the exit status."""
    return status_of("nerite background", lambda: _background(_parser().parse_intermixed_args(arguments)), ClientError)


def _parser() -> argparse.ArgumentParser:
    about = "Show the loops beside the requests of a server or router, and retry or discard what they have set aside."
    parser = new_parser("nerite background", about, _EPILOG)
    parser.add_argument(
        "command", metavar="COMMAND", nargs="?", choices=_COMMANDS, default="list", help="list, retry or discard"
    )
    parser.add_argument("loop", metavar="LOOP", nargs="?", default="", help="name of a loop")
    parser.add_argument("unit", metavar="UNIT", nargs="?", default="", help="what it has set aside")
    parser.add_argument("--all", action="store_true", help="retry or discard everything, or everything of LOOP")
    parser.add_argument("--json", action="store_true", help="print the loops as JSON")
    add_connection(parser)
    return parser


def _background(options: argparse.Namespace) -> int:
    if options.command == "list":
        if options.loop or options.all:
            raise UsageError("list takes no LOOP, and no --all")
    elif bool(options.unit) == options.all:
        raise UsageError(f"{options.command} takes LOOP and UNIT, or --all with or without LOOP")
    with connected(options) as client:
        if options.command == "list":
            return _list(client.background(), as_json=options.json)
        act = client.retry_unit if options.command == "retry" else client.discard_unit
        wanted = _set_aside(client, options.loop) if options.all else iter([(options.loop, options.unit)])
        for loop, unit in wanted:
            told = act(loop, unit)
            done = "is tried again" if options.command == "retry" else "was discarded"
            show_json(told) if options.json else show(f"{loop}: {unit} {done}")
    return 0


def _set_aside(client: Client, loop: str) -> Iterator[tuple[str, str]]:
    """Yield loop and unit of everything that is set aside now, each once; an answer lists a part of them."""
    seen: set[tuple[str, str]] = set()
    while True:
        found = [
            (each["name"], letter["unit"])
            for each in client.background()
            for letter in each["dead_letters"]
            if loop in ("", each["name"])
        ]
        new = [each for each in dict.fromkeys(found) if each not in seen]
        if not new:
            return
        seen.update(new)
        yield from new


def _list(loops: Sequence[Mapping[str, Any]], *, as_json: bool) -> int:
    if as_json:
        show_json(loops)
    else:
        show_table(_LOOPS, [_row(each) for each in loops])
        problems = [f"{_name(each)}: {each['problem']}" for each in loops if each["problem"]]
        if units := [row for each in loops for row in _unit_rows(each)]:
            show_table(_UNITS, units)
        if problems:
            show("\n".join(problems))
    return int(any(each["state"] == "stalled" or each["set_aside"] for each in loops))


def _name(loop: Mapping[str, Any]) -> str:
    return f"{loop['name']} ({loop['about']})" if loop["about"] else str(loop["name"])


def _row(loop: Mapping[str, Any]) -> list[str]:
    figures = [loop[name] for name in ("waiting", "failures", "restarts", "set_aside")]
    return [_name(loop), str(loop["state"]), *map(str, figures)]


def _unit_rows(loop: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each unit that was set aside, and then for each that fails and is tried again."""
    for letter in loop["dead_letters"]:
        yield [loop["name"], *(letter[name] for name in ("unit", "tenant", "time", "text"))]
    for failing in loop["failing"]:
        yield [loop["name"], failing["unit"], "", "is tried again", failing["text"]]
