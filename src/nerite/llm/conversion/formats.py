"""Converts weights to formats with fewer bits, in parts of some megabytes, from file to file.

What is made lies in an unnamed file, whose pages the system may write to the disk whenever it needs the memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.core.tensor import Array
from nerite.llm.conversion.weights import StoredTensor

FP16: Final = "fp16"
INT8: Final = "int8"
INT4: Final = "int4"
INTEGERS: Final = (INT8, INT4)
_PART: Final = 1 << 22
"""Elements that are converted at a time."""
_LARGEST: Final = 65504
"""The largest number that 16 bits can hold."""
_SMALLEST_SCALE: Final = 2.0**-24
_GROUPS: Final = (128, 64, 32)
"""How many numbers of a row may have a scale of their own."""


class QuantizedMatrix(NamedTuple):
    """A matrix whose numbers are ``(values - zeros) * scales``, for each group of a row."""

    bits: int
    groups: int
    """Number of groups of a row."""
    values: Array
    """Integers without a sign. Of two with 4 bits, which are in one byte, the first has the lower bits."""
    zeros: Array
    """Likewise, one for each group of each row."""
    scales: Array
    """Of 16 bits, one for each group of each row."""


def halved(tensor: StoredTensor, room: Path) -> Array | None:
    """Return weights with 16 bits each, made in the directory ``room``; None if they do not fit into 16 bits."""
    made = _memory(room, tensor.shape, np.float16)
    for rows, part in _parts(tensor):
        if np.abs(part).max() > _LARGEST:
            return None
        made[rows] = part
    return made


def group_of(columns: int) -> int:
    """Return how many numbers of a row share a scale if they have 4 bits; 0 if the rows cannot be divided."""
    return next((size for size in _GROUPS if columns % size == 0), 0)


def quantized(tensor: StoredTensor, room: Path, bits: int = 8, group: int = 0) -> QuantizedMatrix:
    """Return weights with 8 or 4 bits each, made in the directory ``room``; 0 is a group for each whole row."""
    count, columns = tensor.shape
    group = group or columns
    largest = (1 << bits) - 1
    values = _memory(room, (count, columns * bits // 8), np.uint8)
    zeros, scales = (np.zeros((count, columns // group, 1), kind) for kind in (np.uint8, np.float16))
    for rows, part in _parts(tensor):
        divided = part.reshape(len(part), -1, group)
        lowest, highest = (edge(divided, axis=2, keepdims=True) for edge in (np.min, np.max))
        lowest, highest = np.minimum(lowest, 0), np.maximum(highest, 0)  # zero stays zero
        scales[rows] = np.maximum((highest - lowest) / largest, _SMALLEST_SCALE)
        scale = scales[rows].astype(np.float32)
        zero = np.clip(np.rint(-lowest / scale), 0, largest)
        zeros[rows] = zero
        found = np.clip(np.rint(divided / scale) + zero, 0, largest).astype(np.uint8).reshape(part.shape)
        values[rows] = found if bits == 8 else _packed(found)
    return QuantizedMatrix(bits, columns // group, values, zeros if bits == 8 else _packed(zeros.reshape(-1)), scales)


def _packed(numbers: Array) -> Array:
    """Return numbers of 4 bits, two in a byte; a zero follows an odd number of them."""
    if numbers.shape[-1] % 2:
        numbers = np.append(numbers, np.uint8(0))
    packed: Array = numbers[..., 0::2] | numbers[..., 1::2] << 4
    return packed


def _parts(tensor: StoredTensor) -> Iterator[tuple[slice, Array]]:
    """Yield parts of a matrix with 32 bits per element, and which rows they are."""
    rows, columns = tensor.shape
    step = max(1, _PART // columns)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        yield part, tensor.floats(part)


def _memory(room: Path, shape: tuple[int, ...], kind: Any) -> Array:
    with tempfile.TemporaryFile(dir=room) as file:
        return np.memmap(file, kind, "w+", shape=shape)
