"""What ``nerite top`` shows: text that fits a terminal, made of what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from nerite.cli.top.happening import Happening

KEYS: Final = {"n": "name", "r": "requests", "f": "failures", "l": "p99", "w": "queue", "m": "memory"}
"""What sorts the lines, by the key that asks for it."""
_NOTHING: Final = "-"


def _count(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _milliseconds(value: float | None) -> str:
    return _NOTHING if value is None else f"{value * 1000:,.0f}" if value >= 0.1 else f"{value * 1000:.2f}"


def _bytes(value: float | None) -> str:
    if not value:
        return _NOTHING
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def _part(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


_COLUMNS: Final[Mapping[str, Callable[[Happening], str]]] = {
    "Model": lambda each: each.model,
    "Version": lambda each: each.version,
    "State": lambda each: each.state or "not loaded",
    "Requests/s": lambda each: _count(each.requests),
    "Failures/s": lambda each: _count(each.failures),
    "p50 ms": lambda each: _milliseconds(each.median),
    "p99 ms": lambda each: _milliseconds(each.slowest),
    "Queue": lambda each: _count(each.waiting),
    "Batch": lambda each: _count(each.batch),
    "Tokens/s": lambda each: _count(each.tokens),
    "Memory": lambda each: _bytes(each.memory),
    "Restarts": lambda each: _count(each.restarts),
}
_WORDS: Final = 3
"""Columns that begin with words, and stand at the left."""


def table(happened: Sequence[Happening]) -> list[str]:
    """Return a line of headings, and one for each version. Names have as much room as the longest needs."""
    rows = [list(_COLUMNS), *([cell(each) for cell in _COLUMNS.values()] for each in happened)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if place < _WORDS else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def summary(server: str, whole: Mapping[str, float | None]) -> str:
    """Return the line about the server."""
    return (
        f"{server}   {_count(whole['requests'])} requests/s, {_count(whole['failures'])} failures/s, "
        f"{_count(whole['waiting'])} waiting   machine: processors {_part(whole['processors'])}, "
        f"memory {_part(whole['memory'])}"
    )


def frame(
    server: str,
    whole: Mapping[str, float | None],
    lines: Sequence[str],
    size: tuple[int, int],
    by: str,
    lost: str = "",
) -> str:
    """Return a screen of ``size`` columns and rows, with its escape sequences. ``lines`` are those of ``table``.

    ``lost``: why the server could not be asked, and all of this is what was seen before.
    """
    width, height = size
    keys = "  ".join(f"{key} {name}" for key, name in KEYS.items())
    room = max(height - 5, 1)
    head, *rows = lines
    hidden = len(rows) - room
    if hidden > 0:
        rows = [
            *rows[: room - 1],
            f"... and {hidden + 1} more: a taller window shows them, or a name after 'nerite top'",
        ]
    shown = [
        summary(server, whole)[:width],
        f"as it was: {lost}"[:width] if lost else "",
        f"\x1b[7m{head[:width]:<{width}}\x1b[0m",
        *(row[:width] for row in rows),
        *[""] * (room - len(rows)),
        "",
        f"sorted by {by}   q quit  {keys}"[:width],
    ]
    return "\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in shown)
