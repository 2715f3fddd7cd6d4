"""An input of a request, and what is asked of the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nerite.core.tensor import Buffer


@dataclass(frozen=True, slots=True)
class Place:
    """A place in shared memory that the server knows."""

    region: str
    size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input: its data in wire form, or where in shared memory they are."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer | Place


@dataclass(frozen=True, slots=True)
class Output:
    """An output that is asked for, and where it is to be put; None for into the answer."""

    name: str
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says."""

    model: str
    version: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Output, ...] = ()
    """None: all of them, in the answer."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
