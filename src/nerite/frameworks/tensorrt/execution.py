"""Running an engine for one instance."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.backends.arrays.calls import OutputSelection
from nerite.core.errors import Internal, InvalidArgument, NotInstalled, Unavailable
from nerite.core.tensor import Array
from nerite.frameworks.tensorrt.engine import EngineDescription, Shape, choose_profile, last_error, tensorrt

# What is needed of CUDA: devices, memory, streams and graphs, through ``cuda.bindings.runtime``.

_NO_MEMORY: Final = "cudaErrorMemoryAllocation"
_MADE_FOR_ITSELF: Final = 1
"""cudaStreamNonBlocking: such a stream does not wait for others."""


@cache
def runtime() -> Any:
    """Return the module. Raises ``Unsupported`` where it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise NotInstalled(f"unable to import cuda.bindings ({error}): pip install 'nerite[tensorrt]'") from error


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
        raise NotInstalled(
            f"unable to load model '{model}', TensorRT backend supports only GPU device, and this machine has no GPU "
            f"that could be used{why}"
        )
    if number >= found[0]:
        raise NotInstalled(f"unable to load model '{model}': there is no GPU {number}, but {found[0]} of them")


def use(device: int) -> None:
    """Make ``device`` the one that this thread means."""
    checked(runtime().cudaSetDevice(device))


class CudaMemory:
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


class CudaStream:
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

    def end_capture(self) -> CudaGraph:
        """Return what was noted."""
        return CudaGraph(checked(runtime().cudaStreamEndCapture(self._stream)), self._stream)

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


class CudaGraph:
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


# An engine's execution context with its memory: one for each profile that an instance has.

_MAX_GRAPHS: Final = 64
"""Shapes of batches for which a graph is kept."""


class EngineContext:
    """Runs an engine with one of its profiles. For one thread at a time, which has to mean the engine's GPU."""

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
        """``graphs``: what a batch needs is captured when its shapes come for the second time. Raises ``Internal``."""
        trt = tensorrt()
        self._context = engine.create_execution_context(getattr(trt.ExecutionContextAllocationStrategy, strategy))
        if self._context is None:
            raise Internal(f"unable to create TensorRT context: {last_error()}")
        self._stream = stream
        self._inputs = {tensor.name: tensor for tensor in description.inputs}
        self._outputs = {tensor.name: tensor for tensor in description.outputs}
        self._memory = {name: CudaMemory() for name in (*self._inputs, *self._outputs)}
        # What is in the host's memory is read and written there while the engine runs.
        self._graphs: dict[tuple[Shape, ...], CudaGraph | None] | None = {} if graphs else None
        if description.shape_tensors:
            self._graphs = None
        self._allocators: dict[str, Any] = {}
        self._shapes: tuple[Shape, ...] = ()
        self._host: dict[str, Array] = {}
        self._told(self._context.set_optimization_profile_async(profile, stream.address), f"use profile {profile}")
        stream.wait()

    def run(self, inputs: Mapping[str, Array], wanted: list[str]) -> list[Array]:
        """Compute. Raises ``NeriteError``."""
        shapes = tuple([inputs[name].shape for name in self._inputs])
        if shapes != self._shapes or self._host:
            self._shapes = ()
            for name, array in inputs.items():
                self._shape(name, array)
            self._place_outputs()
            self._shapes = shapes
        for name, array in inputs.items():
            if name not in self._host:
                # From memory that is not page-locked: when this returns, CUDA has taken it.
                whole = np.ascontiguousarray(array)
                self._stream.to_device(self._memory[name].address, whole.ctypes.data, whole.nbytes)
        self._execute(shapes)
        arrays = [self._fetched(name) for name in wanted]
        self._stream.wait()
        return arrays

    def close(self) -> None:
        """Give everything back."""
        self._drop_graphs()
        self._context = None
        for memory in self._memory.values():
            memory.free()
        for allocator in self._allocators.values():
            allocator.memory.free()

    def _shape(self, name: str, array: Array) -> None:
        """Say how large an input is, and where it will be."""
        if not self._context.set_input_shape(name, array.shape):
            raise InvalidArgument(f"trt failed to set binding dimension to {list(array.shape)} for input '{name}'")
        if self._inputs[name].shape_values:
            # TensorRT may read them once more while it runs.
            values = self._host[name] = np.ascontiguousarray(array)
            self._told(self._context.set_tensor_address(name, values.ctypes.data), f"bind '{name}'")
        else:
            self._bind(name, array.nbytes)

    def _place_outputs(self) -> None:
        if missing := self._context.infer_shapes():
            raise Internal(f"TensorRT lacks the shapes of: {', '.join(missing)}")
        for name, tensor in self._outputs.items():
            shape = tuple(self._context.get_tensor_shape(name))
            if -1 in shape:
                self._allocate_while_it_runs(name)
            elif tensor.shape_values:
                array = self._host[name] = np.empty(shape, tensor.datatype.numpy)
                self._told(self._context.set_tensor_address(name, array.ctypes.data), f"bind '{name}'")
            else:
                self._bind(name, _bytes(shape, tensor.datatype.size))

    def _bind(self, name: str, size: int) -> None:
        memory = self._memory[name]
        if memory.hold(size):
            self._drop_graphs()
            self._told(self._context.set_tensor_address(name, memory.address), f"bind '{name}'")

    def _allocate_while_it_runs(self, name: str) -> None:
        """Leave it to the data how large an output is. Such an engine cannot be captured."""
        self._graphs = None
        if name not in self._allocators:
            allocator = self._allocators[name] = _allocator_class()()
            self._told(self._context.set_output_allocator(name, allocator), f"let '{name}' grow")

    def _execute(self, shapes: tuple[Shape, ...]) -> None:
        graph = None
        if self._graphs is not None and shapes in self._graphs:
            graph = self._graphs[shapes] or self._captured(shapes)
        elif self._graphs is not None and len(self._graphs) < _MAX_GRAPHS:
            # The first run does what TensorRT does once for each shape, and what cannot be captured.
            self._graphs[shapes] = None
        if graph is not None:
            graph.launch()
        else:
            self._told(self._context.execute_async_v3(self._stream.address), "run the engine")

    def _captured(self, shapes: tuple[Shape, ...]) -> CudaGraph:
        assert self._graphs is not None
        self._stream.wait()
        self._stream.begin_capture()
        worked = self._context.execute_async_v3(self._stream.address)
        graph = self._stream.end_capture()
        self._told(worked, "capture the engine")
        self._graphs[shapes] = graph
        return graph

    def _fetched(self, name: str) -> Array:
        """Begin to copy an output to the host."""
        tensor = self._outputs[name]
        if name in self._allocators:
            # How large it is is known when the engine has run.
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
        """Forget graphs: they have the addresses in them."""
        for graph in (self._graphs or {}).values():
            if graph is not None:
                graph.close()
        if self._graphs is not None:
            self._graphs.clear()

    @staticmethod
    def _told(worked: bool, what: str) -> None:
        if not worked:
            raise Internal(f"TensorRT failed to {what}: {last_error()}")


def _bytes(shape: Shape, size: int) -> int:
    return int(np.prod(shape, dtype=np.int64)) * size


@cache
def _allocator_class() -> Any:
    """Return the class of what TensorRT asks for memory, of which the base is TensorRT's."""
    trt = tensorrt()

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc, name-defined, unused-ignore]
        """The memory of one output, and the shape that it has in the end."""

        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.memory = CudaMemory()
            self.shape: Shape = ()

        def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:
            """Called by TensorRT. CUDA aligns all memory well enough."""
            self.memory.hold(size)
            return self.memory.address

        def reallocate_output_async(self, tensor_name: str, memory: Any, size: int, alignment: int, stream: Any) -> int:
            """Called by TensorRT, where it knows that it can be asked on a stream."""
            return self.reallocate_output(tensor_name, memory, size, alignment)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            """Called by TensorRT, once it knows."""
            self.shape = tuple(shape)

    return Allocator


class ExecutionPath(NamedTuple):
    """How an instance runs."""

    device: int
    profiles: tuple[int, ...]
    strategy: str
    """How a context has its memory: ``STATIC`` or ``ON_PROFILE_CHANGE``."""
    priority: str
    graphs: bool


class EngineExecution:
    """An instance's contexts, on a stream of its own."""

    def __init__(self, model: str, engine: Any, description: EngineDescription, way: ExecutionPath) -> None:
        """Raises ``NeriteError``."""
        self._model = model
        self._device = way.device
        use(way.device)
        self._stream = CudaStream(way.priority)
        self._profiles = {index: description.profiles[index] for index in way.profiles}
        self._contexts: dict[int, EngineContext] = {}
        try:
            for index in way.profiles:
                self._contexts[index] = EngineContext(
                    engine, description, index, way.strategy, self._stream, graphs=way.graphs
                )
        except BaseException:
            self.close()
            raise

    def __call__(self, selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Compute the outputs of ``selection``. Raises ``NeriteError``."""
        # Each time: it is the thread's, and an instance is not always run by the same.
        use(self._device)
        index = choose_profile(self._model, self._profiles, {name: array.shape for name, array in inputs.items()})
        return self._contexts[index].run(inputs, list(selection.names))

    def close(self) -> None:
        """Give everything back."""
        use(self._device)
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()
        self._stream.close()
