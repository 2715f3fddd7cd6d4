"""The files of a model in an object store, as the store lists them, and names that stay while they stay the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model."""

    path: str
    """Below the model's directory."""
    key: str
    """The object's name in its bucket."""
    size: int
    etag: str
    """What the store calls this content of the object; empty where it has no name for it."""
    modified: datetime

    @property
    def identity(self) -> str:
        """A name for the content: changes when the store's object does."""
        content = self.etag or self.modified.isoformat()
        return hashlib.sha256(f"{self.key}\0{self.size}\0{content}".encode()).hexdigest()[:40]

    @property
    def modified_ns(self) -> int:
        """When it was changed. Stores tell the second; what is below that tells contents of the same second apart."""
        return int(self.modified.timestamp()) * 10**9 + int(self.identity, 16) % 10**9


@dataclass(frozen=True, slots=True)
class Listing:
    """A model, as it is now."""

    files: tuple[RemoteFile, ...]
    directories: tuple[str, ...]
    """Those that may be empty: a version without files is one, too."""

    @property
    def identity(self) -> str:
        """A name for the whole of it."""
        lines = [f"{file.path}\0{file.identity}\n" for file in self.files] + [f"{path}/\n" for path in self.directories]
        return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:40]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(file.size for file in self.files)


def listing_of(found: Iterable[RemoteFile]) -> Listing:
    """Tell files from directories.

    Stores have no directories, but tools write empty objects that stand for some. Such an object has others below it,
    or is a version: its name is a number, right below the model. Raises ``ValueError`` for a name that a file cannot
    have.
    """
    objects = sorted((file for file in found if file.path), key=lambda file: file.path)
    parents = {
        "/".join(parts[:depth])
        for parts in (file.path.split("/") for file in objects)
        for depth in range(1, len(parts))
    }
    files, directories = [], []
    for file in objects:
        if {"", ".", ".."} & set(file.path.split("/")):
            raise ValueError(f"the object '{file.key}' has a name that cannot be a file's")
        if file.size == 0 and (file.path in parents or file.path.isdecimal()):
            directories.append(file.path)
        elif file.path in parents:
            raise ValueError(f"the object '{file.key}' is a file, and there are others below it")
        else:
            files.append(file)
    return Listing(tuple(files), tuple(directories))
