"""Files that may change while the server runs. The last valid content is in force.

Decisions are made without I/O: each reading of a file is passed to its ``WatchedFile``. New content counts when two
readings in succession agree, so that a file that is being written does not count. Nor does a file with a mistake, or a
missing one.
"""

from __future__ import annotations

import asyncio
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from nerite.core.background import BackgroundWork
from nerite.core.work_loop import WorkLoop

Finding = TypeVar("Finding")
POLL_SECONDS: Final = 0.5
"""Seconds between two readings of a file."""


class WatchedFile(ABC, Generic[Finding]):
    """A watched file, with its last valid content."""

    problem = ""
    """Why the content in force is older than the file; empty if it is not."""

    def __init__(self, path: str, found: Finding) -> None:
        """``found`` is the result of the first reading, which the owner has checked."""
        self.path = path
        self._last = self._settled = found
        self._untold = False
        """A change that counts was not told yet, because that failed."""

    def see(self, found: Finding) -> bool:
        """Record the result of a reading; return whether it is new and equal to that of the reading before."""
        twice = found == self._last
        self._last = found
        if not twice or found == self._settled:
            return False
        self._take(found)
        self._settled = found
        return True

    def follow(self, found: Finding, changed: Callable[[], None]) -> None:
        """Record the result of a reading, and call ``changed`` after a change that counts.

        What either raises leaves this method, and is tried again with the next reading.
        """
        self._untold = self.see(found) or self._untold
        if self._untold:
            changed()
            self._untold = False

    @abstractmethod
    def _take(self, found: Finding) -> None:
        """Put new content into force, or state in ``problem`` why it cannot be."""

    @abstractmethod
    def poll(self) -> Finding:
        """Read the file. Blocks on file I/O."""

    @abstractmethod
    def news(self) -> str:
        """Return the log message after a change."""


class FileContent(NamedTuple):
    """Result of reading a file: its bytes, or a problem."""

    data: bytes
    problem: str = ""
    """What is wrong with the file, as the end of a sentence about it; empty if it was read."""


def read_content(path: str, most: int) -> FileContent:
    """Read a file of at most ``most`` bytes. Blocks on file I/O."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            return FileContent(b"", "is not a regular file")
        with Path(path).open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        return FileContent(b"", f"cannot be read: {error.strerror}")
    return FileContent(data) if len(data) <= most else FileContent(b"", f"is larger than {most} bytes")


async def watch_files(file: WatchedFile[Finding], changed: Callable[[], None], loop: WorkLoop) -> None:
    """Read a file periodically, and call ``changed`` after each change that counts."""
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if loop.admits(file.path):
            with loop.step(file.path):
                file.follow(await asyncio.to_thread(file.poll), changed)


def watched(file: WatchedFile[Finding], changed: Callable[[], None]) -> BackgroundWork:
    """Return the work of ``watch_files``, with a loop of its own."""
    loop = WorkLoop("files", file.path)
    return BackgroundWork(loop, partial(watch_files, file, changed, loop))
