"""Cuts words and letters out of a page."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy import ndimage

SIDE = 20
"""Letters are brought to this height and put in the middle of a square."""
INK = 0.4
"""From here on it is ink and not paper."""

Box = tuple[int, int, int, int]


def boxes(words_map: np.ndarray, cell: int) -> list[Box]:
    """Return left, top, right and bottom of each word, from top to bottom, then from left to right."""
    labelled, _ = ndimage.label(words_map > 0.5, np.ones((3, 3)))
    found = ndimage.find_objects(labelled)
    return sorted(
        ((across.start * cell, down.start * cell, across.stop * cell, down.stop * cell) for down, across in found),
        key=lambda box: (box[3], box[0]),
    )


def letters(ink: np.ndarray) -> Iterator[np.ndarray]:
    """Give the letters of a word, from left to right: what columns without ink separate."""
    labelled, _ = ndimage.label((ink > INK).any(axis=0))
    for (columns,) in ndimage.find_objects(labelled):
        yield squared(ink[:, columns])


def squared(ink: np.ndarray) -> np.ndarray:
    """Return a letter in a square, at its full height and with its proportions."""
    rows = np.flatnonzero((ink > INK).any(axis=1))
    if rows.size:
        ink = ink[rows[0] : rows[-1] + 1]
    height, width = ink.shape
    width = min(max(round(width * SIDE / height), 1), SIDE)
    scaled = ndimage.zoom(ink, (SIDE / height, width / ink.shape[1]), order=1, grid_mode=True, mode="nearest")
    square = np.zeros((SIDE, SIDE), np.float32)
    left = (SIDE - width) // 2
    square[:, left : left + width] = scaled[:SIDE, :width]
    return square
