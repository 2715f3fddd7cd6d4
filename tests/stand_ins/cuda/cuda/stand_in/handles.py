"""Objects that CUDA's bindings wrap handles in: numbers that Python holds, with the address where C would find them."""

from __future__ import annotations

import ctypes
import numbers
import zlib
from struct import Struct
from typing import Any, NamedTuple, Self

import numpy as np

from cuda.stand_in.enums import Failure, cudaError_t

IPC_HANDLE_SIZE = 64


class Handle:
    """A number that stands for something of CUDA's: a stream, an event, a graph, an address."""

    def __init__(self, init_value: int = 0) -> None:
        self._value = ctypes.c_uint64(int(init_value))

    def getPtr(self) -> int:
        return ctypes.addressof(self._value)

    def __int__(self) -> int:
        return self._value.value

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {int(self):#x}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and int(self) == int(other)

    def __hash__(self) -> int:
        return hash(int(self))


class CUdeviceptr(Handle):
    pass


class CUdevice(Handle):
    pass


class CUstream(Handle):
    pass


class CUevent(Handle):
    pass


class CUgraph(Handle):
    pass


class CUgraphExec(Handle):
    pass


class cudaStream_t(CUstream):
    pass


class cudaEvent_t(CUevent):
    pass


class cudaGraph_t(CUgraph):
    pass


class cudaGraphExec_t(CUgraphExec):
    pass


class Exported(NamedTuple):
    """What the handle of memory or of an event says of it."""

    device: int
    pid: int
    number: int
    size: int = 0


class IpcHandle:
    """64 bytes at ``getPtr()``, which belong to it unless ``_ptr`` says where they are."""

    _kind = 0
    _layout = Struct("<8sIIIQQ24xI")
    """Magic, kind, what ``Exported`` has, and the CRC of all that."""

    def __init__(self, _ptr: int = 0) -> None:
        self._bytes = (ctypes.c_char * IPC_HANDLE_SIZE)()
        self._address = _ptr or ctypes.addressof(self._bytes)

    def getPtr(self) -> int:
        return self._address

    @classmethod
    def of(cls, exported: Exported) -> Self:
        """Return the handle that says ``exported``."""
        handle = cls()
        said = cls._layout.pack(b"stand-in", cls._kind, *exported, 0)[:-4]
        ctypes.memmove(handle.getPtr(), said + zlib.crc32(said).to_bytes(4, "little"), IPC_HANDLE_SIZE)
        return handle

    def exported(self) -> Exported:
        """Return what it says. Fails if it is no handle of this kind."""
        raw = ctypes.string_at(self._address, IPC_HANDLE_SIZE)
        magic, kind, *exported, check = self._layout.unpack(raw)
        if (magic, kind, check) != (b"stand-in", self._kind, zlib.crc32(raw[:-4])):
            raise Failure(cudaError_t.cudaErrorInvalidValue)
        return Exported(*exported)


class cudaIpcMemHandle_t(IpcHandle):
    _kind = 1


class cudaIpcEventHandle_t(IpcHandle):
    _kind = 2


def address_of(value: Any) -> int:
    """Return the address that an argument stands for: a number, a handle, None, or an object with a buffer."""
    if isinstance(value, int):
        return value
    if value is None:
        return 0
    if isinstance(value, numbers.Integral | Handle):
        return int(value)
    try:
        return int(np.frombuffer(value, np.uint8).ctypes.data)
    except TypeError:
        expected = "None, int or object with Buffer Protocol"
        raise TypeError(f"Provided argument is of type {type(value)} but expected Type {expected}") from None


def size_t(value: int) -> int:
    """Return a size. Raises ``OverflowError`` as the bindings do."""
    if value < 0:
        raise OverflowError("can't convert negative value to size_t")
    return int(value)


def of_type(value: Any, expected: type[Any]) -> Any:
    """Return a handle. Raises ``TypeError`` as the bindings do if it is of another type."""
    if not isinstance(value, expected):
        name = f"cuda.bindings.runtime.{expected.__name__}"
        raise TypeError(f"Argument 'handle' has incorrect type (expected {name}, got {type(value).__name__})")
    return value
