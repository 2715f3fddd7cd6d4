"""What is to be added, and who looks on meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

from nerite.artifacts.artifact import Artifact
from nerite.client import ModelDescription, TensorDescription
from nerite.config.model_config import ModelConfig
from nerite.core.errors import AlreadyExists, Internal
from nerite.tools.add import destination as exchange
from nerite.tools.add.destination import Destination, written_config
from nerite.tools.add.proposal import Contestant, Latency, Proposal, Shapes, Throughput

# What became of an order.

_WITH_FIGURES: Final = ("backend", "max_batch_size", "instance_group")


@dataclass
class AddOutcome:
    """What became of it."""

    artifact: Artifact
    destination: Destination
    config: ModelConfig
    signature: ModelDescription | None = None
    load_seconds: float = 0.0
    memory: int = 0
    """Bytes that loading took; 0 where that is not known."""
    memory_at_work: int = 0
    """Bytes more after the largest batch."""
    latencies: list[Latency] = field(default_factory=list)
    rivals: list[Contestant] = field(default_factory=list)
    """The other backends that were measured: ``latencies`` are those of the file's own."""
    throughputs: list[Throughput] = field(default_factory=list)
    proposal: Proposal | None = None
    accepted: bool = False
    remarks: list[str] = field(default_factory=list)

    def config_text(self) -> str:
        """Return the config.pbtxt, with where the model came from and what was measured."""
        origin = f"{self.artifact.kind}, added by nerite add from {self.artifact.source.name}."
        advice = self.proposal.advice if self.proposal is not None and self.accepted else ()
        measured = {each.setting: f"Measured: {each.reason}." for each in advice if each.setting in _WITH_FIGURES}
        return written_config(self.config, origin, measured)


class Watcher(Protocol):
    """Who looks on while a model is added, and decides."""

    def copied(self, done: int, total: int) -> None:
        """Bytes were copied."""

    def doing(self, what: str) -> None:
        """Something begins that may take its time."""

    def accepts(self, outcome: AddOutcome) -> bool:
        """Say whether the settings that are proposed are to be written."""


@dataclass(frozen=True)
class AddOrder:
    """What is to be added, and how."""

    source: Path
    repository: Path
    name: str = ""
    """Empty: after the file."""
    version: int | None = None
    class_place: str = ""
    flavor: str = ""
    trusted: bool = False
    config: Path | None = None
    """A config.pbtxt to take, instead of one that is made."""
    backend: str = ""
    """What is to run it; empty: what its kind of file is for, or another that is faster."""
    inputs: tuple[TensorDescription, ...] = ()
    """What it takes, and below what it gives, where the model does not tell; of any size first where it can batch."""
    outputs: tuple[TensorDescription, ...] = ()
    force: bool = False
    load: bool = True
    """Try it in a server."""
    measure: bool = True
    place: bool = True
    """Put it into the repository."""
    largest_batch: int = 64
    """The largest to try where the model can batch and nobody has said how much."""
    shapes: Shapes = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    """Files to write into the model's directory, beside its versions: name to text."""


# A model that is being put together beside the others, where no server looks, until it takes its place at once.

_BLOCK: Final = 1 << 24
_PREFIX: Final = ".adding-"
"""Servers pass by what begins with a dot."""

Advance = Callable[[int], None]
"""Told of bytes that were copied."""


class Staging:
    """A repository with nothing in it but the new model. A context manager: what did not take its place is gone."""

    def __init__(self, destination: Destination, *, elsewhere: bool = False) -> None:
        """``elsewhere``: it will not take its place, and need not be on the same disk."""
        self._destination = destination
        self._elsewhere = elsewhere
        self._made: list[Path] = []
        self.repository = Path()

    @property
    def directory(self) -> Path:
        """The model's directory."""
        return self.repository / self._destination.name

    @property
    def version_directory(self) -> Path:
        """The directory of the new version."""
        return self.directory / str(self._destination.version)

    def __enter__(self) -> Staging:
        target = self._destination.repository
        if self._elsewhere:
            self.repository = Path(tempfile.mkdtemp(prefix="nerite-add-"))
            return self
        missing = [target, *target.parents]
        self._made = [path for path in missing if not path.exists()]
        try:
            target.mkdir(parents=True, exist_ok=True)
            self.repository = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=target))
        except OSError as error:
            self._remove_made()
            remedy = "Make it a directory that you may write, or name another with --repository."
            raise Internal(f"{target} cannot be written: {error.strerror}.\n    {remedy}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.repository, ignore_errors=True)
        self._remove_made()

    def _remove_made(self) -> None:
        """Remove the directories of the repository that were not there before, unless the model is in them."""
        for path in filter(Path.exists, self._made):
            try:
                path.rmdir()
            except OSError:  # there is something in it: the model
                break

    def lay_out(self, artifact: Artifact, advance: Advance) -> None:
        """Copy the files of an artifact, and make those that are to be made. Raises ``NeriteError``."""
        self.version_directory.mkdir(parents=True)
        try:
            if artifact.versions:
                self.version_directory.rmdir()
                for number, source in artifact.versions.items():
                    _copy(source, self.directory / str(number), advance)
            _copy_all(artifact.files, self.version_directory, advance)
            if self._destination.joins:
                self._join(advance)
            else:
                _copy_all(artifact.beside, self.directory, advance)
        except OSError as error:
            raise _not_copied(error) from None
        if artifact.make is not None:
            artifact.make(self.version_directory)

    def _join(self, advance: Advance) -> None:
        """Have what the versions of the model share here, too: it is what the new one will meet."""
        for child in self._destination.directory.iterdir():
            if not (child.is_dir() and child.name.isdecimal()):
                _copy(child, self.directory / child.name, advance)

    def write(self, name: str, text: str) -> None:
        """Write a file that all versions share, such as the configuration."""
        (self.directory / name).write_text(text, encoding="utf-8")

    def take_place(self) -> None:
        """Put the model, or the version, where it belongs, in one step. Raises ``AlreadyExists``."""
        source, target = self._move()
        try:
            if self._destination.replaces:
                exchange.exchange(source, target)
            else:
                os.rename(source, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise AlreadyExists(f"{target} has come to be there meanwhile.\n    Look what it is.") from None
            raise _not_copied(error) from None

    @contextmanager
    def taken_back_on_error(self) -> Iterator[None]:
        """Have everything as it was, if what is done under this manager fails after the model took its place."""
        try:
            yield
        except BaseException:
            source, target = self._move()
            if self._destination.replaces:
                exchange.exchange(source, target)
            else:
                os.rename(target, source)
            raise

    def _move(self) -> tuple[Path, Path]:
        """Return what takes its place, and the place."""
        wanted = self._destination
        if wanted.joins:
            return self.version_directory, wanted.directory / str(wanted.version)
        return self.directory, wanted.directory


def _copy_all(files: Mapping[str, Path], directory: Path, advance: Advance) -> None:
    for name, source in files.items():
        _copy(source, directory / name, advance)


def _copy(source: Path, target: Path, advance: Advance) -> None:
    """Copy a file or a directory. Times are new, so that a server that compares them sees another file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        target.mkdir(exist_ok=True)
        for child in source.iterdir():
            if child.name != "__pycache__":
                _copy(child, target / child.name, advance)
        return
    with source.open("rb") as reader, target.open("wb") as writer:
        while block := reader.read(_BLOCK):
            writer.write(block)
            advance(len(block))
    shutil.copymode(source, target)


def _not_copied(error: OSError) -> Internal:
    remedy = "Make room on the disk." if error.errno == errno.ENOSPC else "Make it possible to read and write there."
    return Internal(f"the model could not be copied: {error.filename or ''}: {error.strerror}.\n    {remedy}")
