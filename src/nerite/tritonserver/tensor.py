"""Tensors of the in-process interface: views on data in host memory."""

from __future__ import annotations

import enum
from typing import Any, ClassVar

import numpy as np

from nerite.core import tensor as dtypes
from nerite.core.tensor import Array, Buffer, TensorSpec, buffer_of, encode_bytes, from_numpy
from nerite.functions.server import as_array
from nerite.tritonserver.errors import InvalidArgumentError, UnsupportedError

_CPU = (1, 0)


class DataType(enum.Enum):
    """Element types."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"
    BF16 = "BF16"


class MemoryType(enum.Enum):
    """Where a tensor is; here always ``CPU``."""

    CPU = "CPU"
    CPU_PINNED = "CPU_PINNED"
    GPU = "GPU"


class Tensor:
    """A tensor of a request or response. Supports DLPack, so ``numpy.from_dlpack`` views it without a copy."""

    memory_type: ClassVar[MemoryType] = MemoryType.CPU
    memory_type_id: ClassVar[int] = 0

    def __init__(self, array: Array, data_type: DataType) -> None:
        self._array = array
        self.data_type = data_type

    @property
    def shape(self) -> list[int]:
        """The sizes."""
        return list(self._array.shape)

    @property
    def size(self) -> int:
        """Number of bytes; of BYTES, in wire format."""
        return len(encode_bytes(self._array)) if self.data_type is DataType.BYTES else self._array.nbytes

    @property
    def data_ptr(self) -> int:
        """Address of the data."""
        return int(self._array.ctypes.data)

    @classmethod
    def from_object(cls, value: Any) -> Tensor:
        """Return a tensor of an array, of an object with DLPack, or of lists of numbers, text or bytes."""
        if isinstance(value, Tensor):
            return value
        if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
            return cls.from_dlpack(value)
        array = np.asarray(value)
        if array.dtype.kind in "USO":
            return cls.from_string_array(np.asarray(value, object))
        return cls._of(array)

    @classmethod
    def from_dlpack(cls, value: Any) -> Tensor:
        """Return a view on an object with DLPack in host memory."""
        try:
            return cls._of(np.from_dlpack(value))
        except (RuntimeError, BufferError, TypeError) as error:
            raise InvalidArgumentError(f"the tensor cannot be read: {error}") from None

    @classmethod
    def from_bytes_array(cls, value: Any) -> Tensor:
        """Return a tensor of bytes."""
        return cls(np.asarray(value, object), DataType.BYTES)

    @classmethod
    def from_string_array(cls, value: Any) -> Tensor:
        """Return a tensor of text, in UTF-8."""
        return cls(np.asarray(value, object), DataType.BYTES)

    @classmethod
    def _of(cls, array: Array) -> Tensor:
        datatype = from_numpy(array.dtype)
        if datatype is None:
            raise InvalidArgumentError(f"{array.dtype} is not a type that tensors can have")
        return cls(array, DataType(datatype.name))

    @classmethod
    def received(cls, spec: TensorSpec, data: Buffer) -> Tensor:
        """Return a view on an output of the server."""
        return cls(as_array(spec, data), DataType(spec.datatype.name))

    def sendable(self, name: str) -> tuple[TensorSpec, Buffer]:
        """Return specification and data for the server."""
        datatype = dtypes.BY_NAME[self.data_type.value]
        spec = TensorSpec(name, datatype, self._array.shape)
        return spec, encode_bytes(self._array) if datatype is dtypes.BYTES else buffer_of(self._array, datatype)

    def to_bytes_array(self) -> Array:
        """Return the elements as an array of ``bytes``."""
        self._check_bytes()
        found = np.empty(self._array.shape, object)
        found.reshape(-1)[:] = [each.encode() if isinstance(each, str) else bytes(each) for each in self._array.flat]
        return found

    def to_string_array(self) -> Array:
        """Return the elements as an array of text."""
        return np.array([each.decode() for each in self.to_bytes_array().flat], np.str_).reshape(self._array.shape)

    def _check_bytes(self) -> None:
        if self.data_type is not DataType.BYTES:
            raise InvalidArgumentError(f"the tensor has the type {self.data_type.name}, and not BYTES")

    def to_host(self) -> Tensor:
        """Return the tensor itself: it is in host memory."""
        return self

    def to_device(self, device: str) -> Tensor:
        """Return the tensor itself for ``cpu``. Raises ``UnsupportedError`` for other devices."""
        if not str(device).startswith("cpu"):
            raise UnsupportedError(
                f"tensors are in host memory; move it there yourself: torch.from_dlpack(…).to('{device}')"
            )
        return self

    def __dlpack__(self, **more: Any) -> Any:
        if self.data_type is DataType.BYTES:
            raise InvalidArgumentError("DLPack has no strings: use to_bytes_array() or to_string_array()")
        array = self._array if self._array.flags.writeable else self._array.copy()
        return array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self._array, dtype)
