"""Tensors in memory of GPUs, as a library such as PyTorch would have them: exchanged as DLPack capsules."""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any

import numpy as np
from cuda.bindings import runtime
from numpy.typing import NDArray

CUDA = 2
"""DLPack's number for memory of a GPU."""
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_LETTERS = {code: letter for letter, code in _CODES.items()} | {4: "u"}
"""numpy's letters for the codes of types. It has no BF16, the words of which are told as unsigned integers."""


class _Tensor(ctypes.Structure):
    """``DLTensor``, and what makes it a ``DLManagedTensor``."""

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
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_exported: dict[int, tuple[_Tensor, object, object]] = {}
"""Tensors that are lent to others, by their addresses, with what has to stay until their deleters are called."""


def _give_back(tensor: int) -> None:
    _exported.pop(tensor, None)


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_deleter = _Deleter(_give_back)

_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


def _capsule_function(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new = _capsule_function("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_pointer = _capsule_function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename = _capsule_function("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
# A capsule that is being destroyed is no Python object any more: the destructor has its address.
_is_dying_valid = _capsule_function("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_dying_pointer = _capsule_function("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)

_FRESH, _USED = b"dltensor", b"used_dltensor"


def _destroy(capsule: int) -> None:
    """Call the deleter, unless a consumer took the tensor and will."""
    if _is_dying_valid(capsule, _FRESH):
        _deleter(_dying_pointer(capsule, _FRESH))


_destructor = _Destructor(_destroy)


def _done(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error:
        raise RuntimeError(f"CUDA error: {error.name}")
    return values[0] if values else None


def _free(address: int) -> None:
    # In a process that was forked, and when this one ends, there is nothing to free.
    runtime.cudaFree(address)


class DeviceArray:
    """A copy of ``array`` in memory of GPU ``device``, which is freed when nothing refers to it any more.

    ``address`` is where it is. The copy is done when this returns.
    """

    def __init__(self, array: NDArray[Any], device: int = 0) -> None:
        if array.dtype.kind not in _CODES:
            raise TypeError(f"DLPack has no type for numpy's {array.dtype}")
        self.shape = array.shape
        self.dtype = array.dtype
        array = np.ascontiguousarray(array)
        self.device = device
        before = _done(runtime.cudaGetDevice())
        _done(runtime.cudaSetDevice(device))
        try:
            self.address = int(_done(runtime.cudaMalloc(max(array.nbytes, 1))))
            weakref.finalize(self, _free, self.address)
            kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
            _done(runtime.cudaMemcpy(self.address, array.ctypes.data, array.nbytes, kind))
        finally:
            _done(runtime.cudaSetDevice(before))

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        """Return a capsule that shares the memory. Nothing is pending, whatever stream the consumer uses."""
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        tensor = _Tensor(
            data=self.address,
            device_type=CUDA,
            device_id=self.device,
            ndim=len(self.shape),
            code=_CODES[self.dtype.kind],
            bits=8 * self.dtype.itemsize,
            lanes=1,
            shape=shape,
            deleter=ctypes.cast(_deleter, ctypes.c_void_p),
        )
        address = ctypes.addressof(tensor)
        _exported[address] = (tensor, shape, self)
        return _new(address, _FRESH, _destructor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device


def lent() -> int:
    """Return how many capsules of this process are neither destroyed nor, if they were used, given back."""
    return len(_exported)


def numpy_of(source: Any) -> NDArray[Any]:
    """Return a copy of what a DLPack capsule of a GPU has, or an object that provides one. Uses the capsule up.

    Raises ``ValueError`` for one of other memory, or that is not contiguous.
    """
    capsule = source.__dlpack__() if hasattr(source, "__dlpack__") else source
    address = _pointer(capsule, _FRESH)
    tensor = _Tensor.from_address(address)
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.device_type != CUDA:
        raise ValueError(f"the tensor is on device {tensor.device_type} of DLPack, not on {CUDA}")
    if tensor.strides:
        expected = [math.prod(shape[axis + 1 :]) for axis in range(tensor.ndim)]
        found = tensor.strides[: tensor.ndim]
        if any(size > 1 and stride != wanted for size, stride, wanted in zip(shape, found, expected, strict=True)):
            raise ValueError(f"the tensor of shape {shape} has the strides {found}")
    letter = _LETTERS[tensor.code]
    array = np.empty(shape, np.bool_ if letter == "b" else f"{letter}{tensor.bits // 8}")
    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
    _done(runtime.cudaMemcpy(array.ctypes.data, (tensor.data or 0) + tensor.byte_offset, array.nbytes, kind))
    _rename(capsule, _USED)
    if tensor.deleter:
        _Deleter(tensor.deleter)(address)
    return array
