"""Named tensors, created by a model from an array or received and converted lazily; data types and string encoding."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nerite.core import tensor as dtypes
from nerite.core.tensor import DataType, DeviceBuffer, TensorData, TensorSpec, buffer_of, encode_bytes, to_array
from nerite.devices import dlpack, exchange
from triton_python_backend_utils import arguments
from triton_python_backend_utils.arguments import Mismatch, Text
from triton_python_backend_utils.errors import TritonModelException, incompatible, incompatible_call

# Exchange of tensors with other libraries: zero-copy, on the host and on GPUs.


def take(name: str, source: object) -> Tensor:
    """Import ``source``, a capsule or an object that provides one, without a copy.

    A tensor on a GPU is copied to the host where this process cannot use GPUs itself: without ``cuda-bindings``, with
    the help of the library that made it. Raises ``TritonModelException`` with Triton's text if it is not supported.
    """
    try:
        if dlpack.is_capsule(source):
            capsule = source
        elif hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
            if source.__dlpack_device__()[0] == dlpack.CUDA and hasattr(source, "cpu") and not exchange.available():
                source = source.cpu()  # torch
            _check_device(source.__dlpack_device__()[0])
            capsule = source.__dlpack__(stream=None)
        else:
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule         or have `__dlpack__` and "
                "`__dlpack_device__` attributes"
            )
        device_type = dlpack.dl_tensor(capsule).device_type
        if device_type == dlpack.CUDA and exchange.available():
            return ReceivedTensor(*dlpack.take_from_device(name, capsule))
        if device_type == dlpack.CUDA and "torch" in sys.modules:
            capsule = sys.modules["torch"].utils.dlpack.from_dlpack(capsule).cpu().__dlpack__()
            device_type = dlpack.dl_tensor(capsule).device_type
        _check_device(device_type)
        datatype, array = dlpack.take_from_host(capsule)
    except dlpack.DlpackError as error:
        raise TritonModelException(str(error)) from None
    if datatype is not dtypes.BF16:
        return Tensor(name, array)
    return ReceivedTensor(TensorSpec(name, datatype, array.shape), buffer_of(array, datatype))


def give(datatype: DataType, array: NDArray[Any]) -> object:
    """Export ``array``, whose elements are of ``datatype``, as a capsule, which keeps the array alive.

    Raises ``TritonModelException`` for BYTES.
    """
    if datatype is dtypes.BYTES:
        raise TritonModelException("DLPack does not have support for string tensors.")
    return dlpack.give_from_host(datatype, array)


def _check_device(device_type: int) -> None:
    if device_type == dlpack.CUDA and not exchange.available():
        raise TritonModelException(
            "DLPack capsule passed pointer to memory allocated on GPU device,           when GPU is not available. "
            "Move the tensor to the host first: tensor.cpu()"
        )
    if device_type not in (dlpack.CPU, dlpack.CUDA, dlpack.PINNED):
        raise TritonModelException(f"DLDevice type {device_type} is not support by Python backend.")


_ndarray = np.ndarray
_BYTES = dtypes.BYTES
_SMALL = 2048
"""Size in bytes up to which a copy costs half as much as a view and is cheaper to pass on."""
_BY_NUMPY: dict[np.dtype[Any], DataType] = {
    datatype.numpy: datatype for datatype in dtypes.ALL if datatype is not dtypes.BF16
}


class Tensor:
    """Name and value of an input or an output.

    ``Tensor(name, array)`` keeps ``array`` without a copy if it is contiguous; strings are encoded at once. Raises
    ``TritonModelException`` for an element type that the protocol does not have, and ``TypeError`` for anything but an
    array.
    """

    __slots__ = ("_array", "_buffer", "_datatype", "_name", "_shape")

    def __init__(self, name: Text, numpy_array: NDArray[Any], /) -> None:
        if type(numpy_array) is not _ndarray or type(name) is not str or not name or not name.isascii():
            name = _checked(name, numpy_array)
        if not numpy_array.flags.c_contiguous:
            numpy_array = np.ascontiguousarray(numpy_array)
        datatype = _BY_NUMPY.get(numpy_array.dtype)
        if datatype is None:
            if numpy_array.dtype.kind != "S":
                raise TritonModelException("NumPy dtype is not supported.")
            datatype = _BYTES
        self._name = name
        self._datatype = datatype
        self._shape: tuple[int, ...] = numpy_array.shape
        self._array: NDArray[Any] | None = numpy_array
        self._buffer: TensorData | None = encode_bytes(numpy_array) if datatype is _BYTES else None

    def name(self) -> str:
        """Return the tensor's name."""
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        """Return the tensor as an array: the same object each time, BYTES as an object array.

        Raises ``TritonModelException`` for BF16, which numpy does not have.
        """
        assert self._array is not None
        return self._array

    def triton_dtype(self) -> int:
        """Return the number of the data type, as ``triton_to_numpy_type`` expects it."""
        return self._datatype.number

    def shape(self) -> list[int]:
        """Return the size of each dimension."""
        return list(self._shape)

    def is_cpu(self) -> bool:
        """Return whether the tensor is in host memory, and not on a GPU."""
        return not isinstance(self._buffer, DeviceBuffer)

    def to_dlpack(self) -> object:
        """Return a DLPack capsule that shares the tensor's memory. Raises ``TritonModelException`` for BYTES."""
        return give(self._datatype, self.as_numpy())

    @staticmethod
    def from_dlpack(name: Text, tensor: object, /) -> Tensor:
        """Return a tensor that shares the memory of a DLPack capsule, or of an object that provides one.

        Raises ``TritonModelException`` for memory that is not contiguous, or neither on the host nor on a GPU.
        """
        try:
            name = arguments.text("The name of a tensor", name)
        except Mismatch as mismatch:
            signature = "(arg0: str, arg1: object) -> c_python_backend_utils.Tensor"
            raise incompatible_call("from_dlpack", signature, mismatch, name, tensor) from None
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        return take(name, tensor)

    def __dlpack__(self, *, stream: object = None, **_: object) -> object:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, buffer.device) if isinstance(buffer := self._buffer, DeviceBuffer) else (dlpack.CPU, 0)


class ReceivedTensor(Tensor):
    """Tensor on a buffer in wire format, or in GPU memory. An array is created lazily; writable if the buffer is."""

    __slots__ = ("_spec",)

    _buffer: TensorData

    def __init__(self, spec: TensorSpec, buffer: TensorData) -> None:
        self._spec = spec
        self._name = spec.name
        self._datatype = spec.datatype
        self._shape = spec.shape
        self._buffer = buffer
        self._array = None

    def as_numpy(self) -> NDArray[Any]:
        """Return the tensor as an array, a view on the buffer. Raises ``TritonModelException`` if it is on a GPU."""
        array = self._array
        if array is None:
            buffer = self._buffer
            if isinstance(buffer, DeviceBuffer):
                raise TritonModelException(
                    "Tensor is stored in GPU and cannot be converted to NumPy. Use to_dlpack(), or remove "
                    "FORCE_CPU_ONLY_INPUT_TENSORS from the parameters of the model"
                )
            if self._datatype is dtypes.BF16:
                raise TritonModelException(
                    "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
                )
            array = self._array = to_array(self._spec, buffer)
        return array

    def to_dlpack(self) -> object:
        """Return a DLPack capsule that shares the buffer, where it is; supports BF16."""
        buffer = self._buffer
        if isinstance(buffer, DeviceBuffer):
            return dlpack.give_from_device(self._datatype, self._shape, buffer, (dlpack.CUDA, buffer.device))
        return give(self._datatype, to_array(self._spec, buffer))


def wire_form(tensor: Tensor) -> TensorData:
    """Return the bytes of ``tensor``: a view on its memory, or a copy if that is cheaper than a view."""
    buffer = tensor._buffer
    if buffer is None:
        array = tensor._array
        assert array is not None
        # A memoryview with a zero in its shape cannot be cast, but no such array is large.
        buffer = array.tobytes() if array.nbytes <= _SMALL else array.data.cast("B")
    return buffer


def _checked(name: object, value: object) -> str:
    """Return the name as text; raise for invalid arguments of ``Tensor``. Subclasses of ``ndarray`` are accepted."""
    try:
        plain = arguments.text("The name of a tensor", name)
        arguments.instance(value, _ndarray)
    except Mismatch as mismatch:
        raise incompatible("Tensor(arg0: str, arg1: numpy.ndarray)", mismatch, name, value) from None
    if not plain:
        raise TritonModelException("Tensor name cannot be an empty string.")
    if isinstance(value, np.ma.MaskedArray):
        raise TritonModelException(
            f"Tensor '{plain}' is a masked array, but a mask cannot be sent. Fill it first: array.filled(value)"
        )
    return plain


# Conversion between data types of the protocol and of numpy, and between strings and their wire format.

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
"""Numpy types by the name in configurations. BF16 is missing because numpy does not have it."""

_BY_NUMBER: dict[int, type] = dict(enumerate([np.bool_, *list(TRITON_STRING_TO_NUMPY.values())[1:]], start=1))
_NUMBERS: dict[np.dtype[Any], int] = {np.dtype(kind): number for number, kind in _BY_NUMBER.items()}


def triton_string_to_numpy(triton_type_string: str) -> type:
    """Return the numpy type for a name like ``TYPE_FP32``. Raises ``KeyError`` if there is none."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type | None:
    """Return the numpy type for the number of a data type, or None."""
    return _BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: DTypeLike) -> int | None:
    """Return the number of the data type for a numpy type, or None."""
    if data_type is np.bytes_:
        return _NUMBERS[np.dtype(object)]
    return _NUMBERS.get(np.dtype(data_type))


def serialize_byte_tensor(input_tensor: NDArray[Any]) -> bytes | tuple[()] | None:
    """Encode an array of strings: each element is preceded by its length in four bytes.

    An array without elements gives an empty tuple and an array of numbers gives None, as in Triton.
    """
    if input_tensor.size == 0:
        return ()
    return encode_bytes(input_tensor) if input_tensor.dtype.kind in "OS" else None


def deserialize_bytes_tensor(encoded_tensor: bytes | NDArray[np.uint8]) -> NDArray[np.object_]:
    """Decode strings into a flat object array of ``bytes``.

    Raises ``ValueError`` if the data ends within an element.
    """
    raw = bytes(encoded_tensor)
    elements: list[bytes] = []
    at = 0
    while at < len(raw):
        end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
        if at + 4 > len(raw) or end > len(raw):
            raise ValueError(f"the element at offset {at} extends beyond the {len(raw)} bytes of data")
        elements.append(raw[at + 4 : end])
        at = end
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array
