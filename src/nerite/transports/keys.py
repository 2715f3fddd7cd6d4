"""The keys that open restricted categories: given literally, or kept in a file, which may change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from hmac import compare_digest
from typing import Final, NamedTuple

from nerite.config.options import RestrictedKey
from nerite.config.standing_file import StandingFile, read
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


class KeyFile(Keys, StandingFile[Finding]):
    """The keys in a file, as of the last time that it was in order."""

    def __init__(self, path: str, found: Finding) -> None:
        """``found`` is what the first look brought. Raises ``InvalidArgument`` if those are no keys."""
        if found.problem:
            raise InvalidArgument(f"cannot restrict access: the key file '{path}' {found.problem}. {_FORM}")
        Keys.__init__(self, found.keys)
        StandingFile.__init__(self, path, found)

    def _take(self, found: Finding) -> None:
        self.problem = found.problem
        if not found.problem:
            self._values = found.keys

    def look(self) -> Finding:
        """Look at the file. Blocks as files do."""
        return look(self.path)

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
    content = read(path, _MAX_SIZE)
    return Finding((), content.problem) if content.problem else parse(content.data)


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
