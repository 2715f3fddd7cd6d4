"""``Artifact``: what was recognised; ``Unusable``: what was recognised and cannot be served as it is."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument


class Unusable(InvalidArgument):
    """A file or a directory that cannot be served as it is."""

    def __init__(self, path: Path, text: str, remedy: str) -> None:
        """``remedy`` is what to do instead."""
        super().__init__(f"{path}: {text}\n    {remedy}")


@dataclass(frozen=True)
class Artifact:
    """A trained model, and where each of its files belongs."""

    kind: str
    """For people: ``ONNX model``."""
    source: Path
    name: str
    """What a model of it may be called; not yet fit for a directory."""
    config: ModelConfig = field(default_factory=ModelConfig)
    """As much of the configuration as follows from what it is."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """What to copy: path in the directory of the version, to the file or directory that it is a copy of."""
    beside: Mapping[str, Path] = field(default_factory=dict)
    """What to copy into the directory of the model, beside the versions."""
    versions: Mapping[int, Path] = field(default_factory=dict)
    """Of a model that has versions already: the directory of each. Such a model has no ``files``."""
    make: Callable[[Path], None] | None = None
    """Makes the files in the directory of the version, where copying is not enough. Raises ``NeriteError``."""
    remarks: tuple[str, ...] = ()
    """What is worth to be known."""
    finished: bool = False
    """Its configuration is somebody's work, and stays as it is."""

    @property
    def size(self) -> int:
        """The bytes of all files that are copied; of what it is made from, where nothing is."""
        copied = (*self.files.values(), *self.beside.values(), *self.versions.values())
        return sum(map(size_of, copied or (self.source,)))


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory."""
    if path.is_dir():
        return sum(child.stat().st_size for child in path.rglob("*") if child.is_file())
    return path.stat().st_size


# What somebody wants to have served, looked at just once: its first bytes, and the names in it if it is an archive.

_HEAD = 1 << 16
_ZIP = b"PK\x03\x04"
_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_SIZE = 1024
"""Pointers are shorter."""
_SAYS_NOTHING = ("", "model", "saved_model", "model.savedmodel", "checkpoint", "pytorch_model", "xgboost", "data")


class Candidate:
    """A path, and what was said about it. Its properties are read when they are first asked for."""

    def __init__(self, path: Path, *, class_place: str = "", flavor: str = "", trusted: bool = False) -> None:
        """``class_place`` is ``FILE.py:CLASS``, the program that weights belong to; ``flavor`` one of MLflow's.

        ``trusted``: code that is in it may be run.
        """
        self.path = path
        self.class_place = class_place
        self.flavor = flavor
        self.trusted = trusted

    def at(self, path: Path) -> Candidate:
        """Return another path with the same said about it."""
        return Candidate(path, class_place=self.class_place, flavor=self.flavor, trusted=self.trusted)

    @property
    def name(self) -> str:
        """What the model may be called: the file's name, or that of the nearest directory that says more."""
        path = self.path.resolve()
        names = [path.name if self.is_directory else path.stem, *(parent.name for parent in path.parents)]
        return next((name for name in names if name not in _SAYS_NOTHING and not name.isdecimal()), "model")

    @property
    def suffix(self) -> str:
        """The last suffix of the name, in lower case: ``.onnx``."""
        return self.path.suffix.lower()

    @cached_property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return self.path.is_dir()

    @cached_property
    def size(self) -> int:
        """The bytes of the file."""
        return self.path.stat().st_size

    @cached_property
    def head(self) -> bytes:
        """The first bytes of the file; none of a directory."""
        if self.is_directory:
            return b""
        with self.path.open("rb") as file:
            return file.read(_HEAD)

    @property
    def is_pointer(self) -> bool:
        """Whether Git LFS has put it in the place of the file that is meant."""
        return self.size < _POINTER_SIZE and self.head.startswith(_POINTER)

    @cached_property
    def tail(self) -> bytes:
        """The last bytes of the file."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.size - _HEAD))
            return file.read()

    @cached_property
    def members(self) -> tuple[str, ...]:
        """The names in the archive, without the directory that all are in; none if it is no zip archive."""
        if not self.head.startswith(_ZIP):
            return ()
        with zipfile.ZipFile(self.path) as archive:
            return tuple(name.removeprefix(self.member_root) for name in archive.namelist())

    @cached_property
    def member_root(self) -> str:
        """The directory that everything in the archive is in, with a slash at its end; empty if there is none."""
        with zipfile.ZipFile(self.path) as archive:
            roots = {name.partition("/")[0] for name in archive.namelist() if "/" in name}
            single = len(roots) == 1 and all("/" in name for name in archive.namelist())
        return f"{roots.pop()}/" if single else ""

    def member(self, name: str) -> bytes:
        """Return a file of the archive; ``name`` is one of ``members``."""
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(self.member_root + name)

    def check(self) -> None:
        """Raise ``Unusable`` for what is no model of any kind: not there, empty, cut off, or something in its place."""
        path = self.path
        if not path.exists():
            raise Unusable(path, "there is no such file or directory", "Name the file that training has saved.")
        if self.is_directory:
            if not any(path.iterdir()):
                raise Unusable(path, "the directory is empty", "Name the one that has the model's files in it.")
            return
        try:
            head = self.head
        except OSError as error:
            raise Unusable(path, f"cannot be read: {error.strerror}", "Make it a file that you may read.") from None
        if not head:
            raise Unusable(path, "the file is empty", "Save the model again, or copy the file again.")
        if self.is_pointer:
            remedy = f"Fetch the file itself, in its repository: git lfs pull --include '{path.name}'"
            raise Unusable(path, "this is Git LFS's pointer to the file, not the file", remedy)
        if head[:512].lstrip().lower().startswith((b"<!doctype html", b"<html")):
            remedy = "The link leads to a page that shows the file, or asks for a login. Download the file itself."
            raise Unusable(path, "this is a web page, not a model", remedy)
        if head.startswith(_ZIP) and not zipfile.is_zipfile(path):
            raise cut_off(path, "the table of contents at the end of the archive is missing")


def cut_off(path: Path, reason: str) -> Unusable:
    """Return the refusal of a file whose end is missing."""
    remedy = "Copy or download it again, and compare the sizes; or save the model again, with enough space on the disk."
    return Unusable(path, f"the file is cut off: {reason}", remedy)
