"""``nerite environments`` lists and removes environments created for models; ``nerite engines`` installs engines."""

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
from nerite.cli.command import UsageError, new_parser, show, show_table, status_of
from nerite.config.loading import poll_model_directory
from nerite.config.mistake import mistake_text
from nerite.config.options import ServerOptions
from nerite.core.errors import InvalidArgument
from nerite.llm import installation
from nerite.llm.selection import EXTRA, here
from nerite.repository.repositories import LocalRepository
from nerite.tools.add.destination import add_repositories, repositories_of, repository_at

_EPILOG = """\
Loading a model whose EXECUTION_ENV_PATH is an archive or a list of packages creates an environment. It is reused for
models with the same content and is removed only by this command, which never removes one that a running server uses.
Converted checkpoints of language models are listed and removed in the same way. With --create, the environments and
conversions of the models in a repository are made without serving them, as when an image is built.

Examples:
  nerite environments
  nerite environments --create ./models
  nerite environments --remove --unused-for 30
"""
_HEADINGS = ("Environment", "MB", "Unused for", "Created from")
_DAY = 24 * 3600.0


def run_environments(arguments: Sequence[str]) -> int:
    """List or remove environments; return the exit status."""
    return status_of("nerite environments", lambda: _list_or_remove(_parser().parse_args(arguments)))


def _list_or_remove(options: argparse.Namespace) -> int:
    setting = options.environment_directory or os.environ.get("NERITE_ENVIRONMENT_DIRECTORY", "")
    repositories = repositories_of(options)
    if options.create:
        wanted = [*map(Path, repositories)] or [repository_at("", os.environ)]
        return _create(wanted, setting, options.backend_directory)
    if repositories:
        raise UsageError(f"nothing is to be done with {repositories[0]}.", remedy="Add --create.")
    place = environments_folder(setting)
    now = time.time()
    found = [kept for kept in list_environments(place) if now - kept.used >= options.unused_for * _DAY]
    if options.remove:
        for kept in found:
            print(f"removed {kept.directory}" if remove_environments(kept) else f"in use  {kept.directory}")
    elif found:
        show_table(_HEADINGS, [_row(kept, now) for kept in found])
    else:
        print(f"No environments in {place}.")
    return 0


def _create(repositories: Sequence[Path], setting: str, backends: str) -> int:
    """Make the environments of the models in repositories. Raises ``NeriteError`` for the first that cannot be made."""
    from nerite.tools.check import LocalModel  # imports everything that a server has

    for repository in repositories:
        for name in LocalRepository(str(repository)).models():
            polled = poll_model_directory(repository / name)
            if polled.mistakes:
                raise InvalidArgument("\n".join(mistake_text(polled.mistakes)))
            model = LocalModel(repository / name, backends, setting)
            with _log_to_stderr():
                made = {model.prepare(polled.config, version) for version in polled.versions}
            for interpreter in sorted(filter(None, made)):
                show(f"{name}: {interpreter.parents[1]}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "nerite environments", "List the Python environments created for models, and remove old ones.", _EPILOG
    )
    create = "make the environments of the models in repositories, and print them"
    parser.add_argument("--create", action="store_true", help=create)
    add_repositories(parser, "with --create: the repositories")
    parser.add_argument(
        "--backend-directory",
        metavar="PATH",
        default=ServerOptions().backend_directory,
        help="with --create: directory of backends written in Python (default: %(default)s)",
    )
    parser.add_argument("--remove", action="store_true", help="remove the environments, except those in use")
    parser.add_argument(
        "--unused-for",
        type=float,
        metavar="DAYS",
        default=0,
        help="list or remove only those in which no model was loaded for this long",
    )
    _add_directory(parser)
    return parser


def _add_directory(parser: argparse.ArgumentParser) -> None:
    place = "directory of the environments (default: $NERITE_ENVIRONMENT_DIRECTORY, or else one in the user's cache)"
    parser.add_argument("--environment-directory", metavar="PATH", default="", help=place)


def _row(kept: KeptEnvironment, now: float) -> tuple[str, ...]:
    unused = f"{(now - kept.used) / _DAY:.1f} days"
    return (kept.directory.name[:16], f"{kept.size / 1e6:.0f}", unused, kept.origin or "(not finished)")


# ``nerite engines``.

_ENGINES_EPILOG = """\
An engine that cannot share the server's Python is installed in its own environment, which all models share.
`nerite environments` lists and removes these environments.

Examples:
  nerite engines list
  nerite engines install vllm
  nerite engines install openvino-export
"""
_ENGINES_HEADINGS = ("Name", "Description", "Location")


def run_engines(arguments: Sequence[str]) -> int:
    """List or install engines; return the exit status."""
    return status_of("nerite engines", lambda: _list_or_install(_engines_parser().parse_args(arguments)))


def _list_or_install(options: argparse.Namespace) -> int:
    place = environments_folder(options.environment_directory or os.environ.get("NERITE_ENVIRONMENT_DIRECTORY", ""))
    if options.action == "list":
        show_table(_ENGINES_HEADINGS, _rows(place))
        return 0
    wanted = installation.named(options.name)
    with _log_to_stderr():
        made = installation.made(wanted, place)
    show(f"{wanted.name} is installed in {made.parents[1]}")
    return 0


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Print log messages to stderr in the ``with`` block."""
    log, handler = logging.getLogger("nerite"), logging.StreamHandler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _rows(place: Path) -> list[tuple[str, str, str]]:
    own = f"{sys.prefix} (the server's)" if here("openvino_genai") else f"not installed: pip install '{EXTRA}'"
    rows = [("openvino_genai", "the engine openvino_genai, for CPUs", own)]
    for each in installation.installations():
        interpreter = installation.found(each, place)
        where = f"not installed: {each.command}" if interpreter is None else str(interpreter.parents[1])
        rows.append((each.name, each.purpose, where))
    return rows


def _engines_parser() -> argparse.ArgumentParser:
    parser = new_parser("nerite engines", "List and install engines for language models.", _ENGINES_EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list the engines and where they are installed")
    install = actions.add_parser("install", help="install an engine in its own environment")
    install.add_argument("name", metavar="NAME", help=", ".join(each.name for each in installation.installations()))
    for each in (listing, install):
        _add_directory(each)
    return parser
