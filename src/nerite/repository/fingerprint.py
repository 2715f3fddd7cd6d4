"""What a directory looks like, so that a change is noticed: names, sizes and times."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

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

    @property
    def newest_ns(self) -> int:
        """When the youngest file was changed."""
        config = [self.config] if self.config is not None else []
        entries = [*config, *self.shared, *(entry for version in self.versions.values() for entry in version)]
        return max((time_ns for _, _, time_ns in entries), default=0)


def of_directory(directory: Path) -> tuple[Entry, ...]:
    """Return all files below ``directory``. A file that vanishes meanwhile is left out."""
    entries: list[Entry] = []
    for parent, folders, files in os.walk(directory):
        # Python writes its caches when it pleases; they are no change of the model.
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            path = os.path.join(parent, name)
            try:
                status = os.stat(path)
            except OSError:
                continue
            entries.append((os.path.relpath(path, directory), status.st_size, status.st_mtime_ns))
    return tuple(entries)


def of_model(directory: Path) -> ModelFingerprint:
    """Return the fingerprint of a model's directory."""
    versions: dict[int, tuple[Entry, ...]] = {}
    shared: list[Entry] = []
    config: Entry | None = None
    try:
        children = sorted(os.scandir(directory), key=lambda child: child.name)
    except OSError:
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
            except OSError:
                continue
            entry = (child.name, status.st_size, status.st_mtime_ns)
            if child.name == "config.pbtxt":
                config = entry
            else:
                shared.append(entry)
    return ModelFingerprint(tuple(shared), versions, config)
