"""In the place of CUDA's Python bindings, on machines without GPUs: the functions that are used, on the host's memory.

What is on a stream is done at once, but for what is captured.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from typing import Any

DEVICES = 2
current = [0]
allocated: dict[int, Any] = {}
streams: dict[int, cudaStream_t] = {}
graphs_alive: set[int] = set()
launches: list[int] = []


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInvalidValue = 1


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeThreadLocal = 1


OK = cudaError_t.cudaSuccess


class cudaStream_t:
    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.captured: list[Callable[[], None]] | None = None

    def __int__(self) -> int:
        return id(self)


class cudaGraph_t:
    def __init__(self, work: list[Callable[[], None]]) -> None:
        self.work = work
        graphs_alive.add(id(self))


def cudaGetErrorString(error: cudaError_t) -> tuple[cudaError_t, bytes]:
    return OK, {2: b"out of memory"}.get(int(error), b"invalid argument")


def cudaGetDeviceCount() -> tuple[cudaError_t, int]:
    return OK, DEVICES


def cudaSetDevice(device: int) -> tuple[cudaError_t]:
    current[0] = device
    return (OK,)


def cudaMalloc(size: int) -> tuple[cudaError_t, int]:
    if size > 1 << 30:
        return cudaError_t.cudaErrorMemoryAllocation, 0
    buffer = ctypes.create_string_buffer(size)
    allocated[ctypes.addressof(buffer)] = buffer
    return OK, ctypes.addressof(buffer)


def cudaFree(address: int) -> tuple[cudaError_t]:
    return (OK if allocated.pop(address, None) is not None else cudaError_t.cudaErrorInvalidValue,)


def cudaMemcpyAsync(to: int, of: int, size: int, kind: cudaMemcpyKind, stream: cudaStream_t) -> tuple[cudaError_t]:
    device = to if kind is cudaMemcpyKind.cudaMemcpyHostToDevice else of
    if size > len(allocated[device]) or stream.captured is not None:
        return (cudaError_t.cudaErrorInvalidValue,)
    ctypes.memmove(to, of, size)
    return (OK,)


def cudaDeviceGetStreamPriorityRange() -> tuple[cudaError_t, int, int]:
    return OK, 0, -5


def cudaStreamCreateWithPriority(flags: int, priority: int) -> tuple[cudaError_t, cudaStream_t]:
    stream = cudaStream_t(priority)
    streams[int(stream)] = stream
    return OK, stream


def cudaStreamSynchronize(stream: cudaStream_t) -> tuple[cudaError_t]:
    return (OK if stream.captured is None else cudaError_t.cudaErrorInvalidValue,)


def cudaStreamDestroy(stream: cudaStream_t) -> tuple[cudaError_t]:
    del streams[int(stream)]
    return (OK,)


def cudaStreamBeginCapture(stream: cudaStream_t, mode: cudaStreamCaptureMode) -> tuple[cudaError_t]:
    stream.captured = []
    return (OK,)


def cudaStreamEndCapture(stream: cudaStream_t) -> tuple[cudaError_t, cudaGraph_t]:
    assert stream.captured is not None
    graph, stream.captured = cudaGraph_t(stream.captured), None
    return OK, graph


def cudaGraphInstantiate(graph: cudaGraph_t, flags: int) -> tuple[cudaError_t, cudaGraph_t]:
    return OK, cudaGraph_t(graph.work)


def cudaGraphDestroy(graph: cudaGraph_t) -> tuple[cudaError_t]:
    graphs_alive.remove(id(graph))
    return (OK,)


cudaGraphExecDestroy = cudaGraphDestroy


def cudaGraphLaunch(graph: cudaGraph_t, stream: cudaStream_t) -> tuple[cudaError_t]:
    launches.append(id(graph))
    for each in graph.work:
        each()
    return (OK,)
