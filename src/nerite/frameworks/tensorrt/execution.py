"""Runs an engine for one instance, with memory, streams and graphs of CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.backends.arrays.calls import OutputSelection
from nerite.core.errors import Internal, InvalidArgument, NotInstalled
from nerite.core.tensor import Array
from nerite.devices.cuda import CudaGraph, CudaMemory, CudaStream, message_of, runtime, use
from nerite.frameworks.tensorrt.engine import EngineDescription, Shape, choose_profile, last_error, tensorrt


def require_device(model: str, number: int) -> None:
    """Raise ``NotInstalled`` if the machine has no GPU with this number."""
    error, *found = runtime().cudaGetDeviceCount()
    if int(error) or not found[0]:
        why = f" (CUDA says: {message_of(error)})" if int(error) else ""
        raise NotInstalled(
            f"unable to load model '{model}', TensorRT backend supports only GPU device, and this machine has no GPU "
            f"that could be used{why}"
        )
    if number >= found[0]:
        raise NotInstalled(f"unable to load model '{model}': there is no GPU {number}, but {found[0]} of them")


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
