"""``nerite doctor``: the parts of the examination, and how the findings are told."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from typing import Final

from nerite.cli.command import new_parser, show, show_json, status_of
from nerite.cli.doctor import access, graphics, installed, limits, listening, machine, repositories
from nerite.cli.doctor.finding import Finding, Level
from nerite.config.options import ServerOptions
from nerite.observability.table import terminal_width

_EPILOG = """\
Below each finding stands what is to be done. A warning will be in somebody's way; a problem keeps things from working.
The exit status is 0 if there is no problem, 1 if there is one, 2 for a wrong command line.

Examples:
  nerite doctor
  nerite doctor ./models --http-port 9000
  nerite doctor ./models --json
"""
_WIDEST: Final = 110


def run(arguments: Sequence[str]) -> int:
    """Examine the machine; return the exit status."""
    return status_of("nerite doctor", lambda: _examine(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite doctor", "Find what is wrong on this machine, or soon will be.", _EPILOG)
    parser.add_argument("repositories", metavar="REPOSITORY", nargs="*", help="model repositories to look at, too")
    defaults = ServerOptions()
    for service, port in (("http", defaults.http), ("grpc", defaults.grpc), ("metrics", defaults.metrics)):
        parser.add_argument(
            f"--{service}-port",
            metavar="PORT",
            type=int,
            default=port.port,
            help=f"the port that a server would have for {service}; %(default)s unless given",
        )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON list")
    return parser


def _examine(options: argparse.Namespace) -> int:
    ports = [(f"--{service}-port", getattr(options, f"{service}_port")) for service in ("http", "grpc", "metrics")]
    parts: dict[str, list[Finding]] = {
        "machine": list(machine.findings()),
        "limits": list(limits.findings()),
        "installed": list(installed.findings()),
        "ports": list(listening.findings(ports)),
        "access": list(access.findings(port for _, port in ports)),
        "gpus": list(graphics.findings()),
    }
    if options.repositories:
        parts["repositories"] = list(repositories.findings(options.repositories))
    if options.json:
        show_json([{"part": part, **each._asdict()} for part, found in parts.items() for each in found])
    else:
        show("\n".join([*(_told(part, found) for part, found in parts.items()), _summary(parts)]))
    return 1 if any(each.level is Level.PROBLEM for found in parts.values() for each in found) else 0


def _told(part: str, found: Sequence[Finding]) -> str:
    """Return a part for people."""
    width = min(terminal_width(), _WIDEST)
    lines = [part]
    for each in found:
        lines += _wrapped(each.text, f"  {each.level:9}", width)
        for line in filter(None, each.remedy.splitlines()):
            lines += _wrapped(line.strip(), " " * 13, width)
    return "\n".join(lines)


def _wrapped(text: str, first: str, width: int) -> list[str]:
    rest = " " * len(first)
    wrap = textwrap.TextWrapper(width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    wrap.break_long_words = False
    return wrap.wrap(text)


def _summary(parts: dict[str, list[Finding]]) -> str:
    levels = [each.level for found in parts.values() for each in found]
    problems, warnings = levels.count(Level.PROBLEM), levels.count(Level.WARNING)
    return f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}."


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
