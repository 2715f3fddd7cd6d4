"""Random data for an input: to see whether a model runs at all, and how long that takes."""

from __future__ import annotations

import numpy as np

from nerite.client.description import TensorDescription
from nerite.core import dtype as dtypes
from nerite.core.tensor import Array

_WORDS = ("amber", "coral", "drift", "foam", "kelp", "pearl", "reef", "shell", "tide", "wave")


def random_value(tensor: TensorDescription, shape: tuple[int, ...] = ()) -> Array:
    """Return random data of a ``shape``, or of the smallest that the input may have."""
    shape = shape or smallest(tensor)
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


def smallest(tensor: TensorDescription) -> tuple[int, ...]:
    """Return the shape of an input, with 1 for sizes that are free."""
    return tuple(1 if size == -1 else size for size in tensor.shape)
