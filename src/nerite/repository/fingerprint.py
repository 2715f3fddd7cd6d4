"""What a directory looks like, so that a change is noticed: names, sizes and times."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

_UNKNOWN: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE})
"""What the system says where it cannot tell whether there is a file."""

Entry: TypeAlias = tuple[str, int, int]
"""Relative path, size, time of modification in nanoseconds."""


@dataclass(frozen=True)
class ModelFingerprint:
    """The files of one model: those all versions share, those of each version, and the configuration's own.

    The configuration stands apart because its content says better than its looks what has to be loaded anew.
    """

    shared: tuple[Entry, ...]
    versions: dict[int, tuple[Entry, ...]]
    config: Entry | None = None


def of_directory(directory: Path) -> tuple[Entry, ...]:
    """Return all files below ``directory``, but for those that vanish meanwhile, or may not be read.

    Raises ``OSError`` where the system cannot tell.
    """
    entries: list[Entry] = []
    for parent, folders, files in os.walk(directory, onerror=_leave_out):
        # Python writes its caches when it pleases; they are no change of the model.
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            path = os.path.join(parent, name)
            try:
                status = os.stat(path)
            except OSError as error:
                _leave_out(error)
                continue
            entries.append((os.path.relpath(path, directory), status.st_size, status.st_mtime_ns))
    return tuple(entries)


def of_model(directory: Path) -> ModelFingerprint:
    """Return the fingerprint of a model's directory. Raises ``OSError`` where the system cannot tell."""
    versions: dict[int, tuple[Entry, ...]] = {}
    shared: list[Entry] = []
    config: Entry | None = None
    try:
        children = sorted(os.scandir(directory), key=lambda child: child.name)
    except OSError as error:
        _leave_out(error)
        return ModelFingerprint((), {})
    for child in children:
        if child.is_dir() and child.name.isdecimal():
            versions[int(child.name)] = of_directory(Path(child.path))
        elif child.name == "__pycache__":
            continue
        elif child.is_dir():
            shared += ((f"{child.name}/{name}", size, time) for name, size, time in of_directory(Path(child.path)))
        else:
            try:
                status = child.stat()
            except OSError as error:
                _leave_out(error)
                continue
            entry = (child.name, status.st_size, status.st_mtime_ns)
            if child.name == "config.pbtxt":
                config = entry
            else:
                shared.append(entry)
    return ModelFingerprint(tuple(shared), versions, config)


def _leave_out(error: OSError) -> None:
    """Raise an error that does not mean that there is no such file to be read."""
    if error.errno in _UNKNOWN:
        raise error
