"""``nerite engines``: which engines for language models there are, and the installation of those apart."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nerite.backends.llm import installation
from nerite.backends.llm.choice import EXTRA, here
from nerite.backends.python.environment_store import folder
from nerite.cli.command import new_parser, show, show_table, status_of

_EPILOG = """\
An engine that cannot share the server's Python has an environment of its own, which is made once and used by all
models. `nerite environments` lists and removes them.

Examples:
  nerite engines list
  nerite engines install vllm
  nerite engines install openvino-export
"""
_HEADINGS = ("Name", "What it is", "Where")


def run(arguments: Sequence[str]) -> int:
    """List or install engines; return the exit status."""
    return status_of("nerite engines", lambda: _list_or_install(_parser().parse_args(arguments)))


def _list_or_install(options: argparse.Namespace) -> int:
    place = folder(options.environment_directory or os.environ.get("NERITE_ENVIRONMENT_DIRECTORY", ""))
    if options.action == "list":
        show_table(_HEADINGS, _rows(place))
        return 0
    wanted = installation.named(options.name)
    with _log_shown():
        made = installation.made(wanted, place)
    show(f"{wanted.name} is in {made.parents[1]}")
    return 0


@contextmanager
def _log_shown() -> Iterator[None]:
    """Show what is logged meanwhile."""
    log, shown = logging.getLogger("nerite"), logging.StreamHandler()
    level = log.level
    log.addHandler(shown)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(shown)
        log.setLevel(level)


def _rows(place: Path) -> list[tuple[str, str, str]]:
    own = f"{sys.prefix} (the server's)" if here("openvino_genai") else f"not installed: pip install '{EXTRA}'"
    rows = [("openvino_genai", "the engine openvino_genai, for processors", own)]
    for each in installation.installations():
        interpreter = installation.found(each, place)
        where = f"not installed: {each.command}" if interpreter is None else str(interpreter.parents[1])
        rows.append((each.name, each.purpose, where))
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite engines", "List the engines for language models, and install them.", _EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="say which there are, and where they are installed")
    install = actions.add_parser("install", help="make the environment of one")
    install.add_argument("name", metavar="NAME", help=", ".join(each.name for each in installation.installations()))
    for each in (listing, install):
        each.add_argument(
            "--environment-directory",
            metavar="PATH",
            default="",
            help="where environments are kept, if that is not in the user's directory of caches",
        )
    return parser
