"""Runs an engine for one instance, with memory, streams and graphs of CUDA."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.machine import importing
from nerite.core.errors import Internal, InvalidArgument, NotInstalled, Unavailable
from nerite.core.tensor import Array
from nerite.frameworks.tensorrt.engine import EngineDescription, Shape, choose_profile, last_error, tensorrt

# CUDA: devices, memory, streams and graphs, through ``cuda.bindings.runtime``.

_NO_MEMORY: Final = "cudaErrorMemoryAllocation"
_NON_BLOCKING: Final = 1
"""cudaStreamNonBlocking: such a stream does not wait for others."""


@cache
def runtime() -> Any:
    """Import CUDA's runtime lazily and return it. Raises ``NotInstalled`` if it is not installed."""
    with importing("cuda.bindings", "tensorrt"):
        return importlib.import_module("cuda.bindings.runtime")


def checked(result: tuple[Any, ...]) -> Any:
    """Return the result of a function of CUDA. Raises ``NeriteError`` with CUDA's message if it failed."""
    error, *values = result
    if int(error):
        text = f"CUDA error: {_message(error)}"
        raise Unavailable(text) if error.name == _NO_MEMORY else Internal(text)
    return values[0] if values else None


def require_device(model: str, number: int) -> None:
    """Raise ``NotInstalled`` if the machine has no GPU with this number."""
    error, *found = runtime().cudaGetDeviceCount()
    if int(error) or not found[0]:
        why = f" (CUDA says: {_message(error)})" if int(error) else ""
        raise NotInstalled(
            f"unable to load model '{model}', TensorRT backend supports only GPU device, and this machine has no GPU "
            f"that could be used{why}"
        )
    if number >= found[0]:
        raise NotInstalled(f"unable to load model '{model}': there is no GPU {number}, but {found[0]} of them")


def use(device: int) -> None:
    """Make ``device`` the current GPU of this thread."""
    checked(runtime().cudaSetDevice(device))


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
        self._size = max(size, 1)
        self.address = int(checked(runtime().cudaMalloc(self._size)))
        return True

    def free(self) -> None:
        """Free the memory."""
        if self.address:
            checked(runtime().cudaFree(self.address))
            self.address = self._size = 0


class CudaStream:
    """CUDA stream: executes operations in order."""

    def __init__(self, priority: str) -> None:
        """``priority`` is as in a configuration: ``PRIORITY_MAX``, ``PRIORITY_MIN`` or ``PRIORITY_DEFAULT``."""
        least, greatest = self._priorities()
        wanted = {"PRIORITY_MAX": greatest, "PRIORITY_MIN": least}.get(priority, 0)
        self._stream = checked(runtime().cudaStreamCreateWithPriority(_NON_BLOCKING, wanted))
        self.address = int(self._stream)

    def to_device(self, address: int, host: int, size: int) -> None:
        """Copy ``size`` bytes from the host."""
        self._copy(address, host, size, runtime().cudaMemcpyKind.cudaMemcpyHostToDevice)

    def to_host(self, host: int, address: int, size: int) -> None:
        """Copy ``size`` bytes to the host."""
        self._copy(host, address, size, runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def wait(self) -> None:
        """Wait until all operations are done."""
        checked(runtime().cudaStreamSynchronize(self._stream))

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


def _message(error: Any) -> str:
    return str(runtime().cudaGetErrorString(error)[1].decode())


# Execution contexts: an instance has one for each of its profiles.

_MAX_GRAPHS: Final = 64
"""Maximum number of batch shapes for which a graph is kept."""


class EngineContext:
    """Execution context of an engine with one profile, and its memory. Not thread-safe; runs on the current GPU."""

    def __init__(
        self,
        engine: Any,
        description: EngineDescription,
        profile: int,
        strategy: str,
        stream: CudaStream,
        *,
        graphs: bool,
    ) -> None:
        """``graphs`` captures a CUDA graph when batch shapes occur for the second time. Raises ``Internal``."""
        trt = tensorrt()
        self._context = engine.create_execution_context(getattr(trt.ExecutionContextAllocationStrategy, strategy))
        if self._context is None:
            raise Internal(f"unable to create TensorRT context: {last_error()}")
        self._stream = stream
        self._inputs = {tensor.name: tensor for tensor in description.inputs}
        self._outputs = {tensor.name: tensor for tensor in description.outputs}
        self._memory = {name: CudaMemory() for name in (*self._inputs, *self._outputs)}
        # Tensors in host memory are accessed while the engine runs, which a graph cannot repeat.
        self._graphs: dict[tuple[Shape, ...], CudaGraph | None] | None = {} if graphs else None
        if description.shape_tensors:
            self._graphs = None
        self._allocators: dict[str, Any] = {}
        self._shapes: tuple[Shape, ...] = ()
        self._host: dict[str, Array] = {}
        self._check(self._context.set_optimization_profile_async(profile, stream.address), f"use profile {profile}")
        stream.wait()

    def run(self, inputs: Mapping[str, Array], wanted: list[str]) -> list[Array]:
        """Return the outputs ``wanted``, in that order. Raises ``NeriteError``."""
        shapes = tuple([inputs[name].shape for name in self._inputs])
        if shapes != self._shapes or self._host:
            self._shapes = ()
            for name, array in inputs.items():
                self._shape(name, array)
            self._place_outputs()
            self._shapes = shapes
        for name, array in inputs.items():
            if name not in self._host:
                # The memory is not page-locked, so CUDA has read it when this returns.
                whole = np.ascontiguousarray(array)
                self._stream.to_device(self._memory[name].address, whole.ctypes.data, whole.nbytes)
        self._execute(shapes)
        arrays = [self._fetched(name) for name in wanted]
        self._stream.wait()
        return arrays

    def close(self) -> None:
        """Release all resources."""
        self._drop_graphs()
        self._context = None
        for memory in self._memory.values():
            memory.free()
        for allocator in self._allocators.values():
            allocator.memory.free()

    def _shape(self, name: str, array: Array) -> None:
        """Set the shape and the address of an input."""
        if not self._context.set_input_shape(name, array.shape):
            raise InvalidArgument(f"trt failed to set binding dimension to {list(array.shape)} for input '{name}'")
        if self._inputs[name].shape_values:
            # TensorRT may read the values again while it runs.
            values = self._host[name] = np.ascontiguousarray(array)
            self._check(self._context.set_tensor_address(name, values.ctypes.data), f"bind '{name}'")
        else:
            self._bind(name, array.nbytes)

    def _place_outputs(self) -> None:
        if missing := self._context.infer_shapes():
            raise Internal(f"TensorRT lacks the shapes of: {', '.join(missing)}")
        for name, tensor in self._outputs.items():
            shape = tuple(self._context.get_tensor_shape(name))
            if -1 in shape:
                self._allocate_at_run_time(name)
            elif tensor.shape_values:
                array = self._host[name] = np.empty(shape, tensor.datatype.numpy)
                self._check(self._context.set_tensor_address(name, array.ctypes.data), f"bind '{name}'")
            else:
                self._bind(name, _bytes(shape, tensor.datatype.size))

    def _bind(self, name: str, size: int) -> None:
        memory = self._memory[name]
        if memory.reserve(size):
            self._drop_graphs()
            self._check(self._context.set_tensor_address(name, memory.address), f"bind '{name}'")

    def _allocate_at_run_time(self, name: str) -> None:
        """Allocate an output whose size depends on the data during the run. Such an engine cannot be captured."""
        self._graphs = None
        if name not in self._allocators:
            allocator = self._allocators[name] = _allocator_class(tensorrt())()
            self._check(self._context.set_output_allocator(name, allocator), f"let '{name}' grow")

    def _execute(self, shapes: tuple[Shape, ...]) -> None:
        graph = None
        if self._graphs is not None and shapes in self._graphs:
            graph = self._graphs[shapes] or self._captured(shapes)
        elif self._graphs is not None and len(self._graphs) < _MAX_GRAPHS:
            # The first run includes what TensorRT does once for each shape, which cannot be captured.
            self._graphs[shapes] = None
        if graph is not None:
            graph.launch()
        else:
            self._check(self._context.execute_async_v3(self._stream.address), "run the engine")

    def _captured(self, shapes: tuple[Shape, ...]) -> CudaGraph:
        assert self._graphs is not None
        self._stream.wait()
        self._stream.begin_capture()
        captured = self._context.execute_async_v3(self._stream.address)
        graph = self._stream.end_capture()
        self._check(captured, "capture the engine")
        self._graphs[shapes] = graph
        return graph

    def _fetched(self, name: str) -> Array:
        """Start to copy an output to the host; return the array, which is filled when the stream is done."""
        tensor = self._outputs[name]
        if name in self._allocators:
            # The shape is known when the engine has run.
            self._stream.wait()
            shape, memory = self._allocators[name].shape, self._allocators[name].memory
        elif tensor.shape_values:
            self._stream.wait()
            return self._host[name]
        else:
            shape, memory = tuple(self._context.get_tensor_shape(name)), self._memory[name]
        array = np.empty(shape, tensor.datatype.numpy)
        self._stream.to_host(array.ctypes.data, memory.address, array.nbytes)
        return array

    def _drop_graphs(self) -> None:
        """Drop all graphs, because they contain addresses."""
        for graph in (self._graphs or {}).values():
            if graph is not None:
                graph.close()
        if self._graphs is not None:
            self._graphs.clear()

    @staticmethod
    def _check(succeeded: bool, action: str) -> None:
        if not succeeded:
            raise Internal(f"TensorRT failed to {action}: {last_error()}")


def _bytes(shape: Shape, size: int) -> int:
    return int(np.prod(shape, dtype=np.int64)) * size


@cache
def _allocator_class(trt: Any) -> Any:
    """Return the class of output allocators, whose base class is that of TensorRT, module ``trt``."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc, name-defined, unused-ignore]
        """Memory of one output, and its final shape."""

        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.memory = CudaMemory()
            self.shape: Shape = ()

        def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:
            """Called by TensorRT. CUDA's own alignment is sufficient."""
            self.memory.reserve(size)
            return self.memory.address

        def reallocate_output_async(self, tensor_name: str, memory: Any, size: int, alignment: int, stream: Any) -> int:
            """Called by versions of TensorRT that allocate on a stream."""
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            """Called by TensorRT when the shape is known."""
            self.shape = tuple(shape)

    return Allocator


class ExecutionOptions(NamedTuple):
    """How an instance runs its engine."""

    device: int
    profiles: tuple[int, ...]
    strategy: str
    """Memory allocation of contexts: ``STATIC`` or ``ON_PROFILE_CHANGE``."""
    priority: str
    graphs: bool


class EngineExecution:
    """Computation of one instance: its execution contexts, on its own stream."""

    def __init__(self, model: str, engine: Any, description: EngineDescription, options: ExecutionOptions) -> None:
        """Create the contexts. Raises ``NeriteError``."""
        self._model = model
        self._device = options.device
        use(options.device)
        self._stream = CudaStream(options.priority)
        self._profiles = {index: description.profiles[index] for index in options.profiles}
        self._contexts: dict[int, EngineContext] = {}
        try:
            for index in options.profiles:
                self._contexts[index] = EngineContext(
                    engine, description, index, options.strategy, self._stream, graphs=options.graphs
                )
        except BaseException:
            self.close()
            raise

    def __call__(self, selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Compute the outputs of ``selection``. Raises ``NeriteError``."""
        # At each run: the current GPU belongs to the thread, and an instance is not always run by the same one.
        use(self._device)
        index = choose_profile(self._model, self._profiles, {name: array.shape for name, array in inputs.items()})
        return self._contexts[index].run(inputs, list(selection.names))

    def close(self) -> None:
        """Release all resources."""
        use(self._device)
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()
        self._stream.close()
