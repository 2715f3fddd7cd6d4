"""What was found about the machine, and what cures it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

GB: Final = 1 << 30
MB: Final = 1 << 20


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """To be known, and no fault."""
    WARNING = "warning"
    """It will be in somebody's way."""
    PROBLEM = "problem"
    """It does not work as it is."""


class Finding(NamedTuple):
    """One thing."""

    level: Level
    text: str
    remedy: str = ""
    """What is to be done; empty where nothing is."""


def size(amount: float) -> str:
    """Return bytes for people."""
    return f"{amount / GB:.1f} GB" if amount >= GB else f"{amount / MB:.0f} MB"
