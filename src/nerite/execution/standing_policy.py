"""The policy that is in force: read from a file that may change while the server runs.

Deciding is done without I/O: a ``StandingPolicy`` is told what each look at its file found. What two looks in a row
agree on is in force, so that a file that is just being written does not count; nor does one with a mistake, or one that
is gone: the last good policy stays.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from nerite.core.errors import InvalidArgument
from nerite.scheduling.tokens.policy import Policy
from nerite.scheduling.tokens.policy_file import parse

_MAX_SIZE: Final = 4 * 1024 * 1024


class Finding(NamedTuple):
    """What a look at the file found: a text, or a problem."""

    text: str
    problem: str = ""
    """Why there is no text."""


class StandingPolicy:
    """Of one file, as of the last time that it was in order."""

    def __init__(self, path: str, found: Finding) -> None:
        """``found`` is what the first look brought. Raises ``InvalidArgument`` with all that is wrong with it."""
        self.path = path
        self.policy = _read(path, found)
        self.problem = ""
        """What is wrong with the file, for which reason the policy is older than it; empty if nothing is."""
        self._last = self._settled = found

    def see(self, found: Finding) -> bool:
        """Take what a look found; return whether that, and the look before, was news."""
        twice = found == self._last
        self._last = found
        if not twice or found == self._settled:
            return False
        self._settled = found
        try:
            self.policy = _read(self.path, found)
            self.problem = ""
        except InvalidArgument as error:
            self.problem = error.message
        return True

    def news(self) -> str:
        """Return what to say in the log after a change."""
        if self.problem:
            return f"{self.problem}\nThe policy stays as it was: correct '{self.path}', which is looked at all the time"
        return f"the policy file '{self.path}' was read: it is in force"


def look(path: str) -> Finding:
    """Look at a file. Blocks as files do."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_SIZE + 1)
        return Finding(raw.decode()) if len(raw) <= _MAX_SIZE else Finding("", f"is larger than {_MAX_SIZE} bytes")
    except OSError as error:
        return Finding("", f"cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        return Finding("", f"is no UTF-8: {error}")


def _read(path: str, found: Finding) -> Policy:
    if found.problem:
        raise InvalidArgument(f"the policy file '{path}' {found.problem}")
    return parse(found.text, path)
