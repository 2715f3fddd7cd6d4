"""Pictures of digits, drawn with ``#`` and ``.`` in a text file."""

from __future__ import annotations

import argparse
from pathlib import Path

SEVEN = Path(__file__).resolve().parent / "pictures" / "seven.txt"


def arguments(description: str, url: str) -> argparse.Namespace:
    """Return the command line of a client: ``picture`` and ``url``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("picture", nargs="?", type=Path, default=SEVEN, help="text file with the drawing of a digit")
    parser.add_argument("--url", default=url, help="host and port of the server (default: %(default)s)")
    return parser.parse_args()


def read(path: Path) -> list[list[int]]:
    """Return the drawing as rows of pixels: 255 for ink, 0 for background."""
    rows = [[255 if mark == "#" else 0 for mark in line] for line in path.read_text().split()]
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise SystemExit(f"{path}: the lines of a drawing are all of one length")
    return rows


def show(rows: list[list[int]]) -> str:
    """Return the drawing as it looks in a terminal."""
    return "\n".join("".join("#" if pixel else " " for pixel in row) for row in rows)
