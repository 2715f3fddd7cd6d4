"""CUDA's runtime, as far as tensors need it: memory, handles for other processes, streams, events, graphs and copies.

A thin layer over the package ``cuda-bindings``, which is imported when it is first needed: that takes no context, and
so no GPU memory. All functions act on the current GPU of the calling thread (``use``).
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from nerite.core.errors import Internal, NeriteError, NotInstalled, Unavailable

FRAMEWORK_DEVICE: str = "cuda"
"""The name that frameworks give to the devices of this module."""
DLPACK_DEVICE: int = 2
"""``kDLCUDA``: the device type of memory that frameworks get from here."""

_NO_MEMORY: Final = "cudaErrorMemoryAllocation"
_NON_BLOCKING: Final = 1
"""cudaStreamNonBlocking: such a stream does not wait for others."""
_PORTABLE: Final = 1
"""cudaHostAllocPortable: the memory is pinned for all GPUs."""
_WAITS_ASLEEP: Final = 3
"""cudaEventBlockingSync and cudaEventDisableTiming: a thread that waits for the event sleeps."""
HANDLE_SIZE: Final = 64
"""CUDA_IPC_HANDLE_SIZE."""


@cache
def runtime() -> Any:
    """Import CUDA's runtime lazily and return it. Raises ``NotInstalled``."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except Exception as error:  # also what its libraries raise
        raise NotInstalled(f"unable to import cuda.bindings ({error}): pip install 'nerite[gpu]'") from error


def checked(result: tuple[Any, ...]) -> Any:
    """Return the result of a function of CUDA. Raises ``NeriteError`` with CUDA's message if it failed."""
    error, *values = result
    if int(error):
        text = f"CUDA error: {message_of(error)}"
        raise Unavailable(text) if error.name == _NO_MEMORY else Internal(text)
    return values[0] if values else None


def message_of(error: Any) -> str:
    """Return CUDA's text for an error."""
    text = runtime().cudaGetErrorString(error)[1]
    return str(text.decode() if isinstance(text, bytes) else text)


def use(device: int) -> None:
    """Make ``device`` the current GPU of this thread."""
    checked(runtime().cudaSetDevice(device))


@contextmanager
def current(device: int) -> Iterator[None]:
    """Make ``device`` the current GPU of this thread in the ``with`` block. Raises ``NeriteError``."""
    before = checked(runtime().cudaGetDevice())
    if before == device:
        yield
        return
    use(device)
    try:
        yield
    finally:
        use(before)


# Copies, which are counted: what a tensor costs on its way is the number of copies, and their bytes.


class CopyCounts:
    """Copies that this process has started, by direction. Thread-safe."""

    def __init__(self) -> None:
        self.number = 0
        """Of all copies."""
        self._lock = threading.Lock()
        self._counts: dict[str, tuple[int, int]] = dict.fromkeys(("to_device", "to_host", "on_device"), (0, 0))

    def add(self, direction: str, size: int, copies: int = 1) -> None:
        """Count copies of ``size`` bytes in all."""
        with self._lock:
            self.number += copies
            count, total = self._counts[direction]
            self._counts[direction] = count + copies, total + size

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return number and bytes by direction: ``to_device``, ``to_host`` and ``on_device``."""
        with self._lock:
            return dict(self._counts)


COPIES: Final = CopyCounts()


# Memory on the GPU and pinned memory on the host.


def allocate(size: int) -> int:
    """Return the address of ``size`` new bytes on the GPU. Raises ``Unavailable`` if it is full."""
    return int(checked(runtime().cudaMalloc(size)))


def free(address: int) -> None:
    """Free what ``allocate`` returned; waits until the GPU no longer uses it."""
    checked(runtime().cudaFree(address))


def allocate_pinned(size: int) -> int:
    """Return the address of ``size`` bytes on the host, which a GPU copies without the processor's help."""
    return int(checked(runtime().cudaHostAlloc(size, _PORTABLE)))


def free_pinned(address: int) -> None:
    """Free what ``allocate_pinned`` returned."""
    checked(runtime().cudaFreeHost(address))


class CudaMemory:
    """Block of GPU memory that can grow, but loses its contents then."""

    def __init__(self) -> None:
        self.address = 0
        self._size = 0

    def reserve(self, size: int) -> bool:
        """Make room for ``size`` bytes; return True if that changed the address."""
        if self.address and size <= self._size:
            return False
        self.free()
        # A tensor without elements needs an address, too.
        self.address = allocate(max(size, 1))
        self._size = max(size, 1)
        return True

    def free(self) -> None:
        """Free the memory."""
        if self.address:
            address, self.address, self._size = self.address, 0, 0
            free(address)


def export_handle(address: int) -> bytes:
    """Return the handle with which another process opens the allocation that begins at ``address``."""
    handle = checked(runtime().cudaIpcGetMemHandle(address))
    return ctypes.string_at(handle.getPtr(), HANDLE_SIZE)


def open_handle(raw: bytes) -> int:
    """Return the address here of an allocation of another process. Raises ``NeriteError``.

    It stays mapped until ``close_handle``, also if that process frees it, or ends.
    """
    module = runtime()
    handle = module.cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), raw, HANDLE_SIZE)
    return int(checked(module.cudaIpcOpenMemHandle(handle, module.cudaIpcMemLazyEnablePeerAccess)))


def close_handle(address: int) -> None:
    """Unmap what ``open_handle`` returned."""
    checked(runtime().cudaIpcCloseMemHandle(address))


def allocation_size(address: int) -> int:
    """Return the size of the allocation that begins at ``address``; 0 if CUDA does not know."""
    driver = importlib.import_module("cuda.bindings.driver")
    error, _, size = driver.cuMemGetAddressRange(address)
    return 0 if int(error) else int(size)


# Streams, events and graphs.


class CudaStream:
    """CUDA stream: executes operations in order."""

    def __init__(self, priority: str = "PRIORITY_DEFAULT") -> None:
        """``priority`` is as in a configuration: ``PRIORITY_MAX``, ``PRIORITY_MIN`` or ``PRIORITY_DEFAULT``."""
        least, greatest = self._priorities()
        wanted = {"PRIORITY_MAX": greatest, "PRIORITY_MIN": least}.get(priority, 0)
        self._stream = checked(runtime().cudaStreamCreateWithPriority(_NON_BLOCKING, wanted))
        self.address = int(self._stream)

    def to_device(self, address: int, host: int, size: int) -> None:
        """Copy ``size`` bytes from the host: when this returns if they are pageable, later if they are pinned."""
        self._copy(address, host, size, runtime().cudaMemcpyKind.cudaMemcpyHostToDevice)
        COPIES.add("to_device", size)

    def to_host(self, host: int, address: int, size: int) -> None:
        """Copy ``size`` bytes to the host: when this returns if they are pageable, later if they are pinned."""
        self._copy(host, address, size, runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost)
        COPIES.add("to_host", size)

    def on_device(self, target: int, source: int, size: int) -> None:
        """Copy ``size`` bytes from GPU memory to GPU memory."""
        self._copy(target, source, size, runtime().cudaMemcpyKind.cudaMemcpyDeviceToDevice)
        COPIES.add("on_device", size)

    def wait(self) -> None:
        """Wait until all operations are done."""
        checked(runtime().cudaStreamSynchronize(self._stream))

    def wait_for(self, event: CudaEvent) -> None:
        """Make the operations that follow wait for an event of another stream."""
        checked(runtime().cudaStreamWaitEvent(self._stream, event.event, 0))

    def record(self, event: CudaEvent) -> None:
        """Make ``event`` happen when all operations until now are done."""
        checked(runtime().cudaEventRecord(event.event, self._stream))

    def begin_capture(self) -> None:
        """Start to record operations instead of executing them."""
        mode = runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        checked(runtime().cudaStreamBeginCapture(self._stream, mode))

    def end_capture(self) -> CudaGraph:
        """Return the recorded operations."""
        return CudaGraph(checked(runtime().cudaStreamEndCapture(self._stream)), self._stream)

    def close(self) -> None:
        """Destroy the stream."""
        checked(runtime().cudaStreamDestroy(self._stream))

    @staticmethod
    def _priorities() -> tuple[int, int]:
        error, least, greatest = runtime().cudaDeviceGetStreamPriorityRange()
        checked((error,))
        return least, greatest

    def _copy(self, target: int, source: int, size: int, kind: Any) -> None:
        checked(runtime().cudaMemcpyAsync(target, source, size, kind, self._stream))


class CudaEvent:
    """A point in a stream. Another stream, or a thread, can wait for it."""

    def __init__(self) -> None:
        self.event = checked(runtime().cudaEventCreateWithFlags(_WAITS_ASLEEP))

    def wait(self) -> None:
        """Sleep until it has happened. Raises what the operations before it have raised."""
        checked(runtime().cudaEventSynchronize(self.event))

    def close(self) -> None:
        """Destroy the event."""
        checked(runtime().cudaEventDestroy(self.event))


class CudaGraph:
    """Recorded operations that a stream executes as one."""

    def __init__(self, graph: Any, stream: Any) -> None:
        self._stream = stream
        self._executable = checked(runtime().cudaGraphInstantiate(graph, 0))
        checked(runtime().cudaGraphDestroy(graph))

    def launch(self) -> None:
        """Execute the operations."""
        checked(runtime().cudaGraphLaunch(self._executable, self._stream))

    def close(self) -> None:
        """Destroy the graph."""
        checked(runtime().cudaGraphExecDestroy(self._executable))


def installed() -> bool:
    """Return whether CUDA's Python bindings are installed for this process."""
    try:
        runtime()
    except NotInstalled:
        return False
    return True


def why_unusable() -> str:
    """Return why no GPU can be used through CUDA in this process; empty if one can. Takes no context."""
    try:
        error, count = runtime().cudaGetDeviceCount()
    except NeriteError as missing:
        return missing.message
    return f"CUDA says: {message_of(error)}" if int(error) else "" if count else "CUDA finds no GPU"
