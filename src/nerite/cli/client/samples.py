"""Made-up inputs: random data that fits, and an example to write after."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence

import numpy as np

from nerite.client import Model, TensorDescription
from nerite.core import dtype as dtypes
from nerite.core.tensor import Array

_MOST_ELEMENTS = 16
"""An example with more elements than this would not be something to read."""
_WORDS = ("amber", "coral", "drift", "foam", "kelp", "pearl", "reef", "shell", "tide", "wave")


def random_value(tensor: TensorDescription) -> Array:
    """Return random data for an input; a dimension of any size gets the size 1."""
    shape = _smallest(tensor)
    generator = np.random.default_rng()
    datatype = dtypes.BY_NAME[tensor.datatype]
    if datatype is dtypes.BYTES:
        return generator.choice(np.array(_WORDS, object), shape)
    if datatype is dtypes.BF16:
        # Multiples of 1/128 below 1 are exact in it.
        return (generator.integers(0, 128, shape) / 128).astype(np.float32)
    if datatype.numpy.kind == "f":
        return generator.random(shape).astype(datatype.numpy)
    return generator.integers(0, 2 if datatype is dtypes.BOOL else 100, shape).astype(datatype.numpy)


def advice(model: Model, needed: Sequence[TensorDescription], missing: Sequence[TensorDescription], url: str) -> str:
    """Return what to say about inputs that are missing: what they are like, and a command that works."""
    lines = ["Missing inputs:", *(f"  {tensor}" for tensor in missing)]
    server = [] if url == "localhost:8000" else ["--url", url]
    command = ["nerite", "client", *server, "infer", model.name]
    if all(math.prod(_smallest(tensor)) <= _MOST_ELEMENTS for tensor in needed):
        lines.append(f"Example:  {shlex.join([*command, *map(_example, needed)])}")
    return "\n".join([*lines, f"Does it run at all?  {shlex.join([*command, '--random'])}"])


def _example(tensor: TensorDescription) -> str:
    shape = _smallest(tensor)
    if tensor.datatype == "BYTES":
        data: object = np.full(shape, "text", object).tolist()
        return f"{tensor.name}={'text' if math.prod(shape) == 1 else json.dumps(data)}"
    kind = dtypes.BY_NAME[tensor.datatype].numpy.kind
    return f"{tensor.name}={json.dumps(np.zeros(shape, bool if kind == 'b' else int).tolist())}"


def _smallest(tensor: TensorDescription) -> tuple[int, ...]:
    return tuple(1 if size == -1 else size for size in tensor.shape)
