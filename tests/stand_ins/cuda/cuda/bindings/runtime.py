"""In the place of CUDA's Python bindings, on machines without GPUs: the functions that are used, as documented.

Memory of GPUs is the host's, so that tests can read it at its addresses. See ``cuda.stand_in`` for what it can be told.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

from cuda.stand_in.enums import (
    Failure,
    cudaDeviceAttr,
    cudaError_t,
    cudaMemcpyKind,
    cudaMemoryType,
    cudaStreamCaptureMode,
)
from cuda.stand_in.handles import (
    IPC_HANDLE_SIZE,
    address_of,
    cudaEvent_t,
    cudaGraph_t,
    cudaGraphExec_t,
    cudaIpcEventHandle_t,
    cudaIpcMemHandle_t,
    cudaStream_t,
    of_type,
    size_t,
)
from cuda.stand_in.memory import ALLOCATED, Region
from cuda.stand_in.process import process, returns
from cuda.stand_in.streams import DISABLE_TIMING, INTERPROCESS, NON_BLOCKING, Stream

CUDART_VERSION = 13050
CUDA_IPC_HANDLE_SIZE = IPC_HANDLE_SIZE
cudaStreamDefault = 0
cudaStreamNonBlocking = NON_BLOCKING
cudaStreamLegacy = 1
cudaStreamPerThread = 2
cudaEventDefault = 0
cudaEventBlockingSync = 1
cudaEventDisableTiming = DISABLE_TIMING
cudaEventInterprocess = INTERPROCESS
cudaEventWaitDefault = 0
cudaIpcMemLazyEnablePeerAccess = 1
cudaHostAllocDefault = 0
cudaHostAllocPortable = 1
cudaHostRegisterDefault = 0
cudaHostRegisterPortable = 1


class cudaPointerAttributes:
    """Where memory is."""

    def __init__(self) -> None:
        self.type = cudaMemoryType.cudaMemoryTypeUnregistered
        self.device = -2
        self.devicePointer = 0
        self.hostPointer = 0


_ATTRIBUTES = {
    cudaDeviceAttr.cudaDevAttrUnifiedAddressing: 1,
    cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor: 9,
    cudaDeviceAttr.cudaDevAttrComputeCapabilityMinor: 0,
    cudaDeviceAttr.cudaDevAttrHostRegisterSupported: 1,
    cudaDeviceAttr.cudaDevAttrIpcEventSupport: 1,
}
_PRIORITIES = (0, -5)

# Errors and versions.


def cudaGetErrorString(error: cudaError_t) -> tuple[cudaError_t, bytes]:
    known = int(error) in [*cudaError_t]
    return cudaError_t.cudaSuccess, cudaError_t(error).message if known else b"unrecognized error code"


def cudaGetErrorName(error: cudaError_t) -> tuple[cudaError_t, bytes]:
    known = int(error) in [*cudaError_t]
    return cudaError_t.cudaSuccess, cudaError_t(error).name.encode() if known else b"unrecognized error code"


def cudaRuntimeGetVersion() -> tuple[cudaError_t, int]:
    return cudaError_t.cudaSuccess, CUDART_VERSION


def cudaDriverGetVersion() -> tuple[cudaError_t, int]:
    return cudaError_t.cudaSuccess, CUDART_VERSION


# GPUs.


@returns(1)
def cudaGetDeviceCount() -> int:
    if not process().devices:
        raise Failure(cudaError_t.cudaErrorNoDevice)
    return process().devices


@returns(1)
def cudaGetDevice() -> int:
    return process().current


@returns(0)
def cudaSetDevice(device: int) -> None:
    process().use(device)


@returns(1)
def cudaDeviceGetAttribute(attr: cudaDeviceAttr, device: int) -> int:
    process().require(device)
    if int(attr) not in _ATTRIBUTES:
        raise Failure(cudaError_t.cudaErrorInvalidValue)
    return _ATTRIBUTES[cudaDeviceAttr(attr)]


@returns(0)
def cudaDeviceSynchronize() -> None:
    process().synchronize(process().device())


@returns(2)
def cudaDeviceGetStreamPriorityRange() -> tuple[int, int]:
    return _PRIORITIES


@returns(2)
def cudaMemGetInfo() -> tuple[int, int]:
    return process().memory.info(process().device())


# Memory.


@returns(1)
def cudaMalloc(size: int) -> int:
    return process().memory.allocate(process().device(), size_t(size))


@returns(0)
def cudaFree(devPtr: Any) -> None:
    if address := address_of(devPtr):
        process().synchronize()
        process().memory.free(address)


@returns(1)
def cudaHostAlloc(size: int, flags: int) -> int:
    return process().memory.allocate_host(process().device(), size_t(size))


@returns(0)
def cudaFreeHost(ptr: Any) -> None:
    if address := address_of(ptr):
        process().synchronize()
        process().memory.free_host(address)


@returns(0)
def cudaHostRegister(ptr: Any, size: int, flags: int) -> None:
    process().memory.register(process().device(), address_of(ptr), size_t(size))


@returns(0)
def cudaHostUnregister(ptr: Any) -> None:
    process().synchronize()
    process().memory.unregister(address_of(ptr))


@returns(1)
def cudaPointerGetAttributes(ptr: Any) -> cudaPointerAttributes:
    address = address_of(ptr)
    region = process().memory.region(address)
    said = cudaPointerAttributes()
    if region is not None:
        said.type = cudaMemoryType.cudaMemoryTypeDevice if region.on_device else cudaMemoryType.cudaMemoryTypeHost
        said.device = region.device
        said.devicePointer = address
    if region is None or not region.on_device:
        said.hostPointer = address
    return said


@returns(1)
def cudaIpcGetMemHandle(devPtr: Any) -> cudaIpcMemHandle_t:
    return cudaIpcMemHandle_t.of(process().memory.export(address_of(devPtr)))


@returns(1)
def cudaIpcOpenMemHandle(handle: cudaIpcMemHandle_t, flags: int) -> int:
    exported = of_type(handle, cudaIpcMemHandle_t).exported()
    if flags != cudaIpcMemLazyEnablePeerAccess:
        raise Failure(cudaError_t.cudaErrorInvalidValue)
    process().device()
    return process().memory.open(exported)


@returns(0)
def cudaIpcCloseMemHandle(devPtr: Any) -> None:
    process().synchronize()
    process().memory.close(address_of(devPtr))


# Copies.


@returns(0)
def cudaMemcpy(dst: Any, src: Any, count: int, kind: cudaMemcpyKind) -> None:
    _copy(address_of(dst), address_of(src), size_t(count), kind, process().stream(0))


@returns(0)
def cudaMemcpyAsync(dst: Any, src: Any, count: int, kind: cudaMemcpyKind, stream: Any) -> None:
    _copy(address_of(dst), address_of(src), size_t(count), kind, process().stream(stream))


@returns(0)
def cudaMemcpyPeerAsync(dst: Any, dstDevice: int, src: Any, srcDevice: int, count: int, stream: Any) -> None:
    to, of = address_of(dst), address_of(src)
    for address, device in ((to, dstDevice), (of, srcDevice)):
        process().require(device)
        region = process().memory.region(address)
        if region is None or not region.on_device or region.device != device:
            raise Failure(cudaError_t.cudaErrorInvalidValue)
    _copy(to, of, size_t(count), cudaMemcpyKind.cudaMemcpyDeviceToDevice, process().stream(stream))


@returns(0)
def cudaMemsetAsync(devPtr: Any, value: int, count: int, stream: Any) -> None:
    address, size = address_of(devPtr), size_t(count)
    if process().memory.region(address, size) is None:
        raise Failure(cudaError_t.cudaErrorInvalidValue)
    process().stream(stream).submit(partial(ctypes.memset, address, value & 0xFF, size))


def _copy(to: int, of: int, size: int, kind: cudaMemcpyKind, stream: Stream) -> None:
    """Copy on a stream, as CUDA documents it.

    Memory of the host that is not pinned is read at once, and has been written on return. A copy from the host to the
    host is done on return.
    """
    if not size:
        return
    target, source = process().memory.region(to, size), process().memory.region(of, size)
    if process().frameworks:  # what frameworks for processors compute is taken for what is on the GPU
        beyond = Region(0, 0, ALLOCATED, process().current)
        if target is None and kind in (cudaMemcpyKind.cudaMemcpyHostToDevice, cudaMemcpyKind.cudaMemcpyDeviceToDevice):
            target = beyond
        if source is None and kind in (cudaMemcpyKind.cudaMemcpyDeviceToHost, cudaMemcpyKind.cudaMemcpyDeviceToDevice):
            source = beyond
    to_device, of_device = target is not None and target.on_device, source is not None and source.on_device
    if kind != cudaMemcpyKind.cudaMemcpyDefault and int(kind) != to_device + 2 * of_device:
        raise Failure(cudaError_t.cudaErrorInvalidValue)
    if (target is None or source is None) and stream.captured is not None:
        raise Failure(cudaError_t.cudaErrorStreamCaptureUnsupported)
    if to_device and of_device:
        assert target is not None and source is not None
        process().counters.add_copy("on_device" if target.device == source.device else "peer", size)
    elif to_device or of_device:
        process().counters.add_copy("to_device" if to_device else "to_host", size)
    work = partial(ctypes.memmove, to, of if source is not None else ctypes.string_at(of, size), size)
    if to_device or (of_device and target is not None):
        stream.submit(work)
    else:
        stream.execute(work)


# Streams.


@returns(1)
def cudaStreamCreate() -> cudaStream_t:
    return cudaStream_t(process().create_stream(cudaStreamDefault, 0))


@returns(1)
def cudaStreamCreateWithFlags(flags: int) -> cudaStream_t:
    return cudaStream_t(process().create_stream(flags, 0))


@returns(1)
def cudaStreamCreateWithPriority(flags: int, priority: int) -> cudaStream_t:
    least, greatest = _PRIORITIES
    return cudaStream_t(process().create_stream(flags, min(max(priority, greatest), least)))


@returns(0)
def cudaStreamDestroy(stream: Any) -> None:
    process().destroy_stream(stream)


@returns(0)
def cudaStreamSynchronize(stream: Any) -> None:
    process().stream(stream).synchronize()


@returns(0)
def cudaStreamQuery(stream: Any) -> None:
    if not process().stream(stream).is_idle:
        raise Failure(cudaError_t.cudaErrorNotReady)


@returns(0)
def cudaStreamWaitEvent(stream: Any, event: Any, flags: int) -> None:
    process().event(event).delay(process().stream(stream))


# Events.


@returns(1)
def cudaEventCreate() -> cudaEvent_t:
    return cudaEvent_t(process().create_event(cudaEventDefault))


@returns(1)
def cudaEventCreateWithFlags(flags: int) -> cudaEvent_t:
    if flags & cudaEventInterprocess and not flags & cudaEventDisableTiming:
        raise Failure(cudaError_t.cudaErrorInvalidValue)
    return cudaEvent_t(process().create_event(flags))


@returns(0)
def cudaEventRecord(event: Any, stream: Any) -> None:
    recorded, on = process().event(event), process().stream(stream)
    if recorded.device != on.device:
        raise Failure(cudaError_t.cudaErrorInvalidResourceHandle)
    recorded.record(on)


@returns(0)
def cudaEventQuery(event: Any) -> None:
    if not process().event(event).is_complete:
        raise Failure(cudaError_t.cudaErrorNotReady)


@returns(0)
def cudaEventSynchronize(event: Any) -> None:
    process().event(event).synchronize()


@returns(0)
def cudaEventDestroy(event: Any) -> None:
    process().destroy_event(event)


@returns(1)
def cudaIpcGetEventHandle(event: Any) -> cudaIpcEventHandle_t:
    return cudaIpcEventHandle_t.of(process().export_event(event))


@returns(1)
def cudaIpcOpenEventHandle(handle: cudaIpcEventHandle_t) -> cudaEvent_t:
    return cudaEvent_t(process().open_event(of_type(handle, cudaIpcEventHandle_t).exported()))


# Graphs.


@returns(0)
def cudaStreamBeginCapture(stream: Any, mode: cudaStreamCaptureMode) -> None:
    capturing = process().stream(stream)
    if not int(stream or 0) or capturing.captured is not None:
        raise Failure(cudaError_t.cudaErrorStreamCaptureUnsupported)
    capturing.captured = []


@returns(1)
def cudaStreamEndCapture(stream: Any) -> cudaGraph_t:
    capturing = process().stream(stream)
    if capturing.captured is None:
        raise Failure(cudaError_t.cudaErrorInvalidValue)
    work, capturing.captured = capturing.captured, None
    return cudaGraph_t(process().create_graph(work))


@returns(1)
def cudaGraphInstantiate(graph: Any, flags: int) -> cudaGraphExec_t:
    return cudaGraphExec_t(process().create_graph(process().graph(graph)))


@returns(0)
def cudaGraphDestroy(graph: Any) -> None:
    process().destroy_graph(graph)


@returns(0)
def cudaGraphExecDestroy(graphExec: Any) -> None:
    process().destroy_graph(graphExec)


@returns(0)
def cudaGraphLaunch(graphExec: Any, stream: Any) -> None:
    for work in process().graph(graphExec):
        process().stream(stream).submit(work)
    process().launches.append(int(graphExec))
