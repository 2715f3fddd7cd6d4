"""Exceptions for invalid command lines, and suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Iterable

from nerite.config.mistake import nearest


class BadValue(ValueError):
    """A value that a flag does not accept. ``str()`` is Triton's text for it.

    ``within`` names the invalid part of a compound value, as Triton does: ``--trace-config rate``.
    """

    def __init__(self, text: str, within: str = "") -> None:
        super().__init__(text)
        self.within = within


class UsageError(Exception):
    """An invalid command line. ``nerite serve`` prints it and exits with status 1, other commands with 2.

    ``remedy`` is Nerite's own and follows Triton's text. ``early`` prints the text before the usage, as getopt does;
    ``usage`` is False where Triton accepts the command line at first and prints the text alone.
    """

    def __init__(self, text: str, *, remedy: str = "", early: bool = False, usage: bool = True) -> None:
        super().__init__(text)
        self.text = text
        self.remedy = remedy
        self.early = early
        self.usage = usage


class HelpRequested(Exception):
    """Raised for ``--help`` if no error precedes it on the command line."""


def did_you_mean(wrong: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``Did you mean '…'?`` with the known name closest to a wrong one, or "" if none is close."""
    name = nearest(wrong, known)
    return f"Did you mean '{prefix}{name}'?" if name else ""
