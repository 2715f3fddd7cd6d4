"""In the place of the bindings of CUDA's driver: the functions that are used beside those of the runtime."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from cuda.stand_in.enums import Failure, cudaError_t
from cuda.stand_in.handles import CUdevice, CUdeviceptr, CUevent, CUgraph, CUgraphExec, CUstream, address_of
from cuda.stand_in.process import is_initialized, process, returns

__all__ = [
    "CUdevice",
    "CUdeviceptr",
    "CUevent",
    "CUgraph",
    "CUgraphExec",
    "CUresult",
    "CUstream",
    "cuDeviceGet",
    "cuDevicePrimaryCtxGetState",
    "cuGetErrorString",
    "cuInit",
    "cuMemGetAddressRange",
]
P = ParamSpec("P")


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


_RESULTS = {int(each): each for each in CUresult}


def _returns(results: int) -> Callable[[Callable[P, Any]], Callable[P, tuple[Any, ...]]]:
    """Let a function return as the bindings do. Errors of the driver have the numbers of the runtime's."""

    def decorate(function: Callable[P, Any]) -> Callable[P, tuple[Any, ...]]:
        checked = returns(results)(function)

        @wraps(function)
        def call(*arguments: P.args, **keywords: P.kwargs) -> tuple[Any, ...]:
            if not is_initialized() and function.__name__ != "cuInit":
                return (CUresult.CUDA_ERROR_NOT_INITIALIZED, *[None] * results)
            error, *values = checked(*arguments, **keywords)
            return (_RESULTS.get(int(error), CUresult.CUDA_ERROR_UNKNOWN), *values)

        return call

    return decorate


def cuGetErrorString(error: CUresult) -> tuple[CUresult, bytes]:
    return CUresult.CUDA_SUCCESS, cudaError_t(int(error)).message


@_returns(0)
def cuInit(Flags: int) -> None:
    if not process().devices:
        raise Failure(cudaError_t.cudaErrorNoDevice)


@_returns(1)
def cuDeviceGet(ordinal: int) -> CUdevice:
    process().require(ordinal)
    return CUdevice(ordinal)


@_returns(2)
def cuDevicePrimaryCtxGetState(dev: CUdevice) -> tuple[int, int]:
    process().require(int(dev))
    return 0, int(int(dev) in process().active)


@_returns(2)
def cuMemGetAddressRange(dptr: Any) -> tuple[CUdeviceptr, int]:
    region = process().memory.region(address_of(dptr))
    if region is None:
        raise Failure(cudaError_t.cudaErrorSymbolNotFound)
    return CUdeviceptr(region.address), region.size
