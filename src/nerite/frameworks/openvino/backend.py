"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.arrays.graph import complete_from_graph, needs_completion
from nerite.backends.arrays.instance import ArrayInstance, of_graph
from nerite.backends.configuration import Shape, batching
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core.tensor import Array, Buffer, decode_bytes
from nerite.frameworks.openvino import compile, graph
from nerite.frameworks.openvino.compile import CompilePlan

# Strings for OpenVINO, which takes them in arrays of one width and gives them back like that.


def as_fixed_width(shape: Shape, data: Buffer) -> Array:
    """Return an array of strings in one width, from the wire form of a tensor of this shape."""
    elements = decode_bytes(data, prod(shape))
    return elements.astype(f"S{max(map(len, elements), default=0) or 1}").reshape(shape)


def as_objects(tensor: Any) -> Array:
    """Return the strings of an ``openvino.Tensor`` as objects of type ``bytes``; zeros at the end of one are lost."""
    if not tensor.size:
        return np.empty(tuple(tensor.shape), object)
    return tensor.bytes_data.astype(object)  # type: ignore[no-any-return]  # The package has no types.


# Computing: one infer request of OpenVINO, which belongs to one instance.
#
# Inputs are read where they lie, also where that is memory that may not be written to. Outputs are copied, once: the
# next computation reuses their memory. Having OpenVINO write to fresh memory instead was no faster at any size, and
# slower for small ones by 10 microseconds: fresh memory costs as much as the copy.


class OpenVinoInference:
    """Computes what a selection wants, for one thread at a time: the ``Compute`` of an ``ArrayInstance``."""

    def __init__(self, compiled: Any, inputs: Sequence[str], outputs: Sequence[str], rows: int = 0) -> None:
        """``inputs`` and ``outputs`` are the names, in the model's order; ``rows``: fill batches up to so many."""
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
        """Return new arrays. Raises ``Internal`` with what OpenVINO says went wrong."""
        rows = len(next(iter(arrays.values()))) if self._rows else 0
        if rows < self._rows:
            arrays = {name: self._filled_up(array) for name, array in arrays.items()}
        try:
            if self._stateful:
                # What one request leaves must not change the answer to the next, which may be anybody's.
                self._request.reset_state()
            # Kept until all is computed: the request does not keep what it reads alive.
            fed = [self._fed(name, array) for name, array in arrays.items()]
            for index, tensor in fed:
                self._request.set_input_tensor(index, tensor)
            found = self._computed()
        except Exception as error:  # Whatever the framework raises says why it cannot compute this batch.
            raise graph.translated(error, "running inference") from error
        wanted = [found[self._outputs[name]] for name in selection.names]
        if rows < self._rows:
            wanted = [array[:rows] if len(array) == self._rows else array for array in wanted]
        return [array if array.dtype.kind == "O" else array.copy() for array in wanted]

    def _fed(self, name: str, array: Array) -> tuple[int, Any]:
        """Return the place of an input and a tensor for it, on the memory of ``array`` where that will do."""
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
        """Return all outputs: numbers in memory that the next computation overwrites."""
        request = self._request
        if not self._text:
            return list(request.infer(share_outputs=True, decode_strings=False).values())
        request.start_async()
        request.wait()
        tensors = request.output_tensors
        return [as_objects(tensor) if tensor.element_type == self._string else tensor.data for tensor in tensors]

    def _filled_up(self, array: Array) -> Array:
        full = np.zeros((self._rows, *array.shape[1:]), array.dtype)
        full[: len(array)] = array
        return full


class OpenVinoBackend:
    """Models that OpenVINO can read."""

    name = "openvino"
    isolated = False

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from the model.

        The model is left in the context for ``open``. Raises ``NeriteError``.
        """
        if not needs_completion(context):
            return context.config
        source = compile.model_source(context)
        model = context.memo[source] = compile.read_model(source)
        config = dict(context.config)
        if not batching(config) and compile.has_batch_layout(model):
            # Fitted with any batch size, the model tells how it is with a free batch.
            config["max_batch_size"] = 1
        fitted = model.clone()
        compile.fit_model(fitted, context, config)
        return complete_from_graph(context, graph.graph_of_model(fitted, config))

    def open(self, context: ModelContext) -> OpenVinoModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return OpenVinoModel(context)


class OpenVinoModel:
    """An open model: compiled once for all instances that have the same cores, each with an infer request of its own.

    The weights are in memory once for each compiled model.
    """

    def __init__(self, context: ModelContext) -> None:
        source = compile.model_source(context)
        self._name = context.name
        self._core = graph.core(source.extension)
        self._plan = compile.make_plan(context, _supported(self._core, compile.plan_device(context)))
        self._model = context.memo.pop(source, None) or compile.read_model(source)
        config = context.config
        compile.fit_model(self._model, context, config)
        found = graph.graph_of_model(self._model, config)
        self._face = of_graph(context, found, as_fixed_width)
        self._inputs, self._outputs = list(found.inputs), list(found.outputs)
        self._rows = 0
        if batching(config) and compile.flag_property(context, "ENABLE_BATCH_PADDING"):
            self._rows = int(config["max_batch_size"])
            compile.pad(self._model, config)
        self._lock = threading.Lock()
        self._compiled: dict[CompilePlan, Any] = {}

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Make an instance, compiling the model if it is the first of its kind. Raises ``NeriteError``."""
        compiled = self._compile(compile.instance_plan(self._plan, self._name, context))
        return self._face.instance(OpenVinoInference(compiled, self._inputs, self._outputs, self._rows))

    def close(self) -> None:
        """Let go of the model, which has its weights mapped, and of what was compiled; that ends with its instances."""
        self._compiled.clear()
        self._model = None

    def _compile(self, wanted: CompilePlan) -> Any:
        with self._lock:
            if wanted not in self._compiled:
                try:
                    self._compiled[wanted] = self._core.compile_model(
                        self._model, wanted.device, dict(wanted.properties)
                    )
                except Exception as error:  # Whatever the framework raises says why the model cannot be compiled.
                    raise graph.translated(error, "loading model", _remedy(self._core, wanted.device)) from error
            return self._compiled[wanted]


def _supported(core: Any, device: str) -> frozenset[str]:
    """Return the properties of a device that may be set. Raises ``NeriteError`` for a device that is not there."""
    try:
        found = core.get_property(device.partition(":")[0], "SUPPORTED_PROPERTIES")
    except Exception as error:  # Whatever the framework raises says why it cannot use the device.
        raise graph.translated(error, "configuring openvino core", _remedy(core, device)) from error
    return frozenset(name for name, access in found.items() if access != "RO")


def _remedy(core: Any, device: str) -> str:
    """Return what to do about a device that is not there; nothing, if it is."""
    available = core.available_devices
    if any(device.partition(".")[0] in (name, name.partition(".")[0]) for name in available) or ":" in device:
        return ""
    return f"TARGET_DEVICE may be one of: {', '.join(available)}"
