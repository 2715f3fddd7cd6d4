"""What the commands have in common: the form of their help, their exit status, what they say and to whom."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from nerite.cli.errors import UsageError
from nerite.core.errors import NeriteError
from nerite.observability.log_records import render, terminal_width


def new_parser(program: str, description: str, epilog: str, usage: str | None = None) -> argparse.ArgumentParser:
    """Return a parser without arguments, whose help ends with ``epilog`` as it is written."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        prog=program, usage=usage, description=description, epilog=epilog, formatter_class=formatter
    )


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


# How far something has come, on one line of a terminal; nothing where there is no terminal.

_WIDTH: Final = 30
_EVERY: Final = 0.1
"""Seconds between two drawings."""


class ProgressBar:
    """A line on standard error, drawn again and again. A context manager, which leaves the line empty."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._drawn = 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def doing(self, what: str) -> None:
        """Say what begins now."""
        self._draw(f"{what} ...")

    def bar(self, what: str, done: int, total: int) -> None:
        """Show how many of its bytes are done."""
        if total > 0:
            self.part(what, done / total, f"of {megabytes(total)}")

    def part(self, what: str, part: float, remark: str) -> None:
        """Show how much of it is done, from 0 to 1, and a remark."""
        now = time.monotonic()
        if part < 1 and now - self._drawn < _EVERY:
            return
        self._drawn = now
        part = min(1.0, part)
        filled = round(part * _WIDTH)
        self._draw(f"{what} [{'#' * filled}{'.' * (_WIDTH - filled)}] {part:4.0%} {remark}".rstrip())

    def clear(self) -> None:
        """Leave the line to others."""
        self._draw("")

    def _draw(self, text: str) -> None:
        if self._shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def megabytes(size: int) -> str:
    """Print a number of bytes for people."""
    if size < 1_000:
        return f"{size} bytes"
    if size < 1_000_000:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e6:,.1f} MB" if size < 1_000_000_000 else f"{size / 1e9:,.2f} GB"
