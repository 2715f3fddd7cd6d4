"""``nerite environments``: those that were made for models and are kept, and the removal of old ones."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

from nerite.backends.python.environment_store import Kept, folder, listed, removed
from nerite.cli.command import new_parser, show_table, status_of

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


def run(arguments: Sequence[str]) -> int:
    """List or remove environments; return the exit status."""
    return status_of("nerite environments", lambda: _list_or_remove(_parser().parse_args(arguments)))


def _list_or_remove(options: argparse.Namespace) -> int:
    place = folder(options.environment_directory or os.environ.get("NERITE_ENVIRONMENT_DIRECTORY", ""))
    now = time.time()
    found = [kept for kept in listed(place) if now - kept.used >= options.unused_for * _DAY]
    if options.remove:
        for kept in found:
            print(f"removed {kept.directory}" if removed(kept) else f"in use  {kept.directory}")
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


def _row(kept: Kept, now: float) -> tuple[str, ...]:
    unused = f"{(now - kept.used) / _DAY:.1f} days"
    return (kept.directory.name[:16], f"{kept.size / 1e6:.0f}", unused, kept.origin or "(not finished)")
