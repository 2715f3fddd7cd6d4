"""Files that may change while the server runs: what is in force is their last good content.

Deciding is done without I/O: a ``WatchedFile`` is told what each look at it found. What two looks in a row agree on
counts, so that a file that is just being written does not; nor does one with a mistake, or one that is gone.
"""

from __future__ import annotations

import asyncio
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

Finding = TypeVar("Finding")
_POLL_SECONDS: Final = 0.5
"""Seconds between two looks at a file."""


class WatchedFile(ABC, Generic[Finding]):
    """One of them, as of the last time that it was in order."""

    problem = ""
    """What is wrong with it, for which reason what is in force is older than it; empty if nothing is."""

    def __init__(self, path: str, found: Finding) -> None:
        """``found`` is what the first look brought. It is in order: the owner has seen to that."""
        self.path = path
        self._last = self._settled = found

    def see(self, found: Finding) -> bool:
        """Take what a look found; return whether that, and the look before, was news."""
        twice = found == self._last
        self._last = found
        if not twice or found == self._settled:
            return False
        self._settled = found
        self._take(found)
        return True

    @abstractmethod
    def _take(self, found: Finding) -> None:
        """Have what was found count; if it cannot, say why in ``problem``."""

    @abstractmethod
    def poll(self) -> Finding:
        """Look at the file. Blocks as files do."""

    @abstractmethod
    def news(self) -> str:
        """Return what to say in the log after a change."""


class FileContent(NamedTuple):
    """What reading a file brought: bytes, or a problem."""

    data: bytes
    problem: str = ""
    """What is wrong with the file, as the end of a sentence about it; empty where it was read."""


def read_content(path: str, most: int) -> FileContent:
    """Read a file of ``most`` bytes at the most. Blocks as files do."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            return FileContent(b"", "is not a regular file")
        with Path(path).open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        return FileContent(b"", f"cannot be read: {error.strerror}")
    return FileContent(data) if len(data) <= most else FileContent(b"", f"is larger than {most} bytes")


async def watch_files(file: WatchedFile[Finding], changed: Callable[[], None]) -> None:
    """Look at a file every now and then, and call ``changed`` after news."""
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        if file.see(await asyncio.to_thread(file.poll)):
            changed()
