"""One entry of the list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NEVER = "-"
"""Triton's answer to what it is not asked, because it would end, hang or take the connection with it."""


@dataclass(frozen=True)
class Difference:
    """One thing that is otherwise."""

    what: str
    why: str
    answers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By exchange, how Triton's answer begins and how ours does. Empty where no exchange can show it.

    ``topic/name#2`` is the second answer of an exchange. ``topic/name`` is its first, and what comes after it is not
    compared: it follows from the difference.
    """
