"""Tensors as DLPack capsules, with which libraries exchange them without a copy: on the host and on GPUs.

numpy does the work on the host, except for two gaps: its error texts differ from Triton's, and it has no BF16. A BF16
tensor passes through numpy as UINT16: only the type code in the capsule differs, so it is changed on import and export.
Capsules of GPU memory are made and taken here, with ctypes.
"""

from __future__ import annotations

import ctypes
import itertools
from math import prod
from typing import Any, Final

import numpy as np

from nerite.core import tensor as dtypes
from nerite.core.tensor import Array, DataType, DeviceBuffer, TensorSpec
from nerite.devices import cuda

CPU: Final = 1
CUDA: Final = 2
PINNED: Final = 3
_UNSIGNED: Final = 1
_BFLOAT: Final = 4
_BOOL: Final = 6
_KINDS: Final = {0: "INT", 1: "UINT", 2: "FP", _BFLOAT: "BF"}
_CODES: Final = {"INT": 0, "UIN": 1, "FP1": 2, "FP3": 2, "FP6": 2, "BF1": _BFLOAT, "BOO": _BOOL}
_NAME: Final = b"dltensor"
_USED: Final = b"used_dltensor"


class DlpackError(Exception):
    """A tensor cannot be exchanged; the text is Triton's where it has one."""


class DlTensor(ctypes.Structure):
    """``DLTensor``, the beginning of the structure that a capsule points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    """``DLManagedTensor``."""

    _fields_ = (("tensor", DlTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
# By address: a capsule that is being destroyed must not be referenced.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def is_capsule(source: object) -> bool:
    """Return whether ``source`` is a capsule, and not an object that makes one."""
    return type(source).__name__ == "PyCapsule"


def dl_tensor(capsule: object) -> DlTensor:
    """Return the structure that ``capsule`` points to, valid as long as the capsule lives."""
    try:
        address = _get_pointer(capsule, _NAME)
    except ValueError:
        raise DlpackError("The DLPack capsule was used before. A capsule can be used only once.") from None
    return ctypes.cast(address, ctypes.POINTER(DlTensor)).contents


def datatype_of(tensor: DlTensor) -> DataType:
    """Return the protocol's data type of a tensor. Raises ``DlpackError``."""
    name = "BOOL" if tensor.code == _BOOL else f"{_KINDS.get(tensor.code)}{tensor.bits}"
    datatype = dtypes.BY_NAME.get(name)
    if datatype is None or tensor.lanes != 1:
        raise DlpackError(
            f'DType code "{tensor.code}" with {tensor.bits} bits and {tensor.lanes} lanes is not supported.'
        )
    return datatype


# On the host.


class _OnHost:
    """Wraps a capsule in the interface that ``numpy.from_dlpack`` requires."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0


def take_from_host(capsule: object) -> tuple[DataType, Array]:
    """Return data type and array of a capsule in host memory, without a copy; BF16 as 16-bit words.

    Raises ``DlpackError``.
    """
    tensor = dl_tensor(capsule)
    datatype = datatype_of(tensor)
    if datatype is dtypes.BF16:
        tensor.code = _UNSIGNED
    array = np.from_dlpack(_OnHost(capsule))
    if not array.flags.c_contiguous:
        raise _not_contiguous()
    return datatype, array


def give_from_host(datatype: DataType, array: Array) -> object:
    """Return a capsule of ``array``, whose elements are of ``datatype``; it keeps the array alive."""
    if not array.flags.writeable:
        array = array.copy()  # a capsule cannot mark its memory as read-only
    capsule = array.__dlpack__()
    if datatype is dtypes.BF16:
        dl_tensor(capsule).code = _BFLOAT
    return capsule


def _not_contiguous() -> DlpackError:
    return DlpackError(
        "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
    )


# On a GPU.


class _TakenTensor:
    """Owner of the memory of a capsule that was taken."""

    __slots__ = ("_address",)

    def __init__(self, capsule: object) -> None:
        self._address: int = _get_pointer(capsule, _NAME)
        _set_name(capsule, _USED)

    def __del__(self) -> None:
        managed = ctypes.cast(self._address, ctypes.POINTER(_ManagedTensor)).contents
        if managed.deleter:
            _Deleter(managed.deleter)(self._address)


def take_from_device(name: str, capsule: object) -> tuple[TensorSpec, DeviceBuffer]:
    """Return the tensor of a capsule in GPU memory, without a copy. Raises ``DlpackError``."""
    tensor = dl_tensor(capsule)
    datatype = datatype_of(tensor)
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _contiguous(shape, tuple(tensor.strides[: tensor.ndim])):
        raise _not_contiguous()
    spec = TensorSpec(name, datatype, shape)
    address, device = (tensor.data or 0) + tensor.byte_offset, tensor.device_id
    return spec, DeviceBuffer(device, address, spec.byte_size, _TakenTensor(capsule))


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


_lent: Final[dict[int, tuple[object, ...]]] = {}
"""What capsules that were made here keep alive, by number."""
_numbers: Final = itertools.count(1)


def _release(address: int) -> None:
    """Release the memory of a capsule: called by the library that took it, on any thread."""
    _lent.pop(ctypes.cast(address, ctypes.POINTER(_ManagedTensor)).contents.context, None)


def _destroy(capsule: int) -> None:
    """Release the memory of a capsule that no library has taken, when it is destroyed."""
    if _is_valid(capsule, _NAME):
        _release(_pointer_of(capsule, _NAME))


_deleter: Final = _Deleter(_release)
_destructor: Final = _Deleter(_destroy)


def give_from_device(
    datatype: DataType, shape: tuple[int, ...], buffer: DeviceBuffer, device: tuple[int, int]
) -> object:
    """Return a capsule of GPU memory, which keeps the buffer alive. ``device``: type and number."""
    number = next(_numbers)
    dims = (ctypes.c_int64 * len(shape))(*shape)
    managed = _ManagedTensor(
        DlTensor(
            buffer.address,
            *device,
            len(shape),
            _CODES[datatype.name[:3]],
            8 * datatype.size,
            1,
            ctypes.cast(dims, ctypes.POINTER(ctypes.c_int64)),
            None,
            0,
        ),
        number,
        ctypes.cast(_deleter, ctypes.c_void_p).value,
    )
    _lent[number] = (buffer, dims, managed)
    return _new(ctypes.addressof(managed), _NAME, ctypes.cast(_destructor, ctypes.c_void_p).value)


class DeviceArray:
    """An array in GPU memory, as frameworks take it: through DLPack."""

    __slots__ = ("buffer", "datatype", "shape")

    def __init__(self, datatype: DataType, shape: tuple[int, ...], buffer: DeviceBuffer) -> None:
        self.datatype = datatype
        self.shape = shape
        self.buffer = buffer

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type as which numpy views the elements."""
        return self.datatype.numpy

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __dlpack__(self, **_: object) -> object:
        """Return a capsule. The bytes are complete, so no stream has to wait."""
        return give_from_device(self.datatype, self.shape, self.buffer, self.__dlpack_device__())

    def __dlpack_device__(self) -> tuple[int, int]:
        return cuda.DLPACK_DEVICE, self.buffer.device
