"""ASCII tables for the log and the terminal: ``+---+`` lines, one row of headings, cells of one or more lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

UNLIMITED: Final = 500
"""Width in columns if the output is no terminal."""


def render(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int = UNLIMITED) -> str:
    """Draw a table no wider than ``width``, unless that leaves less than one character per column.

    A column that needs less than an equal share leaves the rest to wider ones. Longer lines are wrapped.
    """
    cells = [[cell.split("\n") for cell in row] for row in (headings, *rows)]
    natural = [max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    widths = share(natural, width - 3 * len(headings) - 1)
    divider = "+" + "".join("-" * (size + 2) + "+" for size in widths)
    head, *body = ["\n".join(_lines(row, widths)) for row in cells]
    return "\n".join([divider, head, divider, *body, divider])


def share(natural: Sequence[int], available: int) -> list[int]:
    """Divide ``available`` columns of text among cells, whose widths without a limit are ``natural``."""
    widths = [0] * len(natural)
    left = max(available, len(natural))
    by_need = sorted(range(len(natural)), key=lambda index: natural[index])
    for position, index in enumerate(by_need):
        widths[index] = max(1, min(natural[index], left // (len(by_need) - position)))
        left -= widths[index]
    return widths


def terminal_width() -> int:
    """Return the width of the terminal behind stdout, or ``UNLIMITED`` if it is no terminal."""
    try:
        return os.get_terminal_size(1).columns or UNLIMITED
    except OSError:
        return UNLIMITED


def _lines(row: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    wrapped = [
        [line[at : at + size] for line in cell for at in range(0, len(line) or 1, size)]
        for cell, size in zip(row, widths, strict=True)
    ]
    height = max(map(len, wrapped))
    return [
        "|"
        + "".join(f" {cell[at] if at < len(cell) else '':{size}} |" for cell, size in zip(wrapped, widths, strict=True))
        for at in range(height)
    ]
