"""What a wrong command line raises, on its way to the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from nerite.config.mistake import nearest


class BadValue(ValueError):
    """A value that a flag cannot take. ``str()`` is Triton's text for it.

    ``within`` names the part of a compound value that is wrong, as Triton does: ``--trace-config rate``.
    """

    def __init__(self, text: str, within: str = "") -> None:
        super().__init__(text)
        self.within = within


class UsageError(Exception):
    """A command line that cannot be obeyed. The command prints it and exits with status 1.

    ``remedy`` is ours and stands after Triton's text. ``early`` puts the text before the usage, where getopt puts it;
    ``usage`` is False where Triton had read the command line without complaint and prints the text alone.
    """

    def __init__(self, text: str, *, remedy: str = "", early: bool = False, usage: bool = True) -> None:
        super().__init__(text)
        self.text = text
        self.remedy = remedy
        self.early = early
        self.usage = usage


class HelpRequested(Exception):
    """``--help`` was met before any mistake."""


# Did you mean: the sentence that goes with a name that is not known.


def did_you_mean(wrong: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``Did you mean '…'?``, or an empty string where nothing is near."""
    name = nearest(wrong, known)
    return f"Did you mean '{prefix}{name}'?" if name else ""
