"""A framework that takes part: how it keeps a model, how it is served, and how its own loop calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Call = Callable[[NDArray[np.float32]], Any]
"""Computes a batch, and returns what the framework returns for it."""

ROWS: Mapping[str, tuple[int, ...]] = {"cnn": (3, 32, 32), "encoder": (64, 768), "forest": (30,)}
"""The shape of one row of each model's input."""


class Contestant(NamedTuple):
    """A kind of file, with the framework that computes it."""

    name: str
    batches: Mapping[str, Sequence[int]]
    """Of the models that it has."""
    write: Callable[[str, Path], None]
    """Writes a model into the folder of its version."""
    opened: Callable[[str, Path], Call]
    """Opens what ``write`` wrote, to compute with one thread."""
    config: Callable[[str], str]
    """Of a model, besides batches and instances: one thread."""
    input: str = "X"
    output: str = "OUT"


def tensors(model: str) -> str:
    """Return the inputs and outputs, for a configuration that cannot be completed."""
    dims = ", ".join(map(str, ROWS[model]))
    return (
        f'input {{ name: "X" data_type: TYPE_FP32 dims: [ {dims} ] }}\n'
        'output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }\n'
    )


def parameter(name: str, value: str) -> str:
    """Return a parameter of a configuration."""
    return f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n'


def rows(model: str, batch: int) -> NDArray[np.float32]:
    """Return a batch, the same one each time."""
    return np.random.default_rng(1).standard_normal((batch, *ROWS[model]), np.float32)
