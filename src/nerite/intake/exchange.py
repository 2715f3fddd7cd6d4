"""Two directories that change places, so that at no time one of them is missing."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories of one disk: at once where the system can, else as quickly as it can."""
    if not _at_once(one, other):
        with tempfile.TemporaryDirectory(prefix=".exchange-", dir=one.parent) as between:
            aside = Path(between) / "aside"
            os.rename(other, aside)
            try:
                os.rename(one, other)
            except OSError:
                os.rename(aside, other)
                raise
            os.rename(aside, one)


def _at_once(one: Path, other: Path) -> bool:
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
