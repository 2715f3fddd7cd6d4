"""The OpenVINO backend: compiles models, and runs them with infer requests."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from nerite.backends.arrays.backend import ArrayBackend, ArrayModel
from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.arrays.graph import ModelGraph, complete_from_graph
from nerite.backends.configuration import Shape, TensorPort, batching
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.machine import translating
from nerite.core.errors import NeriteError
from nerite.core.tensor import Array, Buffer, decode_bytes
from nerite.frameworks.openvino import compile, graph
from nerite.frameworks.openvino.compile import CompilePlan, ModelSource

_log = logging.getLogger("nerite.frameworks.openvino")


class OpenVinoInference:
    """Computation of one instance, with its own infer request.

    Inputs are read where they are, even from read-only memory. Outputs are copied once, because the next computation
    reuses their memory. Having OpenVINO write to fresh memory instead was no faster at any size, and slower for small
    ones by 10 microseconds: fresh memory costs as much as the copy.
    """

    def __init__(self, compiled: Any, inputs: Sequence[str], outputs: Sequence[str], rows: int = 0) -> None:
        """``inputs`` and ``outputs`` are the names, in the model's order; batches are padded to ``rows``."""
        ov = graph.openvino()
        self._tensor = ov.Tensor
        self._request = compiled.create_infer_request()
        self._inputs = {name: (index, compiled.inputs[index].element_type) for index, name in enumerate(inputs)}
        self._outputs = {name: index for index, name in enumerate(outputs)}
        self._string = ov.Type.string
        self._text = any(port.element_type == self._string for port in compiled.outputs)
        self._rows = rows
        self._stateful = bool(self._request.query_state())

    def __call__(self, selection: OutputSelection, arrays: Mapping[str, Array]) -> Sequence[Array]:
        """Return new arrays. Raises what OpenVINO raises."""
        rows = len(next(iter(arrays.values()))) if self._rows else 0
        if rows < self._rows:
            arrays = {name: self._padded(array) for name, array in arrays.items()}
        if self._stateful:
            # The state that a request leaves must not affect the next one, which may be another client's.
            self._request.reset_state()
        # The request does not keep what it reads alive, so the list has to until all is computed.
        tensors = [self._input_tensor(name, array) for name, array in arrays.items()]
        for index, tensor in tensors:
            self._request.set_input_tensor(index, tensor)
        computed = self._computed()
        wanted = [computed[self._outputs[name]] for name in selection.names]
        if rows < self._rows:
            wanted = [array[:rows] if len(array) == self._rows else array for array in wanted]
        return [array if array.dtype.kind == "O" else array.copy() for array in wanted]

    def _input_tensor(self, name: str, array: Array) -> tuple[int, Any]:
        """Return the index of an input and a tensor for it, on the memory of ``array`` if possible."""
        index, element = self._inputs[name]
        if element == self._string:
            return index, self._tensor(array)
        shape = array.shape
        if not array.size:
            return index, self._tensor(element, shape)
        if not array.flags.aligned:
            array = array.copy()
        # OpenVINO looks at the first element, which before 2026 had to have an index.
        return index, self._tensor(array if shape else array.reshape(1), shape, element)

    def _computed(self) -> Sequence[Array]:
        """Return all outputs; numbers are in memory that the next computation overwrites."""
        request = self._request
        if not self._text:
            return list(request.infer(share_outputs=True, decode_strings=False).values())
        request.start_async()
        request.wait()
        tensors = request.output_tensors
        return [_objects(tensor) if tensor.element_type == self._string else tensor.data for tensor in tensors]

    def _padded(self, array: Array) -> Array:
        full = np.zeros((self._rows, *array.shape[1:]), array.dtype)
        full[: len(array)] = array
        return full


def _objects(tensor: Any) -> Array:
    """Return the strings of an ``openvino.Tensor`` as ``bytes`` objects; zeros at the end of one are lost."""
    if not tensor.size:
        return np.empty(tuple(tensor.shape), object)
    return tensor.bytes_data.astype(object)  # type: ignore[no-any-return]  # The package has no types.


class OpenVinoModel(ArrayModel[CompilePlan]):
    """Open model. It is compiled once for all instances on the same cores; each has its own infer request.

    The weights are in memory once for each compiled model.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        self._source = compile.model_source(context)
        self._core = graph.core(self._source.extension)
        self._plan = compile.make_plan(context, _settable_properties(self._core, compile.plan_device(context)))
        self._model: Any = None
        self._inputs: list[str] = []
        self._outputs: list[str] = []
        self._rows = 0
        self._precision_reported = False

    def source(self) -> ModelSource:
        """Return the model file, and how it is read."""
        return self._source

    def read(self) -> Any:
        """Return an ``openvino.Model``."""
        return compile.read_model(self._source)

    def completed(self, copy: Any) -> dict[str, Any]:
        """Return the configuration, completed from the model."""
        config = dict(self.context.config)
        if not batching(config) and compile.has_batch_layout(copy):
            # Fitted with any batch size, the model shows its graph with a free batch dimension.
            config["max_batch_size"] = 1
        return complete_from_graph(self.context, self._fitted(copy.clone(), config))

    def graph(self, copy: Any) -> ModelGraph:
        """Adapt the model to the complete configuration, and return its inputs and outputs."""
        return self._fitted(copy, self.context.config)

    def ports(self, copy: Any) -> tuple[Sequence[TensorPort], Sequence[TensorPort]]:
        """Return the declared inputs and outputs, and keep the model for the instances to compile."""
        ports = super().ports(copy)
        found, config = self.graph(copy), self.context.config
        self._inputs, self._outputs = list(found.inputs), list(found.outputs)
        if batching(config) and compile.flag_property(self.context, "ENABLE_BATCH_PADDING"):
            self._rows = int(config["max_batch_size"])
            compile.pad(copy, config)
        self._model = copy
        return ports

    def key(self, instance: InstanceContext) -> CompilePlan:
        """Return the plan for an instance. Raises ``InvalidArgument``."""
        return compile.instance_plan(self._plan, self.context.name, instance)

    def load(self, key: CompilePlan) -> Any:
        """Compile the model. Raises ``NeriteError``."""
        with translating(lambda error: graph.translated(error, "loading model", _remedy(self._core, key.device))):
            compiled = self._core.compile_model(self._model, key.device, dict(key.properties))
        self._report_precision(compiled, key)
        return compiled

    def _report_precision(self, compiled: Any, key: CompilePlan) -> None:
        """Log that a model of float32 is computed with half precision if the configuration does not set that."""
        chosen = {name for name, _ in key.properties}
        if key.device != "CPU" or compile.PRECISION in chosen or self._precision_reported:
            return
        types = graph.openvino().Type
        if all(port.element_type != types.f32 for port in (*compiled.inputs, *compiled.outputs)):
            return
        precision = compiled.get_property(compile.PRECISION)
        if precision in (types.bf16, types.f16):
            self._precision_reported = True
            _log.info(
                "model '%s' is computed with %s on this processor: outputs differ from those of float32 by up to about "
                "1 %% of the largest value. Set the parameter %s to f32 for float32, or to %s to choose this",
                self.context.name,
                precision.type_name,
                compile.PRECISION,
                precision.type_name,
            )

    def shares(self, key: CompilePlan, copy: Any) -> bool:
        """Return True: a compiled model is thread-safe."""
        return True

    def computation(self, copy: Any, instance: InstanceContext) -> OpenVinoInference:
        """Return a computation with its own infer request."""
        return OpenVinoInference(copy, self._inputs, self._outputs, self._rows)

    def text(self, shape: Shape, data: Buffer) -> Array:
        """Convert strings to an array of fixed width, which is how OpenVINO takes them."""
        elements = decode_bytes(data, prod(shape))
        return elements.astype(f"S{max(map(len, elements), default=0) or 1}").reshape(shape)

    def failure(self, error: Exception) -> NeriteError:
        """Translate an exception from OpenVINO."""
        return graph.translated(error, "running inference")

    def close(self) -> None:
        """Drop the model, which has its weights mapped, and what was compiled; that is freed with its instances."""
        super().close()
        self._model = None

    def _fitted(self, model: Any, config: Mapping[str, Any]) -> ModelGraph:
        compile.fit_model(model, self.context, config)
        return graph.graph_of_model(model, config)


class OpenVinoBackend(ArrayBackend):
    """Backend for models that OpenVINO can read."""

    name = "openvino"
    model = OpenVinoModel


def _settable_properties(core: Any, device: str) -> frozenset[str]:
    """Return the properties of a device that can be set. Raises ``NeriteError`` for a device that does not exist."""
    with translating(lambda error: graph.translated(error, "configuring openvino core", _remedy(core, device))):
        found = core.get_property(device.partition(":")[0], "SUPPORTED_PROPERTIES")
    return frozenset(name for name, access in found.items() if access != "RO")


def _remedy(core: Any, device: str) -> str:
    """Return the remedy for a device that does not exist; empty if it does."""
    available = core.available_devices
    if any(device.partition(".")[0] in (name, name.partition(".")[0]) for name in available) or ":" in device:
        return ""
    return f"TARGET_DEVICE may be one of: {', '.join(available)}"
