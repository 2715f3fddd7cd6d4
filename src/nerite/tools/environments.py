"""``nerite environments``: those that were made for models and are kept, and the removal of old ones."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nerite.backends.python.environments import (
    KeptEnvironment,
    environments_folder,
    list_environments,
    remove_environments,
)
from nerite.cli.command import new_parser, show, show_table, status_of
from nerite.llm import installation
from nerite.llm.selection import EXTRA, here

_EPILOG = """\
An environment is made when a model is loaded whose EXECUTION_ENV_PATH is an archive or a list of packages. It is used
when a model with the same content is loaded, and removed by nobody but this command. Those that a running server uses
are never removed. So it is with checkpoints of language models that were converted: they are listed, too.

Examples:
  nerite environments
  nerite environments --remove --unused-for 30
"""
_HEADINGS = ("Environment", "MB", "Unused for", "Made of")
_DAY = 24 * 3600.0


def run_environments(arguments: Sequence[str]) -> int:
    """List or remove environments; return the exit status."""
    return status_of("nerite environments", lambda: _list_or_remove(_parser().parse_args(arguments)))


def _list_or_remove(options: argparse.Namespace) -> int:
    place = environments_folder(options.environment_directory or os.environ.get("NERITE_ENVIRONMENT_DIRECTORY", ""))
    now = time.time()
    found = [kept for kept in list_environments(place) if now - kept.used >= options.unused_for * _DAY]
    if options.remove:
        for kept in found:
            print(f"removed {kept.directory}" if remove_environments(kept) else f"in use  {kept.directory}")
    elif found:
        show_table(_HEADINGS, [_row(kept, now) for kept in found])
    else:
        print(f"There are none in {place}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "nerite environments", "List the environments that were made for models, and remove old ones.", _EPILOG
    )
    parser.add_argument("--remove", action="store_true", help="remove them, but for those in use")
    parser.add_argument(
        "--unused-for", type=float, metavar="DAYS", default=0, help="only those that no model was loaded in for so long"
    )
    parser.add_argument(
        "--environment-directory",
        metavar="PATH",
        default="",
        help="where they are kept, if that is not in the user's directory of caches",
    )
    return parser


def _row(kept: KeptEnvironment, now: float) -> tuple[str, ...]:
    unused = f"{(now - kept.used) / _DAY:.1f} days"
    return (kept.directory.name[:16], f"{kept.size / 1e6:.0f}", unused, kept.origin or "(not finished)")


# ``nerite engines``: which engines for language models there are, and the installation of those apart.

_ENGINES_EPILOG = """\
An engine that cannot share the server's Python has an environment of its own, which is made once and used by all
models. `nerite environments` lists and removes them.

Examples:
  nerite engines list
  nerite engines install vllm
  nerite engines install openvino-export
"""
_ENGINES_HEADINGS = ("Name", "What it is", "Where")


def run_engines(arguments: Sequence[str]) -> int:
    """List or install engines; return the exit status."""
    return status_of("nerite engines", lambda: _list_or_install(_engines_parser().parse_args(arguments)))


def _list_or_install(options: argparse.Namespace) -> int:
    place = environments_folder(options.environment_directory or os.environ.get("NERITE_ENVIRONMENT_DIRECTORY", ""))
    if options.action == "list":
        show_table(_ENGINES_HEADINGS, _rows(place))
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


def _engines_parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite engines", "List the engines for language models, and install them.", _ENGINES_EPILOG)
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
