"""Contents of files, in a directory of one server, or of all that use one database. Every method blocks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from nerite.core.errors import InvalidArgument, NotFound, Unavailable

if TYPE_CHECKING:
    from nerite.core.tensor import Buffer

_LOCK: Final = "lock"
_PART: Final = ".part"
_ID: Final = re.compile(r"file-[0-9a-f]{32}")
_OLD_SECONDS: Final = 86400.0
"""Age from which a file without a row was left by a crash: others may be about to add the row of a newer one."""


class FileDirectory:
    """Files by their ids. A file is complete or absent, whenever the server crashes."""

    def __init__(self, path: str, *, shared: bool = False) -> None:
        """Create the directory if it is missing. Raises ``InvalidArgument`` if it cannot be used.

        ``shared``: other servers use it, too.
        """
        self.path = Path(path)
        self._shared = shared
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / _LOCK).open("wb")
        except OSError as error:
            raise InvalidArgument(f"the files of batches cannot be kept in '{path}': {error.strerror}") from error
        try:
            fcntl.flock(self._lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise InvalidArgument(
                f"another server keeps its batches in '{path}': give each server a database of its own"
            ) from None

    def begin(self, name: str) -> FileWriter:
        """Begin a file, which exists once the writer has committed it."""
        return FileWriter(self._path(name))

    def write(self, name: str, data: Buffer) -> None:
        """Write a file. Raises ``Unavailable`` if the disk is full or fails."""
        writer = self.begin(name)
        writer.add([data])
        writer.commit()

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. Raises ``NotFound``, or ``Unavailable`` if the disk fails."""
        try:
            return self._path(name).open("rb")
        except FileNotFoundError as error:
            raise NotFound(f"the content of file '{name}' is lost: {error.strerror}") from None
        except OSError as error:
            raise Unavailable(f"file '{name}' cannot be read: {error.strerror}") from error

    def read_lines(self, name: str, places: Iterable[tuple[int, int]]) -> list[bytes]:
        """Return parts of a file, each given by its position and size; those behind its end are shorter.

        Raises like ``open``.
        """
        with self.open(name) as file:
            found = []
            try:
                for position, size in places:
                    file.seek(position)
                    found.append(file.read(size))
            except OSError as error:
                raise Unavailable(f"file '{name}' cannot be read: {error.strerror}") from error
            return found

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that do not exist, or cannot be removed, are passed over until the next start."""
        for name in names:
            with contextlib.suppress(OSError):
                self._path(name).unlink(missing_ok=True)

    def remove_others(self, names: Collection[str]) -> None:
        """Remove all files but these: a crash leaves files that no row names."""
        newest = time.time() - _OLD_SECONDS if self._shared else float("inf")
        for path in self.path.iterdir():
            left = path.suffix == _PART or (_ID.fullmatch(path.name) and path.name not in names)
            with contextlib.suppress(FileNotFoundError):
                if left and path.stat().st_mtime < newest:
                    path.unlink()

    def close(self) -> None:
        """Let another server use the directory."""
        self._lock.close()

    def _path(self, name: str) -> Path:
        if not _ID.fullmatch(name):
            raise NotFound(f"No such File object: {name}")
        return self.path / name


class FileWriter:
    """Writes a file under a temporary name. A method that raises ``Unavailable`` has removed what was written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_suffix(_PART)
        self._file: BinaryIO | None = None
        self.size = 0

    def add(self, pieces: Iterable[Buffer]) -> None:
        """Append to the file."""
        try:
            if self._file is None:
                self._file = self._part.open("wb")
            for piece in pieces:
                self._file.write(piece)
                self.size += len(piece)
        except OSError as error:
            raise self._failed(error) from error

    def commit(self) -> None:
        """Complete the file: it outlives a crash of the machine."""
        assert self._file is not None
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._part.rename(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
            self._part.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> Unavailable:
        self.discard()
        return Unavailable(f"a file of batches cannot be written: {error.strerror}")
