"""An engine's execution context with its memory: one for each profile that an instance has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import numpy as np

from nerite.backends.tensorrt.cuda import Graph, Memory, Stream
from nerite.backends.tensorrt.description import Description, Shape
from nerite.backends.tensorrt.engine import last_error, tensorrt
from nerite.core.errors import Internal, InvalidArgument
from nerite.core.tensor import Array

_MAX_GRAPHS: Final = 64
"""Shapes of batches for which a graph is kept."""


class Context:
    """Runs an engine with one of its profiles. For one thread at a time, which has to mean the engine's GPU."""

    def __init__(
        self, engine: Any, description: Description, profile: int, strategy: str, stream: Stream, *, graphs: bool
    ) -> None:
        """``graphs``: what a batch needs is captured when its shapes come for the second time. Raises ``Internal``."""
        trt = tensorrt()
        self._context = engine.create_execution_context(getattr(trt.ExecutionContextAllocationStrategy, strategy))
        if self._context is None:
            raise Internal(f"unable to create TensorRT context: {last_error()}")
        self._stream = stream
        self._inputs = {tensor.name: tensor for tensor in description.inputs}
        self._outputs = {tensor.name: tensor for tensor in description.outputs}
        self._memory = {name: Memory() for name in (*self._inputs, *self._outputs)}
        # What is in the host's memory is read and written there while the engine runs.
        self._graphs: dict[tuple[Shape, ...], Graph | None] | None = {} if graphs else None
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

    def _captured(self, shapes: tuple[Shape, ...]) -> Graph:
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
            self.memory = Memory()
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
