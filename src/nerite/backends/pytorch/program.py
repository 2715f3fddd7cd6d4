"""What a model that is open can be asked to do, whichever kind it is. No framework is needed to read this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from nerite.backends.arrays.graph import GraphTensor
from nerite.core.dtype import DataType

Path: TypeAlias = tuple[str | int, ...]
"""The way into a nested result: keys of dictionaries, positions in tuples. Empty for a single tensor."""
Call: TypeAlias = Callable[[list[Any]], Any]
"""Computes a result from values in a fixed order. Raises what PyTorch raises."""


class Slot(NamedTuple):
    """One tensor, or list of strings, that a program takes or gives."""

    name: str
    """What a configuration calls it if the program has the say."""
    aliases: tuple[str, ...] = ()
    """Other names, besides ``<any name>__<position>``."""
    datatype: DataType | None = None
    """None where the program does not say."""
    dims: tuple[int, ...] | None = None
    """All of the shape, -1 for any size; None where the program does not say."""
    text: bool | None = False
    """A list of strings; None where the program does not say."""
    optional: bool = False
    """An input that may be left out."""
    path: Path = ()
    """To an output, in what a call returns."""

    def as_tensor(self, name: str) -> GraphTensor | None:
        """Return what the program says of it, as ``name``; None if it says nothing."""
        if self.datatype is None or self.dims is None:
            return None
        return GraphTensor(name, self.datatype, self.dims)


@dataclass(frozen=True)
class Program:
    """A model on one device."""

    inputs: tuple[Slot, ...] | None
    """None: as many as the configuration has, by its names."""
    outputs: tuple[Slot, ...] | None
    """None: nobody knows before it has run."""
    bind: Callable[[Sequence[str]], Call]
    """Return what computes from values for these inputs, by the program's own names, in this order."""
    device: str
    """Where it wants its inputs."""
    writes_inputs: bool = False
    """It may write into its inputs."""
    keeps_state: bool = False
    """It may change itself when it runs, and give out what it will change later."""
    highest_batch: int | None = None
    """What the first dimension may be at most; None: anything."""


def described(path: Path) -> str:
    """Return a path as Triton writes it: ``[key][0]``."""
    return "".join(f"[{step}]" for step in path)


def output(position: int, path: Path, **what: Any) -> Slot:
    """Return the output at ``position`` of all, with the names that its path gives it and ``what`` is known of it."""
    alone = len(path) == 1 and isinstance(path[0], str)
    return Slot(str(path[0]) if alone else f"OUTPUT__{position}", (f"RESULT{described(path)}",), path=path, **what)
