"""What the commands have in common: the form of their help, their exit status, what they say and to whom."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from nerite.cli.usage_error import UsageError
from nerite.core.errors import NeriteError
from nerite.intake.destination import DEFAULT, repository_at
from nerite.observability.table import render, terminal_width


def new_parser(program: str, description: str, epilog: str, usage: str | None = None) -> argparse.ArgumentParser:
    """Return a parser without arguments, whose help ends with ``epilog`` as it is written."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=program, usage=usage, description=description, epilog=epilog, formatter_class=formatter
    )


def add_repository(
    parser: argparse._ActionsContainer,
    name: str = "--repository",
    metavar: str = "DIRECTORY",
    nargs: Literal["?"] | None = None,
) -> None:
    """Add the argument ``name``, which ``repository_of`` reads."""
    where = f"the model repository (default: $NERITE_MODEL_REPOSITORY, else {DEFAULT})"
    parser.add_argument(name, metavar=metavar, nargs=nargs, default="", help=where)


def repository_of(options: argparse.Namespace) -> Path:
    """Return the repository that is named, or meant. Raises ``InvalidArgument`` for one that is no directory."""
    return repository_at(options.repository, os.environ)


def status_of(program: str, act: Callable[[], int], refusal: type[Exception] = NeriteError) -> int:
    """Do what a command does; return its exit status, and complain if it is not done.

    It is 1 for a ``NeriteError`` or a ``refusal``, 2 for a wrong command line, 130 after Ctrl-C.
    """
    try:
        return act()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 2
    except UsageError as error:
        complain(program, error.text, error.remedy)
        return 2
    except (NeriteError, refusal) as error:
        complain(program, str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def complain(program: str, text: str, remedy: str = "") -> None:
    """Print to stderr what is wrong, and below it what cures it."""
    print("\n    ".join(filter(None, (f"{program}: {text}", remedy))), file=sys.stderr)


def show(text: str) -> None:
    """Print to stdout. A reader that has seen enough (head, less) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        fall_silent()


def write(text: str) -> None:
    """Print to stdout as it is, at once, and without the end of a line."""
    print(text, end="", flush=True)


def fall_silent() -> None:
    """Have nothing more written to stdout, whose reader has gone: not even what is flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_json(document: object, *, one_line: bool = False) -> None:
    """Print a document for programs."""
    show(json.dumps(document, indent=None if one_line else 2, ensure_ascii=False))


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table that is no wider than the terminal."""
    show(render(headings, rows, terminal_width()))


def somebody_is_there() -> bool:
    """Return whether a question would be seen, and could be answered."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def agreed(question: str, *, otherwise: bool) -> bool:
    """Ask whoever is there; an empty answer means ``otherwise``."""
    answer = input(f"{question} {'[Y/n]' if otherwise else '[y/N]'} ").strip().lower()
    return answer in ("y", "yes") or (otherwise and not answer)
