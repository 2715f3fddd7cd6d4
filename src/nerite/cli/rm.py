"""``nerite rm``: takes a model, or a version of it, out of a repository."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from nerite.artifacts.artifact import size_of
from nerite.cli.command import (
    add_repository,
    agreed,
    complain,
    new_parser,
    repository_of,
    show,
    somebody_is_there,
    status_of,
)
from nerite.cli.progress import megabytes
from nerite.intake.removal import remove, to_remove

_PROGRAM = "nerite rm"
_EPILOG = """\
It is gone at once for a server that looks at the repository. A server in the control mode 'poll' unloads it then; one
in the mode 'explicit' goes on with it until: nerite client unload NAME

Examples:
  nerite rm detector
  nerite rm detector --version 1 --repository /srv/models --yes
"""


def run(arguments: Sequence[str]) -> int:
    """Remove what is named; return the exit status."""
    return status_of(_PROGRAM, lambda: _remove(_parser().parse_args(arguments)))


def _remove(options: argparse.Namespace) -> int:
    repository = repository_of(options)
    directory = to_remove(repository, options.name, options.version)
    if not options.yes and not _agreed(f"{directory}, {megabytes(size_of(directory))}"):
        return 1
    remove(repository, directory)
    show(f"Removed {directory}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(_PROGRAM, "Take a model, or a version of it, out of a repository.", _EPILOG)
    parser.add_argument("name", metavar="NAME", help="the model")
    parser.add_argument("--version", metavar="N", type=int, help="this version alone")
    add_repository(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    return parser


def _agreed(what: str) -> bool:
    if not somebody_is_there():
        complain(_PROGRAM, f"nobody can be asked whether to remove {what}.", "Say --yes.")
        return False
    return agreed(f"Remove {what}?", otherwise=False)
