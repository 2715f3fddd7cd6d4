"""``Artifact``: what was recognised; ``Unusable``: what was recognised and cannot be served as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
