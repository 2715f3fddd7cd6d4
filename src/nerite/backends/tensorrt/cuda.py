"""What is needed of CUDA: devices, memory, streams and graphs, through ``cuda.bindings.runtime``."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final

from nerite.core.errors import Internal, NotHere, Unavailable

_NO_MEMORY: Final = "cudaErrorMemoryAllocation"
_MADE_FOR_ITSELF: Final = 1
"""cudaStreamNonBlocking: such a stream does not wait for others."""


@cache
def runtime() -> Any:
    """Return the module. Raises ``Unsupported`` where it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise NotHere(f"unable to import cuda.bindings ({error}): pip install 'nerite[tensorrt]'") from error


def checked(result: tuple[Any, ...]) -> Any:
    """Return what a function of CUDA gave. Raises ``NeriteError`` with CUDA's words if it failed."""
    error, *values = result
    if int(error):
        text = f"CUDA error: {_words(error)}"
        raise Unavailable(text) if error.name == _NO_MEMORY else Internal(text)
    return values[0] if values else None


def require_device(model: str, number: int) -> None:
    """Raise ``Unsupported`` if there is no such GPU."""
    error, *found = runtime().cudaGetDeviceCount()
    if int(error) or not found[0]:
        why = f" (CUDA says: {_words(error)})" if int(error) else ""
        raise NotHere(
            f"unable to load model '{model}', TensorRT backend supports only GPU device, and this machine has no GPU "
            f"that could be used{why}"
        )
    if number >= found[0]:
        raise NotHere(f"unable to load model '{model}': there is no GPU {number}, but {found[0]} of them")


def use(device: int) -> None:
    """Make ``device`` the one that this thread means."""
    checked(runtime().cudaSetDevice(device))


class Memory:
    """A piece of the memory of a GPU that can grow, without what is in it."""

    def __init__(self) -> None:
        self.address = 0
        self._size = 0

    def hold(self, size: int) -> bool:
        """Have room for ``size`` bytes; return whether the address is another one now."""
        if self.address and size <= self._size:
            return False
        self.free()
        # An address is wanted for a tensor without elements, too.
        self._size = max(size, 1)
        self.address = int(checked(runtime().cudaMalloc(self._size)))
        return True

    def free(self) -> None:
        """Give it back."""
        if self.address:
            checked(runtime().cudaFree(self.address))
            self.address = self._size = 0


class Stream:
    """What is given to it is done in its order."""

    def __init__(self, priority: str) -> None:
        """``priority`` is as in a configuration: ``PRIORITY_MAX``, ``PRIORITY_MIN`` or ``PRIORITY_DEFAULT``."""
        least, greatest = self._priorities()
        wanted = {"PRIORITY_MAX": greatest, "PRIORITY_MIN": least}.get(priority, 0)
        self._stream = checked(runtime().cudaStreamCreateWithPriority(_MADE_FOR_ITSELF, wanted))
        self.address = int(self._stream)

    def to_device(self, address: int, host: int, size: int) -> None:
        """Copy ``size`` bytes from the host."""
        self._copy(address, host, size, runtime().cudaMemcpyKind.cudaMemcpyHostToDevice)

    def to_host(self, host: int, address: int, size: int) -> None:
        """Copy ``size`` bytes to the host."""
        self._copy(host, address, size, runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def wait(self) -> None:
        """Return when all is done."""
        checked(runtime().cudaStreamSynchronize(self._stream))

    def begin_capture(self) -> None:
        """From now on, note what is given to it, and do nothing of it."""
        mode = runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        checked(runtime().cudaStreamBeginCapture(self._stream, mode))

    def end_capture(self) -> Graph:
        """Return what was noted."""
        return Graph(checked(runtime().cudaStreamEndCapture(self._stream)), self._stream)

    def close(self) -> None:
        """Give it back."""
        checked(runtime().cudaStreamDestroy(self._stream))

    @staticmethod
    def _priorities() -> tuple[int, int]:
        error, least, greatest = runtime().cudaDeviceGetStreamPriorityRange()
        checked((error,))
        return least, greatest

    def _copy(self, to: int, of: int, size: int, kind: Any) -> None:
        checked(runtime().cudaMemcpyAsync(to, of, size, kind, self._stream))


class Graph:
    """Work that is given to a stream as one."""

    def __init__(self, graph: Any, stream: Any) -> None:
        self._stream = stream
        self._executable = checked(runtime().cudaGraphInstantiate(graph, 0))
        checked(runtime().cudaGraphDestroy(graph))

    def launch(self) -> None:
        """Do it once more."""
        checked(runtime().cudaGraphLaunch(self._executable, self._stream))

    def close(self) -> None:
        """Give it back."""
        checked(runtime().cudaGraphExecDestroy(self._executable))


def _words(error: Any) -> str:
    return str(runtime().cudaGetErrorString(error)[1].decode())
