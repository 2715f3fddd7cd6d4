"""Backend for TensorFlow Lite models on LiteRT, formerly the TensorFlow Lite runtime. Runs on the CPU only.

A model has names for its tensors, such as ``serving_default_x:0``, and most have signatures that call them ``x``. A
configuration may use either; without one, a signature is used.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.backends import machine
from nerite.backends.arrays.backend import ArrayBackend, ArrayModel
from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.arrays.graph import GraphTensor, ModelGraph
from nerite.backends.arrays.instance import Compute
from nerite.backends.configuration import (
    TensorPort,
    accelerators,
    instance_cores,
    integer_parameter,
    model_file,
    thread_count,
)
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unsupported
from nerite.core.tensor import Array

_log = logging.getLogger("nerite.backends.litert")


class InterpreterPlan(NamedTuple):
    """Everything that determines an interpreter."""

    path: Path
    threads: int


def interpreter_threads(context: ModelContext, instance: InstanceContext) -> int:
    """Return the number of threads for an instance. Raises ``InvalidArgument`` for an invalid value."""
    threads = thread_count(context, "tflite_num_threads")
    for accelerator in (*accelerators(context, "cpu"), *accelerators(context, "gpu")):
        if accelerator["name"] == "xnnpack":
            # XNNPACK is always used: only its number of threads can be configured.
            threads = integer_parameter(accelerator.get("parameters", {}).get("num_threads", "0")) or threads
        elif accelerator["name"] == "armnn":
            _log.warning("'%s' asks for the accelerator 'armnn'; XNNPACK is used in its place", context.name)
        else:
            raise InvalidArgument(f"unknown Execution Accelerator '{accelerator['name']}' is requested")
    if threads < 0:
        raise InvalidArgument(
            f"parameter 'tflite_num_threads' must be non-negative number for tflite model '{context.name}'"
        )
    return threads or instance_cores(context, instance)


# Opening a model.

_GREETING: Final = re.compile(rb"INFO: Created TensorFlow Lite XNNPACK delegate")
_greeted: Final = threading.Event()
"""Set once LiteRT has written its greeting, with the first model that XNNPACK can accelerate."""
_FLEX: Final = "Select TensorFlow op"
_DAMAGED: Final = "not a valid Flatbuffer"
_MAGIC: Final = b"TFL3"
"""Bytes 4 to 8 of every model."""


@cache
def _interpreter_class() -> Any:
    with machine.importing("ai_edge_litert", "litert"):
        from ai_edge_litert.interpreter import Interpreter
    return Interpreter


def _open(plan: InterpreterPlan) -> Any:
    interpreter = _interpreter_class()(model_path=str(plan.path), num_threads=plan.threads)
    interpreter.allocate_tensors()
    return interpreter


def _load_error(error: Exception, path: Path) -> NeriteError:
    text = str(error).rstrip(".")
    if _FLEX in text:
        return Unsupported(
            f"unable to load '{path}': {text}. It was converted with SELECT_TF_OPS, and LiteRT does not have "
            "TensorFlow's operators. Convert it without them, or serve the SavedModel with the backend tensorflow"
        )
    remedy = ". The file is cut off or damaged: copy it again" if _DAMAGED in text else ""
    return Internal(f"unable to load '{path}': {text}{remedy}")


# Inputs and outputs of a model, and their names.

Details = Mapping[str, Any]
"""LiteRT's description of a tensor."""


class Tensors(NamedTuple):
    """Inputs and outputs of a model by name, as LiteRT describes them."""

    inputs: Mapping[str, Details]
    outputs: Mapping[str, Details]
    runner: Any = None
    """Runs a signature that is not the model's main graph; None for the main graph."""


def tensors_of_interpreter(interpreter: Any, context: ModelContext) -> Tensors:
    """Return the tensors of the configured signature, or of the only one, under the names of the configuration.

    Raises ``InvalidArgument`` for a signature that the model does not have.
    """
    main = Tensors(_by_name(interpreter.get_input_details()), _by_name(interpreter.get_output_details()))
    names = sorted(interpreter.get_signature_list())
    signature = context.parameter("SIGNATURE")
    if not signature:
        declared = {entry["name"] for side in ("input", "output") for entry in context.config.get(side, ())}
        if not names or declared & {*main.inputs, *main.outputs}:
            return main
        signature = "serving_default" if "serving_default" in names else names[0] if len(names) == 1 else ""
    if signature not in names:
        wanted = f"expected '{signature}' signature" if signature else "it has several signatures"
        raise InvalidArgument(
            f"unable to load model '{context.name}', {wanted}. The signatures there are: {', '.join(names) or 'none'}. "
            "Set parameter SIGNATURE to one"
        )
    runner = interpreter.get_signature_runner(signature)
    inputs, outputs = runner.get_input_details(), runner.get_output_details()
    is_main = _identities(inputs) == _identities(main.inputs) and _identities(outputs) == _identities(main.outputs)
    return Tensors(dict(sorted(inputs.items())), dict(sorted(outputs.items())), None if is_main else runner)


def with_free_batch(graph: ModelGraph, interpreter: Any, tensors: Tensors, rows: int) -> ModelGraph:
    """Return a graph with a free batch dimension, if the model was converted for one row and can be resized.

    Many models are converted with a batch of one for no reason. Others need it: their graph is returned unchanged.
    """
    sides = (graph.inputs, graph.outputs)
    if tensors.runner is not None or any(tensor.dims[:1] != (1,) for side in sides for tensor in side.values()):
        return graph
    try:
        _resize(interpreter, {tensor["index"]: [rows, *tensor["shape"][1:]] for tensor in tensors.inputs.values()})
        shapes = [interpreter.get_tensor(tensor["index"]).shape for tensor in tensors.outputs.values()]
    except (RuntimeError, ValueError):
        shapes = []
    _resize(interpreter, {tensor["index"]: tensor["shape"] for tensor in tensors.inputs.values()})
    if not shapes or any(shape[0] != rows for shape in shapes):
        return graph
    inputs, outputs = (
        {name: tensor._replace(dims=(-1, *tensor.dims[1:])) for name, tensor in side.items()} for side in sides
    )
    return ModelGraph(inputs, outputs, {})


def _resize(interpreter: Any, shapes: Mapping[int, Sequence[int]]) -> None:
    for index, shape in shapes.items():
        interpreter.resize_tensor_input(index, shape)
    interpreter.allocate_tensors()


def quantisation(tensors: Tensors) -> list[str]:
    """Return a sentence for each quantised tensor that says what its integers mean."""
    sentences = []
    for name, details in (*tensors.inputs.items(), *tensors.outputs.items()):
        scale, zero_point = details["quantization"]
        if scale:
            sign = "+" if zero_point < 0 else "-"
            sentences.append(f"'{name}' means {scale:.6g} * ({_type_name(details)} {sign} {abs(zero_point)})")
    return sentences


def _by_name(details: Iterable[Details]) -> dict[str, Details]:
    return dict(sorted({str(tensor["name"]): tensor for tensor in details}.items()))


def _identities(tensors: Mapping[str, Details]) -> list[tuple[int, str]]:
    return sorted((int(tensor["index"]), str(tensor["name"])) for tensor in tensors.values())


def _type_name(details: Details) -> str:
    return str(np.dtype(details["dtype"]).name)


def _graph_tensors(tensors: Mapping[str, Details]) -> dict[str, GraphTensor]:
    found = {}
    for name, details in tensors.items():
        datatype = dtypes.from_numpy(np.dtype(details["dtype"]))
        if datatype is None:
            raise Unsupported(
                f"tensor '{name}' is of {_type_name(details)}, and the protocol has no data type for its elements"
            )
        # A model without free dimensions may have an empty signature.
        sizes = details["shape_signature"] if len(details["shape_signature"]) else details["shape"]
        found[name] = GraphTensor(name, datatype, tuple(int(size) for size in sizes))
    return found


class _MainGraph:
    """Runs the main graph. Allocates tensors only if a batch has other shapes than the one before."""

    def __init__(self, interpreter: Any, tensors: Tensors) -> None:
        self._interpreter = interpreter
        self._inputs = {name: int(tensor["index"]) for name, tensor in tensors.inputs.items()}
        self._outputs = {name: int(tensor["index"]) for name, tensor in tensors.outputs.items()}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __call__(self, selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        interpreter = self._interpreter
        shapes = {name: array.shape for name, array in inputs.items()}
        if shapes != self._shapes:
            self._shapes = {}
            _resize(interpreter, {self._inputs[name]: shape for name, shape in shapes.items()})
            self._shapes = shapes
        for name, array in inputs.items():
            interpreter.set_tensor(self._inputs[name], array)
        # The state of a recurrent layer must not affect the next request.
        interpreter.reset_all_variables()
        interpreter.invoke()
        return [interpreter.get_tensor(self._outputs[name]) for name in selection.names]


class LiteRtModel(ArrayModel[InterpreterPlan]):
    """Open model. Each instance has its own interpreter."""

    def key(self, instance: InstanceContext) -> InterpreterPlan:
        """Return the plan for an instance. Raises ``NeriteError``."""
        path = model_file(self.context, "model.tflite")
        return InterpreterPlan(path, interpreter_threads(self.context, instance))

    def load(self, key: InterpreterPlan) -> Any:
        """Return an ``Interpreter`` that is ready to run. Raises ``NeriteError`` with what is wrong with the model."""
        _interpreter_class()
        with key.path.open("rb") as file:
            if file.read(8)[4:] != _MAGIC:
                raise InvalidArgument(
                    f"'{key.path}' is not a model for LiteRT: it has {key.path.stat().st_size} bytes. Was it copied "
                    "whole, and made by a TFLiteConverter?"
                )
        with machine.translating(lambda error: _load_error(error, key.path)):
            if _greeted.is_set():
                return _open(key)
            with machine.capture_stderr(_GREETING, _log) as greeting:
                interpreter = _open(key)
        if greeting:
            _greeted.set()
        return interpreter

    def graph(self, copy: Any) -> ModelGraph:
        """Return the inputs and outputs of the signature, with a free batch dimension if the model can have one."""
        tensors = tensors_of_interpreter(copy, self.context)
        graph = ModelGraph(_graph_tensors(tensors.inputs), _graph_tensors(tensors.outputs), {})
        rows = int(self.context.config.get("max_batch_size", 0))
        return with_free_batch(graph, copy, tensors, rows) if rows else graph

    def ports(self, copy: Any) -> tuple[Sequence[TensorPort], Sequence[TensorPort]]:
        """Return the declared inputs and outputs, and log what the integers of quantised tensors mean."""
        for sentence in quantisation(tensors_of_interpreter(copy, self.context)):
            _log.info("'%s' is quantised: %s", self.context.name, sentence)
        return super().ports(copy)

    def computation(self, copy: Any, instance: InstanceContext) -> Compute:
        """Return the function that runs an interpreter: its main graph, or the runner of another signature."""
        if instance.kind == "GPU":
            raise InvalidArgument(
                f"instance '{instance.name}' is for a GPU, and LiteRT runs on the CPU here: write kind: KIND_CPU"
            )
        tensors = tensors_of_interpreter(copy, self.context)
        if tensors.runner is None:
            return _MainGraph(copy, tensors)

        def compute(selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
            arrays = tensors.runner(**inputs)
            return [arrays[name] for name in selection.names]

        return compute

    def failure(self, error: Exception) -> NeriteError:
        """Translate an exception from LiteRT."""
        return Internal(f"LiteRT error: {error}")


class LiteRtBackend(ArrayBackend):
    """Backend for TensorFlow Lite models on LiteRT."""

    name = "litert"
    model = LiteRtModel
