"""Helpers shared by all commands: errors, argument parsers, exit statuses, output, and progress bars."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn

from nerite.config.mistake import nearest
from nerite.core.errors import NeriteError
from nerite.core.text import render_table, terminal_width


class UsageError(Exception):
    """An invalid command line. ``nerite serve`` prints it and exits with status 1, other commands with 2.

    ``remedy`` is ours and follows Triton's text. ``early`` prints the text before the usage, as getopt does; ``usage``
    is False where Triton accepts the command line at first and prints the text alone.
    """

    def __init__(self, text: str, *, remedy: str = "", early: bool = False, usage: bool = True) -> None:
        super().__init__(text)
        self.text = text
        self.remedy = remedy
        self.early = early
        self.usage = usage


def did_you_mean(wrong: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``Did you mean '…'?`` with the known name closest to a wrong one, or "" if none is close."""
    name = nearest(wrong, known)
    return f"Did you mean '{prefix}{name}'?" if name else ""


class CommandParser(argparse.ArgumentParser):
    """Parser of a command. Suggests the option that an unknown one resembles."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with status 2."""
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        near = did_you_mean(unknown[1], self._option_string_actions) if unknown else ""
        super().error(f"{message}. {near}" if near else message)


def new_parser(program: str, description: str, epilog: str, usage: str | None = None) -> CommandParser:
    """Return a parser without arguments whose help ends with ``epilog``, printed verbatim."""
    formatter = argparse.RawDescriptionHelpFormatter
    return CommandParser(prog=program, usage=usage, description=description, epilog=epilog, formatter_class=formatter)


def add_repeated(
    parser: argparse._ActionsContainer, name: str, metavar: str, meaning: str, read: Callable[[str], Any] = str
) -> None:
    """Add an option that may be repeated; its value is the list of what ``read`` returned."""
    parser.add_argument(
        name, metavar=metavar, action="append", type=read, default=[], help=f"{meaning}; may be repeated"
    )


def positive_integer(text: str) -> int:
    """Parse an integer of 1 or more."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive integer")
    return int(text)


def positive_number(text: str) -> float:
    """Parse a number greater than 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not greater than 0")
    return number


def status_of(program: str, act: Callable[[], int], refusal: type[Exception] = NeriteError) -> int:
    """Run the body of a command, print its error if it fails, and return the exit status.

    The status is 1 for a ``NeriteError`` or a ``refusal``, 2 for an invalid command line, 130 after Ctrl-C.
    """
    try:
        return act()
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else 2
    except UsageError as error:
        complain(program, error.text, error.remedy)
        return 2
    except (NeriteError, refusal) as error:
        complain(program, str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def complain(program: str, text: str, remedy: str = "") -> None:
    """Print an error to stderr, and its remedy on the line below."""
    print("\n    ".join(filter(None, (f"{program}: {text}", remedy))), file=sys.stderr)


def show(text: str) -> None:
    """Print a line to stdout. A closed pipe (the reader was head or less) is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        fall_silent()


def write(text: str) -> None:
    """Print text to stdout verbatim, without a newline, and flush it."""
    print(text, end="", flush=True)


def fall_silent() -> None:
    """Discard all further output to stdout after its reader closed the pipe, including the flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_json(document: object, *, one_line: bool = False) -> None:
    """Print a document as JSON to stdout."""
    show(json.dumps(document, indent=None if one_line else 2, ensure_ascii=False))


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table that fits the width of the terminal."""
    show(render_table(headings, rows, terminal_width()))


def is_interactive() -> bool:
    """Return whether the command is interactive: both stdin and stdout are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def agreed(question: str, *, otherwise: bool) -> bool:
    """Ask the user a yes-or-no question; an empty answer means ``otherwise``."""
    answer = input(f"{question} {'[Y/n]' if otherwise else '[y/N]'} ").strip().lower()
    return answer in ("y", "yes") or (otherwise and not answer)


_BAR_WIDTH: Final = 30
_REDRAW_INTERVAL: Final = 0.1
"""Minimum number of seconds between two updates of the bar."""


class ProgressBar:
    """Progress of a task on one line of stderr, redrawn in place; silent if stderr is not a terminal.

    A context manager that clears the line on exit.
    """

    def __init__(self) -> None:
        self.shown: Final = sys.stderr.isatty()
        self._drawn = 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def doing(self, what: str) -> None:
        """Show a task whose progress is not known."""
        self._draw(f"{what} ...")

    def bar(self, what: str, done: int, total: int) -> None:
        """Show how many of the ``total`` bytes are done."""
        if total > 0:
            self.part(what, done / total, f"of {megabytes(total)}")

    def part(self, what: str, part: float, remark: str) -> None:
        """Show the completed fraction of a task, from 0 to 1, and a remark."""
        now = time.monotonic()
        if part < 1 and now - self._drawn < _REDRAW_INTERVAL:
            return
        self._drawn = now
        part = min(1.0, part)
        filled = round(part * _BAR_WIDTH)
        self._draw(f"{what} [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {part:4.0%} {remark}".rstrip())

    def clear(self) -> None:
        """Clear the line."""
        self._draw("")

    def _draw(self, text: str) -> None:
        if self.shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def megabytes(size: int) -> str:
    """Return a number of bytes in human-readable form, from bytes to GB."""
    if size < 1_000:
        return f"{size} bytes"
    if size < 1_000_000:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e6:,.1f} MB" if size < 1_000_000_000 else f"{size / 1e9:,.2f} GB"
