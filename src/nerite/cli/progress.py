"""How far something has come, on one line of a terminal; nothing where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Final

_WIDTH: Final = 30
_EVERY: Final = 0.1
"""Seconds between two drawings."""


class Progress:
    """A line on standard error, drawn again and again. A context manager, which leaves the line empty."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._drawn = 0.0

    def __enter__(self) -> Progress:
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
