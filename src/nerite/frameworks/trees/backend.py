"""The backend of tree models: completes configurations, opens models, creates their instances.

A model has one input, rows of features, and one output, the prediction, whatever its name. The further output
``treeshap_output`` is the contribution of each feature to the prediction.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.backends.arrays import graph
from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.arrays.graph import GraphTensor, ModelGraph
from nerite.backends.arrays.instance import ArrayInstance, ModelInterface
from nerite.backends.configuration import TensorPort, all_inputs, all_outputs, batching
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.machine import core_share
from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.core.signature import shape_text
from nerite.core.tensor import Array
from nerite.frameworks.trees.engines import Explainer, ForestEngine, NvforestEngine, explainer, open_engine
from nerite.frameworks.trees.forest import Forest, ForestDescription, Task, find_forest
from nerite.frameworks.trees.native import NativeError
from nerite.frameworks.trees.parameters import Parameters, read_parameters

INPUT: Final = "input__0"
OUTPUT: Final = "output__0"
SHAP: Final = "treeshap_output"

_REAL: Final = (dtypes.FP32, dtypes.FP64, dtypes.FP16)
_NUMBERS: Final = tuple(dtype for dtype in dtypes.ALL if dtype not in (dtypes.BYTES, dtypes.BF16))


class ForestPorts(NamedTuple):
    """Declared input and outputs of a model."""

    taken: TensorPort
    given: tuple[TensorPort, ...]
    both_classes: bool
    """The prediction is the probabilities of two classes, of which the engine computes the second."""


def agreed(name: str, config: Mapping[str, Any], forest: ForestDescription, parameters: Parameters) -> ForestPorts:
    """Return the tensors of a complete configuration.

    Raises ``InvalidArgument`` if they are not those of the model, with what to write instead.
    """
    head = f"unable to load model '{name}'"
    batched = batching(config)
    inputs = all_inputs(config)
    if len(inputs) != 1:
        names = ", ".join(entry["name"] for entry in inputs)
        raise InvalidArgument(f"{head}, configuration expects {len(inputs)} inputs ({names}), tree models have one")
    if parameters.classes and forest.targets > 1:
        raise InvalidArgument(
            f"{head}, it predicts {forest.targets} values at once, but classes are predicted only for one. Leave out "
            "parameter 'is_classifier'"
        )
    taken = _port(inputs[0], batched)
    _check(head, taken, _NUMBERS, forest.features, f"it has {forest.features} features")
    outputs = [_port(entry, batched) for entry in all_outputs(config)]
    predictions = [port for port in outputs if port.name != SHAP]
    if len(predictions) != 1:
        names = ", ".join(port.name for port in outputs)
        raise InvalidArgument(f"{head}, its outputs are a prediction and, if wanted, '{SHAP}', and not: {names}")
    prediction = predictions[0]
    both = False
    if parameters.classes:
        why = "with 'is_classifier' and without 'predict_proba' it gives the number of a class"
        _check(head, prediction, _NUMBERS, 1, why)
    else:
        # One number for a row can be the probability of the second of two classes.
        two_classes = forest.width == 1 and (forest.task is Task.BINARY or bool(parameters.is_classifier))
        both = two_classes and _row(prediction) == 2
        why = f"it gives {forest.width} {'number' if forest.width == 1 else 'numbers'} for a row"
        if forest.classes > 1:
            why = f"it gives the probabilities of {forest.classes} classes"
            why += " (parameter 'is_classifier': 'true' for a class)"
        _check(head, prediction, _REAL, 2 if both else forest.width, why)
    for port in outputs:
        if port.name == SHAP:
            why = f"there are {forest.features} features and a bias for each number predicted"
            _check(head, port, _REAL, forest.width * (forest.features + 1), why)
    return ForestPorts(taken, tuple(outputs), both)


def _port(entry: Mapping[str, Any], batching: bool) -> TensorPort:
    dims = tuple(int(dim) for dim in entry["dims"])
    return TensorPort(entry["name"], dtypes.BY_CONFIG_NAME[entry["data_type"]], dims, dims, batching)


def _row(port: TensorPort) -> int:
    """Return the number of elements of a row; -1 if it is not fixed."""
    own = port.dims if port.batching else port.dims[-1:]
    return -1 if -1 in own else prod(own)


def _check(head: str, port: TensorPort, allowed: Sequence[dtypes.DataType], width: int, why: str) -> None:
    """Raise ``InvalidArgument`` if a tensor does not have an allowed type, or rows of ``width`` numbers."""
    if port.datatype not in allowed:
        names = ", ".join(dtype.config_name for dtype in allowed)
        raise InvalidArgument(f"{head}, tensor '{port.name}' is of {port.datatype.config_name}, and may be of: {names}")
    found = _row(port)
    free = port.dims.count(-1)
    if found != width and not (found == -1 and free <= (1 if port.batching else 2)):
        raise InvalidArgument(
            f"{head}, tensor '{port.name}' has dims {shape_text(port.dims)}, but {why}. Set dims: "
            f"{[width] if port.batching else [-1, width]}"
        )


class ForestComputation:
    """Computes the outputs of one model with an engine. Results are in memory of their own."""

    def __init__(self, engine: ForestEngine, ports: ForestPorts, parameters: Parameters, features: int) -> None:
        self.engine = engine
        self._ports = ports
        self._parameters = parameters
        self._features = features

    def __call__(self, selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Return the outputs of a selection, in its order. Raises ``NeriteError``."""
        rows = self._rows(inputs[self._ports.taken.name])
        try:
            return [self._output(port, rows) for port in selection.ports]
        except NativeError as error:
            raise Internal(f"{self.engine.name} error: {error}") from error

    def _rows(self, values: Array) -> Array:
        """Return the input as the engine accepts it, without a copy if possible."""
        if values.dtype not in self.engine.takes:
            values = values.astype(self.engine.takes[0])
        elif not values.flags.aligned:
            values = values.copy()
        try:
            rows: Array = values.reshape(-1, self._features)
        except ValueError:
            raise InvalidArgument(
                f"input '{self._ports.taken.name}' has shape {list(values.shape)}; its last dimension has to be the "
                f"number of features, {self._features}"
            ) from None
        return rows

    def _output(self, port: TensorPort, rows: Array) -> Array:
        if not len(rows):
            numbers = np.empty(0)
        elif port.name == SHAP:
            assert isinstance(self.engine, Explainer)  # checked when the instance was created
            numbers = self.engine.contributions(rows)
        else:
            numbers = self._prediction(self.engine.predict(rows))
        numbers = numbers.astype(port.datatype.numpy, copy=False)
        if port.batching:
            width = numbers.size // len(rows)
            return numbers.reshape(len(rows), *(width if dim == -1 else dim for dim in port.dims))
        # Without batching, the declared shape is that of all rows.
        shape = (len(rows), -1) if port.dims.count(-1) > 1 and len(rows) else port.dims
        try:
            return numbers.reshape(shape)
        except ValueError:
            raise InvalidArgument(
                f"output '{port.name}' has dims {list(port.dims)}, which do not hold the {numbers.size} numbers for "
                f"{len(rows)} rows"
            ) from None

    def _prediction(self, numbers: Array) -> Array:
        if self._parameters.classes:
            classes: Array = numbers > self._parameters.threshold if numbers.shape[1] == 1 else numbers.argmax(1)
            return classes
        return np.concatenate((1 - numbers, numbers), 1) if self._ports.both_classes else numbers


class TreesBackend:
    """Forests of decision trees, in place of Triton's FIL backend."""

    name = "fil"
    isolated = False

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, input and output from the model.

        The forest that was read for this is kept in the context for ``open``. Raises ``NeriteError``.
        """
        if not graph.needs_completion(context):
            return context.config
        parameters = read_parameters(context)
        forest = _read(context, parameters)
        context.memo[forest.description.artifact] = forest
        taken = GraphTensor(INPUT, dtypes.FP32, (-1, forest.description.features))
        given = GraphTensor(OUTPUT, dtypes.FP32, (-1, 1 if parameters.classes else forest.description.width))
        return graph.complete_from_graph(context, ModelGraph({INPUT: taken}, {OUTPUT: given}, {}))

    def open(self, context: ModelContext) -> TreesModel:
        """Open a model with a complete configuration. Raises ``NeriteError`` if model and configuration differ."""
        return TreesModel(context)


class TreesModel:
    """An open model. Its instances share one engine for each number of threads that they compute with."""

    def __init__(self, context: ModelContext) -> None:
        self._name = context.name
        self._parameters = read_parameters(context)
        self._unused: Forest | None = _read(context, self._parameters)
        self._forest = self._unused.description
        self._ports = agreed(context.name, context.config, self._forest, self._parameters)
        self._face = ModelInterface(context, [self._ports.taken], self._ports.given)
        self._lock = threading.Lock()
        self.engines: dict[tuple[str, int], ForestEngine] = {}

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Create an instance. Raises ``NeriteError`` if its engine is not installed, or cannot load the model."""
        with self._lock:
            engine = self._engine(context)
        return self._face.instance(ForestComputation(engine, self._ports, self._parameters, self._forest.features))

    def close(self) -> None:
        """Release the engines; each ends with the last instance that uses it."""
        self.engines.clear()
        self._unused = None

    def _engine(self, context: InstanceContext) -> ForestEngine:
        threads = self._parameters.threads or core_share(context)
        key = ("GPU", context.device) if context.kind == "GPU" else ("CPU", threads)
        engine = self.engines.get(key)
        if engine is None:
            self._forest.artifact.check_same(self._name)
            if context.kind == "GPU":
                engine = NvforestEngine(self._name, self._forest, self._parameters, context.device)
            else:
                engine = open_engine(self._name, self._forest, self._parameters.engine, threads, self._read)
            self._check_explains(engine)
            self.engines[key] = engine
            # If another library computes, the trees need not be in memory twice.
            self._unused = None
        return engine

    def _read(self) -> Forest:
        allow = self._parameters.allow_unknown_field
        return self._unused or Forest(self._name, self._forest.artifact, allow_unknown_field=allow)

    def _check_explains(self, engine: ForestEngine) -> None:
        if isinstance(engine, Explainer) or all(port.name != SHAP for port in self._ports.given):
            return
        able = explainer(self._forest)
        remedy = f"{able} does: pip install {able}, and KIND_CPU" if able else "Only XGBoost and LightGBM do, of theirs"
        raise Unsupported(
            f"model '{self._name}' has the output '{SHAP}', and {engine.name} does not explain predictions. {remedy}"
        )


def _read(context: ModelContext, parameters: Parameters) -> Forest:
    found = find_forest(context, parameters.model_type)
    kept: Forest | None = context.memo.pop(found, None)
    return kept or Forest(context.name, found, allow_unknown_field=parameters.allow_unknown_field)
