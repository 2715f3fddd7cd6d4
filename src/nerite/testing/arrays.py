"""Between the arrays of a test and the buffers of a request."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.tensor import Buffer, TensorSpec, from_array, to_array

Answer: TypeAlias = dict[str, NDArray[Any]]
"""Tensors by name: the outputs of one request, in the model's order."""


def to_wire(name: str, value: ArrayLike, declared: DataType | None) -> tuple[TensorSpec, Buffer]:
    """Return specification and bytes of a test's value; the bytes are a copy, which the model may write to.

    An array keeps its type. Anything else (lists, numbers, strings) becomes the declared type, as far as it is known.
    BF16 is given as UINT16, the words of the numbers.
    """
    if not isinstance(value, np.ndarray):
        value = np.asarray(value, None if declared is None else declared.numpy)
    if value.dtype.kind == "U":
        value = value.astype(object)
    spec, data = from_array(name, value)
    if declared is dtypes.BF16 and spec.datatype is dtypes.UINT16:
        spec = TensorSpec(name, dtypes.BF16, spec.shape)
    return spec, bytearray(data)


def to_test(spec: TensorSpec, data: Buffer) -> NDArray[Any]:
    """Return an output as an array of its own; BYTES as an object array of ``bytes``, BF16 as UINT16 words."""
    return to_array(spec, bytearray(data))
