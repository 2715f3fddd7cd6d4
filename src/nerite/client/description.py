"""What a server says of its models: versions and their states, and the tensors of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A line of the repository index. A model that was never loaded has neither version nor state."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
    content_hash: str = ""
    """Of the files that are served, from servers that tell it."""

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> ModelVersion:
        """Read an entry of the index."""
        return cls(*(str(entry.get(name, "")) for name in ("name", "version", "state", "reason", "content_hash")))


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """An input or an output. In its shape -1 stands for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> TensorDescription:
        """Read an entry of a model's metadata. Some servers write sizes as texts."""
        return cls(str(entry["name"]), str(entry["datatype"]), tuple(int(size) for size in entry["shape"]))

    def __str__(self) -> str:
        return f"{self.name} ({self.datatype} {list(self.shape)})"


@dataclass(frozen=True, slots=True)
class Model:
    """The metadata of a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Model:
        """Read the metadata that a server sent."""
        return cls(
            name=str(document["name"]),
            versions=tuple(map(str, document.get("versions", ()))),
            platform=str(document.get("platform", "")),
            inputs=tuple(map(TensorDescription.read, document.get("inputs", ()))),
            outputs=tuple(map(TensorDescription.read, document.get("outputs", ()))),
        )
