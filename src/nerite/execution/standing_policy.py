"""The policy that is in force: read from a file that may change while the server runs."""

from __future__ import annotations

from typing import Final, NamedTuple

from nerite.config.standing_file import StandingFile, read
from nerite.core.errors import InvalidArgument
from nerite.scheduling.tokens.policy import Policy
from nerite.scheduling.tokens.policy_file import parse

_MAX_SIZE: Final = 4 * 1024 * 1024


class Finding(NamedTuple):
    """What a look at the file found: a text, or a problem."""

    text: str
    problem: str = ""
    """Why there is no text."""


class StandingPolicy(StandingFile[Finding]):
    """Of one file, as of the last time that it was in order."""

    def __init__(self, path: str, found: Finding) -> None:
        """``found`` is what the first look brought. Raises ``InvalidArgument`` with all that is wrong with it."""
        super().__init__(path, found)
        self.policy = _parsed(path, found)

    def _take(self, found: Finding) -> None:
        try:
            self.policy = _parsed(self.path, found)
            self.problem = ""
        except InvalidArgument as error:
            self.problem = error.message

    def look(self) -> Finding:
        """Look at the file. Blocks as files do."""
        return look(self.path)

    def news(self) -> str:
        """Return what to say in the log after a change."""
        if self.problem:
            return f"{self.problem}\nThe policy stays as it was: correct '{self.path}', which is looked at all the time"
        return f"the policy file '{self.path}' was read: it is in force"


def look(path: str) -> Finding:
    """Look at a file. Blocks as files do."""
    content = read(path, _MAX_SIZE)
    if content.problem:
        return Finding("", content.problem)
    # It was perhaps cut to be written anew: no reason to lift every limit.
    if not content.data.strip():
        return Finding("", "is empty")
    try:
        return Finding(content.data.decode())
    except UnicodeDecodeError as error:
        return Finding("", f"is no UTF-8: {error}")


def open_policy(path: str) -> StandingPolicy:
    """Return the policy in a file. Raises ``InvalidArgument`` with all that is wrong with it."""
    return StandingPolicy(path, look(path))


def _parsed(path: str, found: Finding) -> Policy:
    if found.problem:
        raise InvalidArgument(f"the policy file '{path}' {found.problem}")
    return parse(found.text, path)
