"""Order and outcome of adding a model, the interface that reports progress, and the staging of its files."""

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
from typing import Final

from nerite.artifacts.artifact import Artifact
from nerite.client import ModelDescription, TensorDescription
from nerite.config.model_config import ModelConfig
from nerite.core.errors import AlreadyExists, Internal
from nerite.tools.add import destination as exchange
from nerite.tools.add.destination import Destination, written_config
from nerite.tools.add.proposal import Contestant, Latency, Proposal, Throughput

LANGUAGE_MODELS: Final = "llm"
"""Backend of language models, whose inputs and outputs no configuration has to state."""
_WITH_FIGURES: Final = ("backend", "max_batch_size", "instance_group")
"""Settings whose comment in config.pbtxt includes the measurements."""


@dataclass
class AddOutcome:
    """Result of adding a model: what was recognised, measured, proposed and written."""

    artifact: Artifact
    destination: Destination
    config: ModelConfig
    signature: ModelDescription | None = None
    load_seconds: float = 0.0
    memory: int = 0
    """Memory that loading took, in bytes; 0 if unknown."""
    memory_at_work: int = 0
    """Additional memory after the largest batch, in bytes."""
    latencies: list[Latency] = field(default_factory=list)
    """Latencies with the file's own backend."""
    rivals: list[Contestant] = field(default_factory=list)
    """The other backends that were measured."""
    throughputs: list[Throughput] = field(default_factory=list)
    proposal: Proposal | None = None
    accepted: bool = False
    example_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes, without the batch, of the inputs with variable dimensions that were measured with more than 1."""
    remarks: list[str] = field(default_factory=list)
    source: str = ""
    """Where the model is from, for people: the path of the artifact, or the name that it was fetched by."""

    def config_text(self) -> str:
        """Return the text of config.pbtxt, with comments about the model's origin and the measurements."""
        place = self.artifact.source
        origin = f"{self.artifact.kind}, added by nerite add from {self.source or place.name}."
        advice = self.proposal.advice if self.proposal is not None and self.accepted else ()
        measured = {each.setting: f"Measured: {each.reason}." for each in advice if each.setting in _WITH_FIGURES}
        if self.proposal is not None:
            for each in advice:
                if each.setting in self.proposal.parameters:
                    measured["parameters"] = f"{each.reason}."
        return written_config(self.config, origin, measured)


class Watcher:
    """Receives progress while a model is added, and decides about proposed settings. This one accepts them silently."""

    def copied(self, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` bytes have been copied."""

    def doing(self, what: str) -> None:
        """Report that a step begins that may take some time."""

    def accepts(self, outcome: AddOutcome) -> bool:
        """Return whether the proposed settings should be written."""
        return True


@dataclass(frozen=True)
class AddOrder:
    """Specifies what to add, where, and how to try it."""

    source: Path
    repository: Path
    name: str = ""
    """Name of the model; empty to derive it from the file."""
    version: int | None = None
    class_place: str = ""
    flavor: str = ""
    trusted: bool = False
    config: Path | None = None
    """A config.pbtxt to use instead of a generated one."""
    backend: str = ""
    """Backend to use; empty for the default of this kind of file, or a faster one."""
    inputs: tuple[TensorDescription, ...] = ()
    """Inputs, if the model does not describe them; the first size is -1 if the model can batch."""
    outputs: tuple[TensorDescription, ...] = ()
    """Outputs, if the model does not describe them."""
    force: bool = False
    load: bool = True
    """Load the model in a trial server."""
    measure: bool = True
    place: bool = True
    """Move the model into the repository at the end."""
    largest_batch: int = 64
    """Largest batch to measure if the model can batch and does not limit the size itself."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Sizes to measure inputs with variable dimensions with, by name, without the batch."""
    origin: str = ""
    """The name that the artifact was fetched by, with its revision; empty for a local one."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Files to write into the model's directory, beside its versions: name to text."""


_BLOCK: Final = 1 << 24
_PREFIX: Final = ".adding-"
"""Prefix of staging directories; servers ignore names that begin with a dot."""

Advance = Callable[[int], None]
"""Called with the number of bytes that were just copied."""


class Staging:
    """A temporary repository that contains only the new model, hidden from servers until it takes its place atomically.

    A context manager that deletes whatever has not taken its place.
    """

    def __init__(self, destination: Destination, *, elsewhere: bool = False) -> None:
        """``elsewhere``: the model will not take its place, so it need not be staged on the same disk."""
        self._destination = destination
        self._elsewhere = elsewhere
        self._made: list[Path] = []
        self.repository = Path()

    @property
    def directory(self) -> Path:
        """Directory of the staged model."""
        return self.repository / self._destination.name

    @property
    def version_directory(self) -> Path:
        """Directory of the new version."""
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
            remedy = "Make the directory writable, or specify another with --model-repository."
            raise Internal(f"{target} is not writable: {error.strerror}.\n    {remedy}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.repository, ignore_errors=True)
        self._remove_made()

    def _remove_made(self) -> None:
        """Remove the directories of the repository that this object created, unless they contain the model."""
        for path in filter(Path.exists, self._made):
            try:
                path.rmdir()
            except OSError:  # not empty: it contains the model
                break

    def lay_out(self, artifact: Artifact, advance: Advance) -> None:
        """Copy the files of an artifact, and create the generated ones. Raises ``NeriteError``."""
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
        """Copy the files that all versions of the existing model share, because the new version will use them."""
        for child in self._destination.directory.iterdir():
            if not (child.is_dir() and child.name.isdecimal()):
                _copy(child, self.directory / child.name, advance)

    def write(self, name: str, text: str) -> None:
        """Write a file into the model's directory that all versions share, such as the configuration."""
        (self.directory / name).write_text(text, encoding="utf-8")

    def take_place(self) -> None:
        """Move the model or the version to its destination atomically. Raises ``AlreadyExists``."""
        source, target = self._move()
        try:
            if self._destination.replaces:
                exchange.exchange(source, target)
            else:
                os.rename(source, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise AlreadyExists(f"{target} was created in the meantime.\n    Check what it contains.") from None
            raise _not_copied(error) from None

    @contextmanager
    def taken_back_on_error(self) -> Iterator[None]:
        """Undo ``take_place`` if the ``with`` block fails."""
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
        """Return the staged directory and its destination."""
        wanted = self._destination
        if wanted.joins:
            return self.version_directory, wanted.directory / str(wanted.version)
        return self.directory, wanted.directory


def _copy_all(files: Mapping[str, Path], directory: Path, advance: Advance) -> None:
    for name, source in files.items():
        _copy(source, directory / name, advance)


def _copy(source: Path, target: Path, advance: Advance) -> None:
    """Copy a file or a directory. Modification times are not kept, so that servers notice that the file changed."""
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
    remedy = "Free some disk space." if error.errno == errno.ENOSPC else "Check the permissions of this path."
    return Internal(f"the model could not be copied: {error.filename or ''}: {error.strerror}.\n    {remedy}")
