"""The scalar types of the configuration schema: Python types that also say their width on the wire."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Annotated, Final, Literal

Int32 = Annotated[int, "int32"]
Int64 = Annotated[int, "int64"]
Uint32 = Annotated[int, "uint32"]
Uint64 = Annotated[int, "uint64"]
Single = Annotated[float, "float"]
Double = Annotated[float, "double"]

DataTypeName = Annotated[
    Literal[
        "TYPE_INVALID",
        "TYPE_BOOL",
        "TYPE_UINT8",
        "TYPE_UINT16",
        "TYPE_UINT32",
        "TYPE_UINT64",
        "TYPE_INT8",
        "TYPE_INT16",
        "TYPE_INT32",
        "TYPE_INT64",
        "TYPE_FP16",
        "TYPE_FP32",
        "TYPE_FP64",
        "TYPE_STRING",
        "TYPE_BF16",
    ],
    "DataType",
]
"""An enum is a ``Literal`` whose order is its numbering; the annotation is its name in the protobuf schema."""

BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
"""The smallest and the largest value of each integer type."""


def single(value: float) -> float:
    """Return the 32-bit float nearest to ``value``, infinity where it is too large for one."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def show_float(value: float, kind: str) -> str:
    """Print a number of kind ``float`` or ``double`` with no more digits than it takes to read the same one back."""
    brief, full = (6, 9) if kind == "float" else (15, 17)
    text = f"{value:.{brief}g}"
    same = (single(float(text)) if kind == "float" else float(text)) == value
    return text if same else f"{value:.{full}g}"
