"""Tensors as the server handles them, a specification and a buffer in wire format; also the protocol's data types.

The server keeps buffers and creates arrays only where they are needed. In wire format numbers are little-endian and
row-major; a BYTES tensor is the concatenation of its elements, each preceded by its length in four little-endian bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray


class DataType(NamedTuple):
    """One of the protocol's fourteen element types, with all its names."""

    name: str
    """Name on the wire: ``FP32``."""
    config_name: str
    """Name in config.pbtxt: ``TYPE_FP32``."""
    number: int
    """Number in the protobuf enum."""
    size: int
    """Bytes per element; 0 for BYTES, whose elements have their own length."""
    numpy: np.dtype[np.generic]
    """Array type that the bytes are viewed as. numpy has no BF16, which is viewed as raw 16-bit words."""


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
    """Return the protocol's type for a numpy type, or None if it has no equivalent (complex, datetime, …)."""
    found = _BY_NUMPY.get(dtype)
    if found is None:
        if dtype.kind in "SU":
            return BYTES
        found = _BY_NUMPY.get(dtype.newbyteorder("<"))
    return found


ALIGNMENT = 64
"""Alignment in bytes of the first tensor of a large request."""

_LENGTH = struct.Struct("<I")

Buffer: TypeAlias = bytes | bytearray | memoryview
Array: TypeAlias = NDArray[Any]


class DeviceBuffer:
    """Bytes of a tensor in the memory of a GPU: allocated as long as something refers to this object.

    The bytes are complete: whatever computed them has been waited for.
    """

    __slots__ = ("__weakref__", "address", "device", "owner", "size")

    def __init__(self, device: int, address: int, size: int, owner: object) -> None:
        """``device`` is the GPU's number in this process. ``owner`` keeps the memory allocated."""
        self.device = device
        self.address = address
        self.size = size
        self.owner = owner

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> DeviceBuffer:
        """Return a part of it, as of other buffers."""
        start, end, _ = part.indices(self.size)
        return DeviceBuffer(self.device, self.address + start, max(end - start, 0), self.owner)


TensorData: TypeAlias = Buffer | DeviceBuffer
"""Data of a tensor in wire format, on the host or on a GPU."""
ABSENT: Final = memoryview(b"")
"""Stands for the bytes of a tensor in memory of a GPU that a client shares, where they were written or will be read."""


class WrongElementCount(bytes):
    """Wire format of a BYTES tensor that is known to have more or fewer elements than its shape implies."""

    elements: int
    """The number of elements; counting may stop at one more than the shape implies."""


class TensorSpec:
    """Name, type and shape of a tensor. Immutable; compared by value."""

    __slots__ = ("byte_size", "datatype", "elements", "name", "shape")

    def __init__(self, name: str, datatype: DataType, shape: tuple[int, ...]) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.elements = math.prod(shape)
        self.byte_size = self.elements * datatype.size if datatype.size else -1
        """Size of the data in bytes, or -1 if it depends on the data (BYTES)."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSpec):
            return NotImplemented
        return (self.name, self.datatype, self.shape) == (other.name, other.datatype, other.shape)

    def __hash__(self) -> int:
        return hash((self.name, self.datatype.name, self.shape))

    def __repr__(self) -> str:
        return f"TensorSpec({self.name!r}, {self.datatype.name}, {list(self.shape)})"


def read_only(data: TensorData) -> TensorData:
    """Return a view that does not allow to write. On a GPU, where no view can forbid it, the data itself."""
    return data if isinstance(data, DeviceBuffer) else memoryview(data).toreadonly()


def address_of(data: Buffer) -> int:
    """Return the address of bytes on the host."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def to_array(spec: TensorSpec, data: Buffer) -> Array:
    """View ``data`` as an array: zero-copy for numbers, an object array of ``bytes`` for BYTES.

    The view is as writable as the buffer and keeps it alive. ``data`` must have been validated against ``spec``.
    """
    if spec.datatype is BYTES:
        return decode_bytes(data, spec.elements).reshape(spec.shape)
    return np.ndarray(spec.shape, spec.datatype.numpy, data)


def from_array(name: str, array: Array) -> tuple[TensorSpec, Buffer]:
    """Return the specification and the wire format of ``array``: a view if its memory layout allows, else one copy.

    Raises ``TypeError`` for an element type without an equivalent in the protocol.
    """
    datatype = from_numpy(array.dtype)
    if datatype is None:
        raise TypeError(f"tensor '{name}' has data type {array.dtype}, which has no equivalent in the protocol")
    spec = TensorSpec(name, datatype, array.shape)
    if datatype is BYTES:
        return spec, encode_bytes(array)
    return spec, buffer_of(array, datatype)


def buffer_of(array: Array, datatype: DataType) -> Buffer:
    """Return the bytes of a numeric array as a flat view; copies only if not contiguous or not little-endian."""
    if array.dtype != datatype.numpy or not array.flags.c_contiguous:
        array = np.ascontiguousarray(array, datatype.numpy)
    # A memoryview with a zero in its shape cannot be cast.
    return array.data.cast("B") if array.size else b""


def decode_bytes(data: Buffer, count: int) -> Array:
    """Decode the wire format of a BYTES tensor into a flat object array of ``count`` elements."""
    elements = np.empty(count, object)
    elements[:] = split_bytes(data, count)
    return elements


def split_bytes(data: Buffer, count: int) -> list[bytes]:
    """Split the wire format of a BYTES tensor into ``count`` elements."""
    raw = bytes(data)
    elements: list[bytes] = []
    at = 0
    for _ in range(count):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(raw, at)[0]
        elements.append(raw[begin:at])
    return elements


def encode_bytes(array: Array) -> bytes:
    """Encode an array of strings in wire format: ``str`` as UTF-8, other objects as their ``str()``."""
    return join_bytes(array.reshape(-1).tolist() if array.dtype.kind != "S" else _fixed_width(array))


def _fixed_width(array: Array) -> list[bytes]:
    # numpy's "S" type drops trailing zero bytes when an element is read, which its users expect.
    return [bytes(element) for element in array.reshape(-1)]


def join_bytes(elements: Iterable[object]) -> bytes:
    """Encode elements as the wire format of a BYTES tensor."""
    parts: list[bytes | memoryview] = []
    for element in elements:
        raw = element if isinstance(element, bytes | memoryview) else str(element).encode()
        parts.append(len(raw).to_bytes(4, "little"))
        parts.append(raw)
    return b"".join(parts)
