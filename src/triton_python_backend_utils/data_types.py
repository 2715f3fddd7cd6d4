"""Between the data types of the protocol and those of numpy, and between strings and their wire form."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nerite.core.tensor import encode_bytes

TRITON_STRING_TO_NUMPY: dict[str, type] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
"""By the name that a configuration has for it. BF16 is missing: numpy does not have it."""

_BY_NUMBER: dict[int, type] = dict(enumerate([np.bool_, *list(TRITON_STRING_TO_NUMPY.values())[1:]], start=1))
_NUMBERS: dict[np.dtype[Any], int] = {np.dtype(kind): number for number, kind in _BY_NUMBER.items()}


def triton_string_to_numpy(triton_type_string: str) -> type:
    """Return the numpy type for ``TYPE_FP32`` and the like. Raises ``KeyError`` for a name that has none."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type | None:
    """Return the numpy type for the number of a data type, or None where there is none."""
    return _BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: DTypeLike) -> int | None:
    """Return the number of the data type for a numpy type, or None where there is none."""
    if data_type is np.bytes_:
        return _NUMBERS[np.dtype(object)]
    return _NUMBERS.get(np.dtype(data_type))


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> bytes | tuple[()] | None:
    """Return the wire form of an array of strings: each element behind its length in four bytes.

    An array without elements gives an empty tuple and one of numbers gives None, as Triton's function does.
    """
    if input_tensor.size == 0:
        return ()
    return encode_bytes(input_tensor) if input_tensor.dtype.kind in "OS" else None


def deserialize_bytes_tensor(encoded_tensor: bytes | NDArray[np.uint8]) -> NDArray[np.object_]:
    """Return the elements of a wire form as a flat object array of ``bytes``.

    Raises ``ValueError`` for one that ends in the middle of an element.
    """
    raw = bytes(encoded_tensor)
    elements: list[bytes] = []
    at = 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if at + 4 > len(raw) or end > len(raw):
            raise ValueError(f"the element at offset {at} is longer than the {len(raw)} bytes there are")
        elements.append(raw[at + 4 : end])
        at = end
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array
