"""In the place of TensorRT, on machines without GPUs: the part of its Python API that is used, as documented.

A plan is what ``plan`` below makes: a header and an engine as JSON. What an engine computes is one of three things.
Needs the stand-in for CUDA, on whose streams engines run.
"""

from __future__ import annotations

import ctypes
import enum
import json
from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.stand_in.process import process

__version__ = "10.9.0.34"
made: list[Any] = []
"""Every execution context."""


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(enum.Enum):
    DEVICE, HOST = range(2)


class TensorFormat(enum.Enum):
    LINEAR, CHW4 = range(2)


class DataType(enum.Enum):
    FLOAT, HALF, INT32, INT64, BOOL, FP8 = range(6)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


_NUMPY = {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_}


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class IOutputAllocator:
    pass


def plan(engine: dict[str, Any], version: tuple[int, int, int, int] = (10, 9, 0, 34)) -> bytes:
    return b"ftrt" + bytes(4) + bytes(16) + bytes(version) + json.dumps(engine).encode()


def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
    return True


def get_plugin_registry() -> SimpleNamespace:
    def load_library(path: str) -> None:
        raise RuntimeError(f"cannot open {path}")

    return SimpleNamespace(load_library=load_library)


class Runtime:
    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        version = ".".join(map(str, data[24:28]))
        if version != __version__ and not self.engine_host_code_allowed:
            self._logger.log(ILogger.Severity.ERROR, "Version tag does not match")
            return None
        return Engine(json.loads(data[28:]), self._logger, process().current)


class Engine:
    def __init__(self, said: dict[str, Any], logger: Any, device: int) -> None:
        self.said = said
        self.logger = logger
        self.device = device
        self.tensors = {tensor["name"]: tensor for tensor in said["tensors"]}
        self.num_io_tensors = len(self.tensors)
        self.num_optimization_profiles = len(said["profiles"])

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self.tensors[name]["mode"]]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.tensors[name]["type"]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name]["dims"])

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if self.tensors[name].get("host") else TensorLocation.DEVICE

    def get_tensor_format(self, name: str, profile: int) -> TensorFormat:
        return TensorFormat[self.tensors[name].get("format", "LINEAR")]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self.said["profiles"][profile][name]]

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> Context:
        assert process().current == self.device, "another GPU than the engine's"
        return Context(self, strategy)


class Context:
    """Computes: OUT = 2 * IN; the elements of IN that are above 0; or zeros of the sizes that SIZES has."""

    def __init__(self, engine: Engine, strategy: ExecutionContextAllocationStrategy) -> None:
        self.engine = engine
        self.strategy = strategy
        self.profile = 0
        self.runs = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        made.append(self)

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return stream in process().streams

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if name in self.engine.said["profiles"][self.profile]:
            least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
            if not all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)):
                return False
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return address != 0

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self._allocators[name] = allocator
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.tensors if self._is_input(name) and name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if self._is_input(name):
            return self._shapes[name]
        if self.engine.said["computes"] == "double":
            return self._shapes["IN"]
        if self.engine.said["computes"] == "positive":
            return (-1,)
        return tuple(map(int, self._array("SIZES")))

    def execute_async_v3(self, stream: int) -> bool:
        on = process().streams[stream]
        if on.captured is None:
            self.runs += 1
        if self.engine.said["computes"] == "positive":
            # The size of the output is known, and the memory allocated, before this returns.
            on.synchronize()
            self._keep_positive()
        else:
            on.submit(self._work())
        return bool(self.engine.said.get("works", True))

    def _is_input(self, name: str) -> bool:
        return self.engine.get_tensor_mode(name) is TensorIOMode.INPUT

    def _work(self) -> Callable[[], None]:
        """Return what is to be done, at the addresses and with the shapes of now."""
        out = self._array("OUT")
        if self.engine.said["computes"] == "zeros":
            return lambda: out.fill(0)
        given = self._array("IN")
        return lambda: np.multiply(given, 2, out=out)

    def _keep_positive(self) -> None:
        given = self._array("IN")
        found = given[given > 0]
        allocator = self._allocators["OUT"]
        address = allocator.reallocate_output_async("OUT", None, found.nbytes, 256, 0)
        ctypes.memmove(address, found.ctypes.data, found.nbytes)
        allocator.notify_shape("OUT", found.shape)

    def _array(self, name: str) -> Any:
        tensor = self.engine.tensors[name]
        shape = self._shapes[name] if self._is_input(name) else self.get_tensor_shape(name)
        dtype = np.dtype(_NUMPY[tensor["type"]])
        raw = (ctypes.c_char * (prod(shape) * dtype.itemsize)).from_address(self._addresses[name])
        return np.frombuffer(raw, dtype).reshape(shape)
