"""Tensors of this process that are on a GPU, as whichever thread needs them: completed, and copied to the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

import numpy as np

from nerite.core.tensor import Buffer, DeviceBuffer, TensorData
from nerite.devices import cuda
from nerite.devices.cuda import CudaStream


@cache
def available() -> bool:
    """Return whether this process can use a GPU through CUDA's Python bindings. Loads the driver."""
    return not cuda.why_unusable()


class ThreadStreams(threading.local):
    """The streams of a thread, by GPU."""

    def __init__(self) -> None:
        self.streams: dict[int, CudaStream] = {}


OF_THREAD: Final = ThreadStreams()


@contextmanager
def stream_on(device: int) -> Iterator[CudaStream]:
    """Make ``device`` the current GPU in the block, where this thread's stream for it can be used.

    The current GPU of the thread is restored: it may be a model's own thread. Raises ``NeriteError``.
    """
    with cuda.current(device):
        stream = OF_THREAD.streams.get(device)
        if stream is None:
            stream = OF_THREAD.streams[device] = CudaStream()
        yield stream


def complete(device: int) -> None:
    """Wait until a GPU has done all that this process has asked of it: a tensor's maker may use any stream."""
    with cuda.current(device):
        cuda.checked(cuda.runtime().cudaDeviceSynchronize())


def to_host(buffer: DeviceBuffer) -> Buffer:
    """Return a copy on the host. Raises ``NeriteError``."""
    array = np.empty(buffer.size, np.uint8)
    with stream_on(buffer.device) as stream:
        stream.to_host(array.ctypes.data, buffer.address, buffer.size)
        stream.wait()
    data: Buffer = array.data
    return data


def on_host(data: TensorData) -> Buffer:
    """Return data on the host: as they are, or a copy. Raises ``NeriteError``."""
    return to_host(data) if isinstance(data, DeviceBuffer) else data


def copy_on_device(target: DeviceBuffer, source: DeviceBuffer) -> None:
    """Copy a tensor to memory of the same size. Raises ``NeriteError``."""
    with stream_on(target.device) as stream:
        stream.on_device(target.address, source.address, source.size)
        stream.wait()
