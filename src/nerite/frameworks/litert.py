"""The backend: completes configurations, opens models, makes their instances."""

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
from nerite.backends.arrays.calls import OutputSelection, strings_as_bytes
from nerite.backends.arrays.graph import GraphTensor, ModelGraph, complete_from_graph, needs_completion
from nerite.backends.arrays.instance import ArrayInstance, Compute, of_graph
from nerite.backends.configuration import instance_count, integer_parameter, thread_count
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.machine import core_share
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotInstalled, Unavailable, Unsupported
from nerite.core.tensor import Array

# How an interpreter has to be made, worked out from the configuration. Pure, but for a look at the model file.

_log = logging.getLogger("nerite.backends.litert")


class InterpreterPlan(NamedTuple):
    """All that the interpreter of an instance depends on."""

    path: Path
    threads: int


def make(context: ModelContext, instance: InstanceContext) -> InterpreterPlan:
    """Return the plan for an instance of a model.

    Raises ``Unavailable`` if the model file is missing and ``InvalidArgument`` for a value that makes no sense.
    """
    if instance.kind == "GPU":
        raise InvalidArgument(
            f"instance '{instance.name}' is for a GPU, and LiteRT runs on the CPU here: write kind: KIND_CPU"
        )
    path = context.version_directory / (context.config.get("default_model_filename") or "model.tflite")
    if not path.is_file():
        raise Unavailable(f"unable to find '{path}' for model instance '{context.name}'")
    return InterpreterPlan(path, _threads(context) or core_share(instance))


def first_instance(context: ModelContext) -> InstanceContext:
    """Return what the first instance of a model will be like, before there is one."""
    return InstanceContext(context.name, sharing=instance_count(context.config))


def _threads(context: ModelContext) -> int:
    threads = thread_count(context, "tflite_num_threads")
    accelerators = context.config.get("optimization", {}).get("execution_accelerators", {})
    for accelerator in (
        *accelerators.get("cpu_execution_accelerator", ()),
        *accelerators.get("gpu_execution_accelerator", ()),
    ):
        if accelerator["name"] == "xnnpack":
            # It is always there; what remains is how wide it is.
            threads = integer_parameter(accelerator.get("parameters", {}).get("num_threads", "0")) or threads
        elif accelerator["name"] == "armnn":
            _log.warning("'%s' asks for the accelerator 'armnn'; XNNPACK is used in its place", context.name)
        else:
            raise InvalidArgument(f"unknown Execution Accelerator '{accelerator['name']}' is requested")
    if threads < 0:
        raise InvalidArgument(
            f"parameter 'tflite_num_threads' must be non-negative number for tflite model '{context.name}'"
        )
    return threads


# Interpreters of LiteRT: the import of the framework, the opening of a model, the meaning of its errors.


_GREETING: Final = re.compile(rb"INFO: Created TensorFlow Lite XNNPACK delegate")
_greeted: Final = threading.Event()
"""LiteRT says this once, with the first model that XNNPACK can do something for."""
_FLEX: Final = "Select TensorFlow op"
_DAMAGED: Final = "not a valid Flatbuffer"
_MARK: Final = b"TFL3"
"""The bytes 4 to 8 of every model."""


def open_interpreter(plan: InterpreterPlan) -> Any:
    """Return an ``Interpreter`` that is ready to run. Raises ``NeriteError`` with what is wrong with the model."""
    make = _interpreter()
    with plan.path.open("rb") as file:
        if file.read(8)[4:] != _MARK:
            raise InvalidArgument(f"'{plan.path}' is not a model for LiteRT: {_what_it_may_be(plan.path)}")
    try:
        if _greeted.is_set():
            return _opened(make, plan)
        with machine.capture_stderr(_GREETING, _log) as greeting:
            interpreter = _opened(make, plan)
    except Exception as error:  # Whatever the framework raises says why the model cannot be opened.
        raise _refused(error, plan.path) from error
    if greeting:
        _greeted.set()
    return interpreter


def _opened(make: Any, plan: InterpreterPlan) -> Any:
    interpreter = make(model_path=str(plan.path), num_threads=plan.threads)
    interpreter.allocate_tensors()
    return interpreter


def translated(error: Exception) -> NeriteError:
    """Return what a client and the log are told of an exception from LiteRT."""
    return error if isinstance(error, NeriteError) else Internal(f"LiteRT error: {error}")


@cache
def _interpreter() -> Any:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError as error:
        raise NotInstalled(f"unable to import ai_edge_litert ({error}): pip install 'nerite[litert]'") from error
    return Interpreter


def _what_it_may_be(path: Path) -> str:
    size = path.stat().st_size
    return f"it has {size} bytes. Was it copied whole, and made by a TFLiteConverter?"


def _refused(error: Exception, path: Path) -> NeriteError:
    text = str(error).rstrip(".")
    if _FLEX in text:
        return Unsupported(
            f"unable to load '{path}': {text}. It was converted with SELECT_TF_OPS, and LiteRT does not have "
            "TensorFlow's operators. Convert it without them, or serve the SavedModel with the backend tensorflow"
        )
    remedy = ". The file is cut off or damaged: copy it again" if _DAMAGED in text else ""
    return Internal(f"unable to load '{path}': {text}{remedy}")


# What a model takes and gives, and under which names.
#
# A model has names for its tensors, such as ``serving_default_x:0``, and most have signatures that call them ``x``.
# We go by a signature; where a configuration has the names of tensors, we go by those.

_PARAMETER: Final = "SIGNATURE"

Details = Mapping[str, Any]
"""LiteRT's description of a tensor."""


class Tensors(NamedTuple):
    """The inputs and outputs of a model, by name, as LiteRT describes them."""

    inputs: Mapping[str, Details]
    outputs: Mapping[str, Details]
    runner: Any = None
    """Of a signature that is not that of the model's main graph."""


def tensors_of_interpreter(interpreter: Any, model: str, config: Mapping[str, Any], signature: str) -> Tensors:
    """Return the tensors of a signature, or of the one that there is, under the names that ``config`` uses.

    Raises ``InvalidArgument`` for a signature that the model does not have.
    """
    main = Tensors(_by_name(interpreter.get_input_details()), _by_name(interpreter.get_output_details()))
    names = sorted(interpreter.get_signature_list())
    if not signature:
        declared = {entry["name"] for side in ("input", "output") for entry in config.get(side, ())}
        if not names or declared & {*main.inputs, *main.outputs}:
            return main
        signature = "serving_default" if "serving_default" in names else names[0] if len(names) == 1 else ""
    if signature not in names:
        wanted = f"expected '{signature}' signature" if signature else "it has several signatures"
        raise InvalidArgument(
            f"unable to load model '{model}', {wanted}. The signatures there are: {', '.join(names) or 'none'}. Set "
            f"parameter {_PARAMETER} to one"
        )
    runner = interpreter.get_signature_runner(signature)
    inputs, outputs = runner.get_input_details(), runner.get_output_details()
    is_main = _same(inputs, main.inputs) and _same(outputs, main.outputs)
    return Tensors(_sorted(inputs), _sorted(outputs), None if is_main else runner)


def graph_of(tensors: Tensors) -> ModelGraph:
    """Return what a model says of itself. Raises ``Unsupported`` for a tensor that the protocol cannot carry."""
    return ModelGraph(_graph_tensors(tensors.inputs), _graph_tensors(tensors.outputs), {})


def with_rows(graph: ModelGraph, interpreter: Any, tensors: Tensors, rows: int) -> ModelGraph:
    """Return a graph whose batch dimension is free, for a model that was made for one row and can be resized.

    Many are converted with a batch of one and know no reason why. Others do: they are returned as they are. The
    interpreter is left with tensors for ``rows``.
    """
    sides = (graph.inputs, graph.outputs)
    if tensors.runner is not None or any(tensor.dims[:1] != (1,) for side in sides for tensor in side.values()):
        return graph
    try:
        for tensor in tensors.inputs.values():
            interpreter.resize_tensor_input(tensor["index"], [rows, *tensor["shape"][1:]])
        interpreter.allocate_tensors()
        given = [interpreter.get_tensor(tensor["index"]).shape for tensor in tensors.outputs.values()]
    except (RuntimeError, ValueError):
        given = []
    if not given or any(shape[0] != rows for shape in given):
        return graph
    inputs, outputs = (
        {name: tensor._replace(dims=(-1, *tensor.dims[1:])) for name, tensor in side.items()} for side in sides
    )
    return ModelGraph(inputs, outputs, {})


def quantisation(tensors: Tensors) -> list[str]:
    """Return, in words, what the integers of quantised tensors mean."""
    said = []
    for name, details in (*tensors.inputs.items(), *tensors.outputs.items()):
        scale, zero_point = details["quantization"]
        if scale:
            sign = "+" if zero_point < 0 else "-"
            said.append(f"'{name}' means {scale:.6g} * ({_type_name(details)} {sign} {abs(zero_point)})")
    return said


def _by_name(details: Iterable[Details]) -> dict[str, Details]:
    return _sorted({str(tensor["name"]): tensor for tensor in details})


def _sorted(tensors: Mapping[str, Details]) -> dict[str, Details]:
    return dict(sorted(tensors.items()))


def _same(some: Mapping[str, Details], others: Mapping[str, Details]) -> bool:
    def places(tensors: Mapping[str, Details]) -> list[tuple[int, str]]:
        return sorted((int(tensor["index"]), str(tensor["name"])) for tensor in tensors.values())

    return places(some) == places(others)


def _graph_tensors(tensors: Mapping[str, Details]) -> dict[str, GraphTensor]:
    found = {}
    for name, details in tensors.items():
        datatype = dtypes.from_numpy(np.dtype(details["dtype"]))
        if datatype is None:
            raise Unsupported(
                f"tensor '{name}' is of {_type_name(details)}, and the protocol has no data type for its elements"
            )
        found[name] = GraphTensor(name, datatype, _dims(details["shape_signature"], details["shape"]))
    return found


def _type_name(details: Details) -> str:
    return str(np.dtype(details["dtype"]).name)


def _dims(signature: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    # A model without free dimensions may have an empty signature.
    return tuple(int(size) for size in (signature if len(signature) else shape))


# Running an interpreter.


def runner_of_interpreter(interpreter: Any, tensors: Tensors) -> Compute:
    """Return the computation of an interpreter."""
    return _Main(interpreter, tensors) if tensors.runner is None else _Other(tensors.runner)


class _Main:
    """Runs the main graph. Its tensors are made anew only where a batch has other shapes than the one before."""

    def __init__(self, interpreter: Any, tensors: Tensors) -> None:
        self._interpreter = interpreter
        self._inputs = {name: int(tensor["index"]) for name, tensor in tensors.inputs.items()}
        self._outputs = {name: int(tensor["index"]) for name, tensor in tensors.outputs.items()}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __call__(self, selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        interpreter = self._interpreter
        try:
            shapes = {name: array.shape for name, array in inputs.items()}
            if shapes != self._shapes:
                self._shapes = {}
                for name, shape in shapes.items():
                    interpreter.resize_tensor_input(self._inputs[name], shape)
                interpreter.allocate_tensors()
                self._shapes = shapes
            for name, array in inputs.items():
                interpreter.set_tensor(self._inputs[name], array)
            # What a recurrent layer remembers is not for the next request.
            interpreter.reset_all_variables()
            interpreter.invoke()
            return [interpreter.get_tensor(self._outputs[name]) for name in selection.names]
        except Exception as error:  # Whatever the framework raises says why it cannot compute this batch.
            raise translated(error) from error


class _Other:
    """Runs a signature whose graph is not the main one, for which there is this way alone."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __call__(self, selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        try:
            arrays = self._runner(**inputs)
        except Exception as error:  # As above.
            raise translated(error) from error
        return [arrays[name] for name in selection.names]


class LiteRtBackend:
    """TensorFlow Lite models, on LiteRT."""

    name = "litert"
    isolated = False

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, inputs and outputs from the model.

        Raises ``NeriteError``.
        """
        if not needs_completion(context):
            return context.config
        interpreter = open_interpreter(make(context, first_instance(context)))
        return complete_from_graph(context, _graph(context, interpreter, _tensors(context, interpreter)))

    def open(self, context: ModelContext) -> LiteRtModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return LiteRtModel(context)


class LiteRtModel:
    """An open model. Each instance has an interpreter of its own, the first the one that the model was read with."""

    def __init__(self, context: ModelContext) -> None:
        wanted = make(context, first_instance(context))
        interpreter = open_interpreter(wanted)
        found = _tensors(context, interpreter)
        self._context = context
        self._face = of_graph(context, _graph(context, interpreter, found), strings_as_bytes)
        self._lock = threading.Lock()
        self._spare: dict[InterpreterPlan, Any] = {wanted: interpreter}
        for line in quantisation(found):
            _log.info("'%s' is quantised: %s", context.name, line)

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Make an instance with an interpreter of its own. Raises ``NeriteError``."""
        wanted = make(self._context, context)
        with self._lock:
            interpreter = self._spare.pop(wanted, None)
            # One for other cores or threads is nobody's, and holds a copy of the weights.
            self._spare.clear()
        if interpreter is None:
            interpreter = open_interpreter(wanted)
        return self._face.instance(runner_of_interpreter(interpreter, _tensors(self._context, interpreter)))

    def close(self) -> None:
        """Let go of an interpreter that no instance wanted."""
        self._spare.clear()


def _tensors(context: ModelContext, interpreter: Any) -> Tensors:
    return tensors_of_interpreter(interpreter, context.name, context.config, context.parameter("SIGNATURE"))


def _graph(context: ModelContext, interpreter: Any, found: Tensors) -> ModelGraph:
    graph = graph_of(found)
    rows = int(context.config.get("max_batch_size", 0))
    return with_rows(graph, interpreter, found, rows) if rows else graph
