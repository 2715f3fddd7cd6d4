"""Sizes of memory as people write them: ``512MiB``, ``16GiB``, ``80GB``. A number alone is in bytes."""

from __future__ import annotations

import re
from typing import Final

_LARGEST: Final = 2**60
_UNITS: Final = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?([kKMGT]?i?B?)")


def size_of(value: object) -> int:
    """Return the bytes that a number or a text means. Raises ``ValueError`` with what it must be."""
    size = -1
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2] in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2]])
    if not 0 <= size <= _LARGEST:
        raise ValueError("must be a size of memory, as in 512MiB or 16GiB")
    return size


def size_text(size: int) -> str:
    """Return a size for people: ``1.5 GiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.3g} {unit}"
    return f"{size} B"
