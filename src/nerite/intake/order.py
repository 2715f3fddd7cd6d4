"""What is to be added, and who looks on meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nerite.client import TensorDescription
from nerite.intake.measurement import Shapes
from nerite.intake.outcome import Outcome


class Watcher(Protocol):
    """Who looks on while a model is added, and decides."""

    def copied(self, done: int, total: int) -> None:
        """Bytes were copied."""

    def doing(self, what: str) -> None:
        """Something begins that may take its time."""

    def accepts(self, outcome: Outcome) -> bool:
        """Say whether the settings that are proposed are to be written."""


@dataclass(frozen=True)
class Order:
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
