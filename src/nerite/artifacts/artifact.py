"""``Candidate``: a path to be recognised; ``Artifact``: a recognised model; ``Unusable``: one that cannot be served."""

from __future__ import annotations

import errno
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nerite.config.model_config import ModelConfig
from nerite.core.errors import InvalidArgument


class Unusable(InvalidArgument):
    """A file or a directory that cannot be served as it is."""

    def __init__(self, path: Path, text: str, remedy: str) -> None:
        """``remedy`` says what to do instead; it is printed on its own line."""
        super().__init__(f"{path}: {text}\n    {remedy}")


_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError),
    *(RuntimeError, ValueError, LookupError, OverflowError, MemoryError),
)
"""What is raised for an archive that is damaged, encrypted, or compressed in an unknown way, and for its content."""


@contextmanager
def opened_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive; whatever is wrong with what is read of it is ``Unusable``."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except OSError as error:
        if error.errno != errno.EINVAL:  # which is an offset before the file's beginning
            raise
        raise _unreadable(path, error) from None
    except _UNREADABLE as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> Unusable:
    what = str(error) or type(error).__name__
    return Unusable(path, f"the archive cannot be read: {what}", "Save the model again, or copy it again.")


@dataclass(frozen=True)
class Artifact:
    """A recognised model: its configuration as far as it is known, and where each of its files belongs."""

    kind: str
    """Human-readable kind: ``ONNX model``."""
    source: Path
    name: str
    """Suggested name of the model; may contain characters that are not allowed in a directory name."""
    config: ModelConfig = field(default_factory=ModelConfig)
    """The part of the configuration that follows from the kind."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files to copy: path in the version directory, mapped to the source file or directory."""
    beside: Mapping[str, Path] = field(default_factory=dict)
    """Files to copy into the model directory, beside the versions."""
    versions: Mapping[int, Path] = field(default_factory=dict)
    """The directory of each version, if the model already has versions. Such a model has no ``files``."""
    make: Callable[[Path], None] | None = None
    """Creates files in the version directory where copying is not enough. Raises ``NeriteError``."""
    remarks: tuple[str, ...] = ()
    """Notes for the user."""
    finished: bool = False
    """The configuration was written by the user and must not be changed."""
    task: str = ""
    """What a model for the backend ``llm`` does, as its parameter TASK names it; empty if it generates text."""

    @property
    def size(self) -> int:
        """Total bytes of all files to copy, or of the source if nothing is copied."""
        copied = (*self.files.values(), *self.beside.values(), *self.versions.values())
        return sum(map(size_of, copied or (self.source,)))


def size_of(path: Path) -> int:
    """Return the size of a file, or of all files below a directory, in bytes."""
    if path.is_dir():
        return sum(child.stat().st_size for child in path.rglob("*") if child.is_file())
    return path.stat().st_size


_HEAD = 1 << 16
_ZIP = b"PK\x03\x04"
_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_SIZE = 1024
"""Upper bound of the size of a Git LFS pointer file, in bytes."""
_GENERIC_NAMES = ("", "model", "saved_model", "model.savedmodel", "checkpoint", "pytorch_model", "xgboost", "data")


class Candidate:
    """A path to be recognised, and the user's options for it.

    The content is read lazily and only once: the first bytes, and the member names if it is a zip archive.
    """

    def __init__(self, path: Path, *, class_place: str = "", flavor: str = "", trusted: bool = False) -> None:
        """``class_place`` is ``FILE.py:CLASS``, the class that weights belong to; ``flavor`` is a flavour of MLflow.

        ``trusted``: code that the artifact contains may be run.
        """
        self.path = path
        self.class_place = class_place
        self.flavor = flavor
        self.trusted = trusted

    def at(self, path: Path) -> Candidate:
        """Return a candidate for another path, with the same options."""
        return Candidate(path, class_place=self.class_place, flavor=self.flavor, trusted=self.trusted)

    def artifact(self, kind: str, config: ModelConfig, files: Mapping[str, Path], *remarks: str) -> Artifact:
        """Return this path as a recognised artifact of a kind."""
        return Artifact(kind, self.path, self.name, config, files, remarks=remarks)

    @property
    def name(self) -> str:
        """Suggested name of the model: that of the file, or of the nearest parent directory that is not generic."""
        path = self.path.resolve()
        names = [path.name if self.is_directory else path.stem, *(parent.name for parent in path.parents)]
        return next((name for name in names if name not in _GENERIC_NAMES and not name.isdecimal()), "model")

    @property
    def suffix(self) -> str:
        """Last suffix of the file name, in lower case: ``.onnx``."""
        return self.path.suffix.lower()

    @cached_property
    def is_directory(self) -> bool:
        """True if the path is a directory."""
        return self.path.is_dir()

    @cached_property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.path.stat().st_size

    @cached_property
    def head(self) -> bytes:
        """First bytes of the file, up to 64 KiB; empty for a directory."""
        if self.is_directory:
            return b""
        with self.path.open("rb") as file:
            return file.read(_HEAD)

    @property
    def is_pointer(self) -> bool:
        """True if the file is a Git LFS pointer instead of the file itself."""
        return self.size < _POINTER_SIZE and self.head.startswith(_POINTER)

    @cached_property
    def tail(self) -> bytes:
        """Last bytes of the file, up to 64 KiB."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.size - _HEAD))
            return file.read()

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Names of the files in a zip archive, without their common root directory; empty for any other file."""
        if not self.head.startswith(_ZIP):
            return ()
        with opened_archive(self.path) as archive:
            return tuple(name.removeprefix(self.member_root) for name in archive.namelist())

    @cached_property
    def member_root(self) -> str:
        """Common root directory of all files in the archive, with a trailing slash; empty if they have none."""
        with opened_archive(self.path) as archive:
            roots = {name.partition("/")[0] for name in archive.namelist() if "/" in name}
            single = len(roots) == 1 and all("/" in name for name in archive.namelist())
        return f"{roots.pop()}/" if single else ""

    def member(self, name: str) -> bytes:
        """Return the content of a file in the archive; ``name`` is one of ``members``."""
        with opened_archive(self.path) as archive:
            return archive.read(self.member_root + name)

    def check(self) -> None:
        """Raise ``Unusable`` if the path cannot be a model of any kind: missing, empty, truncated, or a placeholder."""
        path = self.path
        if not path.exists():
            raise Unusable(path, "no such file or directory", "Specify the file that training has saved.")
        if self.is_directory:
            if not any(path.iterdir()):
                raise Unusable(path, "the directory is empty", "Specify the directory that contains the model's files.")
            return
        try:
            head = self.head
        except OSError as error:
            raise Unusable(path, f"cannot be read: {error.strerror}", "Check the permissions of the file.") from None
        if not head:
            raise Unusable(path, "the file is empty", "Save the model again, or copy the file again.")
        if self.is_pointer:
            remedy = f"Fetch the file itself, in its Git repository: git lfs pull --include '{path.name}'"
            raise Unusable(path, "this is a Git LFS pointer, not the file itself", remedy)
        if head[:512].lstrip().lower().startswith((b"<!doctype html", b"<html")):
            remedy = "The link leads to a page about the file, or to a login page. Download the file itself."
            raise Unusable(path, "this is a web page, not a model", remedy)
        if head.startswith(_ZIP) and not zipfile.is_zipfile(path):
            raise cut_off(path, "the central directory at the end of the archive is missing")


def cut_off(path: Path, reason: str) -> Unusable:
    """Return the error for a truncated file."""
    remedy = "Copy or download it again and compare the sizes, or save the model again with enough free disk space."
    return Unusable(path, f"the file is truncated: {reason}", remedy)
