"""The keys that open restricted categories: given literally, or kept in a file that may change while the server runs.

Deciding is done without I/O: a ``KeyFile`` is told what each look at its file found. What two looks in a row agree on
is in force: so a file that is just being written does not count, and neither does one that is gone or empty; the last
good keys stay.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from hmac import compare_digest
from typing import Final, NamedTuple

from nerite.config.options import RestrictedKey
from nerite.core.errors import InvalidArgument

_MAX_SIZE: Final = 64 * 1024
_FORM: Final = "It needs one key a line; empty lines and lines that begin with '#' do not count."


class Finding(NamedTuple):
    """What a look at a file found: keys, or a problem."""

    keys: tuple[bytes, ...]
    problem: str = ""
    """What is wrong with the file, as the end of a sentence about it; empty where there are keys."""


class Keys:
    """Values of a header, each of which opens a lock."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self._values = tuple(values)

    def __len__(self) -> int:
        return len(self._values)

    def include(self, given: bytes) -> bool:
        """Say whether ``given`` is one of the keys, in a time that does not tell how much of it is right."""
        return sum(compare_digest(value, given) for value in self._values) > 0


class KeyFile(Keys):
    """The keys in a file, as of the last time that it was in order."""

    def __init__(self, path: str, found: Finding) -> None:
        """``found`` is what the first look brought. Raises ``InvalidArgument`` if those are no keys."""
        if found.problem:
            raise InvalidArgument(f"cannot restrict access: the key file '{path}' {found.problem}. {_FORM}")
        super().__init__(found.keys)
        self.path = path
        self._last = found
        self._settled = found

    @property
    def problem(self) -> str:
        """What is wrong with the file, for which reason the keys are older than it; empty if nothing is."""
        return self._settled.problem

    def see(self, found: Finding) -> bool:
        """Take what a look found; return whether that, and the look before, was news."""
        twice = found == self._last
        self._last = found
        if not twice or found == self._settled:
            return False
        self._settled = found
        if not found.problem:
            self._values = found.keys
        return True

    def news(self) -> str:
        """Return what to say in the log after a change: how many keys, and never which."""
        count = f"{len(self)} key{'' if len(self) == 1 else 's'}"
        if self.problem:
            return f"the key file '{self.path}' {self.problem}. {_FORM} Its last good content, {count}, stays in force"
        return f"the key file '{self.path}' was read: {count} in force"


class Lock(NamedTuple):
    """What stands before a category: the header that must come with a request, and what it may say."""

    header: str
    """As the command line spells it."""
    keys: Keys

    def opens(self, given: bytes | None) -> bool:
        """Say whether a request may pass whose header has the value ``given``, None if it has none."""
        return given is not None and self.keys.include(given)


def parse(text: bytes) -> Finding:
    """Return the keys in the text of a file."""
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith(b"#"))
    return Finding(keys, "" if keys else "has no key in it")


def look(path: str) -> Finding:
    """Look at a file. Blocks as files do."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return Finding((), "is not a regular file")
        with open(path, "rb") as file:
            text = file.read(_MAX_SIZE + 1)
    except OSError as error:
        return Finding((), f"cannot be read: {error.strerror}")
    return parse(text) if len(text) <= _MAX_SIZE else Finding((), f"is larger than {_MAX_SIZE} bytes")


def open_files(restricted: Iterable[RestrictedKey]) -> dict[str, KeyFile]:
    """Return the files that keys are in, by path. Raises ``InvalidArgument`` for one that cannot be used."""
    paths = {key.file for key in restricted if key.file}
    return {path: KeyFile(path, look(path)) for path in sorted(paths)}


def locks(restricted: Mapping[str, RestrictedKey], files: Mapping[str, KeyFile]) -> dict[str, Lock]:
    """Return the lock of each restricted category; ``files`` has all that ``restricted`` names."""
    return {
        category: Lock(key.header, files[key.file] if key.file else Keys((os.fsencode(key.value),)))
        for category, key in restricted.items()
    }
