"""``nerite rm``: takes a model, or a version of it, out of a repository."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from nerite.artifacts.artifact import size_of
from nerite.cli.help import show
from nerite.cli.progress import megabytes
from nerite.core.errors import NeriteError
from nerite.intake.destination import DEFAULT, repository_at
from nerite.intake.removal import remove, to_remove

_EPILOG = """\
It is gone at once for a server that looks at the repository. A server in the control mode 'poll' unloads it then; one
in the mode 'explicit' goes on with it until: nerite client unload NAME

Examples:
  nerite rm detector
  nerite rm detector --version 1 --repository /srv/models --yes
"""


def run(arguments: Sequence[str]) -> int:
    """Remove what is named; return the exit status."""
    try:
        options = _parser().parse_args(list(arguments))
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 2
    try:
        repository = repository_at(options.repository, os.environ)
        directory = to_remove(repository, options.name, options.version)
        if not options.yes and not _agreed(f"{directory}, {megabytes(size_of(directory))}"):
            return 1
        remove(repository, directory)
    except NeriteError as error:
        print(f"nerite rm: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    show(f"Removed {directory}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nerite rm",
        description="Take a model, or a version of it, out of a repository.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="the model")
    parser.add_argument("--version", metavar="N", type=int, help="this version alone")
    default = f"the model repository (default: $NERITE_MODEL_REPOSITORY, else {DEFAULT})"
    parser.add_argument("--repository", metavar="DIRECTORY", default="", help=default)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _agreed(what: str) -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(f"nerite rm: nobody can be asked whether to remove {what}.\n    Say --yes.", file=sys.stderr)
        return False
    return input(f"Remove {what}? [y/N] ").strip().lower() in ("y", "yes")
