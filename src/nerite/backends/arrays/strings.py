"""Strings, from their wire form to the arrays that frameworks take."""

from __future__ import annotations

from math import prod

import numpy as np

from nerite.backends.ports import Shape
from nerite.core.tensor import Array, Buffer, decode_bytes


def as_bytes(shape: Shape, data: Buffer) -> Array:
    """Return an array of ``bytes``, as objects."""
    return decode_bytes(data, prod(shape)).reshape(shape)


def as_text(shape: Shape, data: Buffer) -> Array:
    """Return an array of ``str``, as objects; of C strings of one width, where they are not text."""
    elements = decode_bytes(data, prod(shape))
    try:
        return np.array([element.decode() for element in elements], object).reshape(shape)
    except UnicodeDecodeError:
        # ONNX Runtime takes bytes that are not text in no other way, and needs the end marked.
        return elements.astype(f"S{max(map(len, elements)) + 1}").reshape(shape)
