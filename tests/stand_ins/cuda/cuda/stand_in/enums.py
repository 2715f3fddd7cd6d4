"""Enumerations of CUDA's runtime, as far as they are used, and the errors that the stand-in gives."""

from __future__ import annotations

import enum


class cudaError_t(enum.IntEnum):
    """The errors that the stand-in gives, or can be told to give."""

    message: bytes

    def __new__(cls, value: int, message: str = "") -> cudaError_t:
        self = int.__new__(cls, value)
        self._value_ = value
        self.message = message.encode()
        return self

    cudaSuccess = 0, "no error"
    cudaErrorInvalidValue = 1, "invalid argument"
    cudaErrorMemoryAllocation = 2, "out of memory"
    cudaErrorInitializationError = 3, "initialization error"
    cudaErrorCudartUnloading = 4, "driver shutting down"
    cudaErrorInvalidHostPointer = 16, "invalid host pointer"
    cudaErrorInvalidDevicePointer = 17, "invalid device pointer"
    cudaErrorInvalidMemcpyDirection = 21, "invalid copy direction for memcpy"
    cudaErrorInsufficientDriver = 35, "CUDA driver version is insufficient for CUDA runtime version"
    cudaErrorDevicesUnavailable = 46, "CUDA-capable device(s) is/are busy or unavailable"
    cudaErrorNoDevice = 100, "no CUDA-capable device is detected"
    cudaErrorInvalidDevice = 101, "invalid device ordinal"
    cudaErrorDeviceUninitialized = 201, "invalid device context"
    cudaErrorMapBufferObjectFailed = 205, "mapping of buffer object failed"
    cudaErrorUnmapBufferObjectFailed = 206, "unmapping of buffer object failed"
    cudaErrorECCUncorrectable = 214, "uncorrectable ECC error encountered"
    cudaErrorPeerAccessUnsupported = 217, "peer access is not supported between these two devices"
    cudaErrorOperatingSystem = 304, "OS call failed or operation not supported on this OS"
    cudaErrorInvalidResourceHandle = 400, "invalid resource handle"
    cudaErrorSymbolNotFound = 500, "named symbol not found"
    cudaErrorNotReady = 600, "device not ready"
    cudaErrorIllegalAddress = 700, "an illegal memory access was encountered"
    cudaErrorPeerAccessAlreadyEnabled = 704, "peer access is already enabled"
    cudaErrorPeerAccessNotEnabled = 705, "peer access has not been enabled"
    cudaErrorContextIsDestroyed = 709, "context is destroyed"
    cudaErrorTooManyPeers = 711, "peer mapping resources exhausted"
    cudaErrorHostMemoryAlreadyRegistered = 712, "part or all of the requested memory range is already mapped"
    cudaErrorHostMemoryNotRegistered = 713, "pointer does not correspond to a registered memory region"
    cudaErrorLaunchFailure = 719, "unspecified launch failure"
    cudaErrorNotPermitted = 800, "operation not permitted"
    cudaErrorNotSupported = 801, "operation not supported"
    cudaErrorSystemNotReady = 802, "system not yet initialized"
    cudaErrorStreamCaptureUnsupported = 900, "operation not permitted when stream is capturing"
    cudaErrorStreamCaptureInvalidated = 901, "operation failed due to a previous error during capture"
    cudaErrorTimeout = 909, "wait operation timed out"
    cudaErrorUnknown = 999, "unknown error"


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3
    cudaMemcpyDefault = 4


class cudaMemoryType(enum.IntEnum):
    cudaMemoryTypeUnregistered = 0
    cudaMemoryTypeHost = 1
    cudaMemoryTypeDevice = 2
    cudaMemoryTypeManaged = 3


class cudaDeviceAttr(enum.IntEnum):
    cudaDevAttrUnifiedAddressing = 41
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76
    cudaDevAttrHostRegisterSupported = 99
    cudaDevAttrIpcEventSupport = 125


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


class Failure(Exception):
    """A call fails with ``error``."""

    def __init__(self, error: cudaError_t) -> None:
        super().__init__(error.name)
        self.error = error
