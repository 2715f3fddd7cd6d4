"""Exchange of tensors with other libraries as DLPack capsules.

numpy does the work, except for two gaps: its error texts differ from Triton's, and it has no BF16. A BF16 tensor passes
through numpy as UINT16: only the type code in the capsule differs, so it is changed on import and on export.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nerite.core import tensor as dtypes
from nerite.core.tensor import DataType
from triton_python_backend_utils.errors import TritonModelException

CPU = 1
_CUDA = 2
_PINNED = 3
_UNSIGNED = 1
_BFLOAT = 4


class _Tensor(ctypes.Structure):
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


class _OnHost:
    """Wraps a capsule in the interface that ``numpy.from_dlpack`` requires."""

    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0


def _inside(capsule: object) -> _Tensor:
    """Return the structure that ``capsule`` points to, valid as long as the capsule lives."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    try:
        address = get_pointer(capsule, b"dltensor")
    except ValueError:
        raise TritonModelException("The DLPack capsule was used before. A capsule can be used only once.") from None
    return ctypes.cast(address, ctypes.POINTER(_Tensor)).contents


def _is_capsule(source: object) -> bool:
    return type(source).__name__ == "PyCapsule"


def take(source: object) -> tuple[DataType, NDArray[Any]]:
    """Import ``source``, a capsule or an object that provides one; zero-copy if it is in host memory.

    Returns data type and array; BF16 as an array of 16-bit words. Raises ``TritonModelException`` with Triton's text if
    it is not supported.
    """
    if _is_capsule(source):
        capsule = source
    elif hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        if source.__dlpack_device__()[0] == _CUDA and hasattr(source, "cpu"):
            source = source.cpu()  # torch
        _check_device(source.__dlpack_device__()[0])
        capsule = source.__dlpack__(stream=None)
    else:
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule         or have `__dlpack__` and "
            "`__dlpack_device__` attributes"
        )
    tensor = _inside(capsule)
    if tensor.device_type == _CUDA and "torch" in sys.modules:
        capsule = sys.modules["torch"].utils.dlpack.from_dlpack(capsule).cpu().__dlpack__()
        tensor = _inside(capsule)
    _check_device(tensor.device_type)
    datatype = _datatype(tensor)
    if datatype is dtypes.BF16:
        tensor.code = _UNSIGNED
    array = np.from_dlpack(_OnHost(capsule))
    if not array.flags.c_contiguous:
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    return datatype, array


def give(datatype: DataType, array: NDArray[Any]) -> object:
    """Export ``array``, whose elements are of ``datatype``, as a capsule, which keeps the array alive.

    Raises ``TritonModelException`` for BYTES.
    """
    if datatype is dtypes.BYTES:
        raise TritonModelException("DLPack does not have support for string tensors.")
    if not array.flags.writeable:
        array = array.copy()  # a capsule cannot mark its memory as read-only
    capsule = array.__dlpack__()
    if datatype is dtypes.BF16:
        _inside(capsule).code = _BFLOAT
    return capsule


def _check_device(device_type: int) -> None:
    if device_type == _CUDA:
        raise TritonModelException(
            "DLPack capsule passed pointer to memory allocated on GPU device,           when GPU is not available. "
            "Move the tensor to the host first: tensor.cpu()"
        )
    if device_type not in (CPU, _PINNED):
        raise TritonModelException(f"DLDevice type {device_type} is not support by Python backend.")


_KINDS = {0: "INT", 1: "UINT", 2: "FP", _BFLOAT: "BF"}
_BOOL = 6


def _datatype(tensor: _Tensor) -> DataType:
    name = "BOOL" if tensor.code == _BOOL else f"{_KINDS.get(tensor.code)}{tensor.bits}"
    datatype = dtypes.BY_NAME.get(name)
    if datatype is None or tensor.lanes != 1:
        raise TritonModelException(
            f'DType code "{tensor.code}" with {tensor.bits} bits and {tensor.lanes} lanes is not supported.'
        )
    return datatype
