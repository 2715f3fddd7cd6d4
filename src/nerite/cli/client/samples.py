"""What to say about inputs that are missing: an example to write after."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence

import numpy as np

from nerite.client import Model, TensorDescription
from nerite.client.random_value import smallest
from nerite.core import dtype as dtypes

_MOST_ELEMENTS = 16
"""An example with more elements than this would not be something to read."""


def advice(model: Model, needed: Sequence[TensorDescription], missing: Sequence[TensorDescription], url: str) -> str:
    """Return what to say about inputs that are missing: what they are like, and a command that works."""
    lines = ["Missing inputs:", *(f"  {tensor}" for tensor in missing)]
    server = [] if url == "localhost:8000" else ["--url", url]
    command = ["nerite", "client", *server, "infer", model.name]
    if all(math.prod(smallest(tensor)) <= _MOST_ELEMENTS for tensor in needed):
        lines.append(f"Example:  {shlex.join([*command, *map(_example, needed)])}")
    return "\n".join([*lines, f"Does it run at all?  {shlex.join([*command, '--random'])}"])


def _example(tensor: TensorDescription) -> str:
    shape = smallest(tensor)
    if tensor.datatype == "BYTES":
        data: object = np.full(shape, "text", object).tolist()
        return f"{tensor.name}={'text' if math.prod(shape) == 1 else json.dumps(data)}"
    kind = dtypes.BY_NAME[tensor.datatype].numpy.kind
    return f"{tensor.name}={json.dumps(np.zeros(shape, bool if kind == 'b' else int).tolist())}"
