"""Strings for OpenVINO, which takes them in arrays of one width and gives them back like that."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from nerite.backends.ports import Shape
from nerite.core.tensor import Array, Buffer, decode_bytes


def as_fixed_width(shape: Shape, data: Buffer) -> Array:
    """Return an array of strings in one width, from the wire form of a tensor of this shape."""
    elements = decode_bytes(data, prod(shape))
    return elements.astype(f"S{max(map(len, elements), default=0) or 1}").reshape(shape)


def as_objects(tensor: Any) -> Array:
    """Return the strings of an ``openvino.Tensor`` as objects of type ``bytes``; zeros at the end of one are lost."""
    if not tensor.size:
        return np.empty(tuple(tensor.shape), object)
    return tensor.bytes_data.astype(object)  # type: ignore[no-any-return]  # The package has no types.
