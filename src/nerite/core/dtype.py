"""The fourteen data types of the protocol, under each of their names."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np


class DataType(NamedTuple):
    """One element type.

    ``size`` is bytes an element, 0 for BYTES whose elements carry their own length. ``numpy`` is the array type
    the bytes are viewed as; BF16, which numpy lacks, is viewed as its raw 16-bit words.
    """

    name: str
    """On the wire: ``FP32``."""
    config_name: str
    """In config.pbtxt: ``TYPE_FP32``."""
    number: int
    """In the protobuf enum."""
    size: int
    numpy: np.dtype[np.generic]


def _type(name: str, config_name: str, number: int, numpy: str) -> DataType:
    dtype = np.dtype(numpy)
    return DataType(name, config_name, number, 0 if name == "BYTES" else dtype.itemsize, dtype)


BOOL: Final = _type("BOOL", "TYPE_BOOL", 1, "?")
UINT8: Final = _type("UINT8", "TYPE_UINT8", 2, "u1")
UINT16: Final = _type("UINT16", "TYPE_UINT16", 3, "<u2")
UINT32: Final = _type("UINT32", "TYPE_UINT32", 4, "<u4")
UINT64: Final = _type("UINT64", "TYPE_UINT64", 5, "<u8")
INT8: Final = _type("INT8", "TYPE_INT8", 6, "i1")
INT16: Final = _type("INT16", "TYPE_INT16", 7, "<i2")
INT32: Final = _type("INT32", "TYPE_INT32", 8, "<i4")
INT64: Final = _type("INT64", "TYPE_INT64", 9, "<i8")
FP16: Final = _type("FP16", "TYPE_FP16", 10, "<f2")
FP32: Final = _type("FP32", "TYPE_FP32", 11, "<f4")
FP64: Final = _type("FP64", "TYPE_FP64", 12, "<f8")
BYTES: Final = _type("BYTES", "TYPE_STRING", 13, "O")
BF16: Final = _type("BF16", "TYPE_BF16", 14, "<u2")

ALL: Final = (
    BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16, FP32, FP64, BYTES, BF16,
)  # fmt: skip
BY_NAME: Final[dict[str, DataType]] = {dtype.name: dtype for dtype in ALL}
BY_CONFIG_NAME: Final[dict[str, DataType]] = {dtype.config_name: dtype for dtype in ALL}
_BY_NUMPY: Final[dict[np.dtype[np.generic], DataType]] = {dtype.numpy: dtype for dtype in ALL if dtype is not BF16}


def from_numpy(dtype: np.dtype[np.generic]) -> DataType | None:
    """Return the protocol's type for a numpy type, or None where there is none (complex, datetime, …)."""
    found = _BY_NUMPY.get(dtype)
    if found is None:
        if dtype.kind in "SU":
            return BYTES
        found = _BY_NUMPY.get(dtype.newbyteorder("<"))
    return found
