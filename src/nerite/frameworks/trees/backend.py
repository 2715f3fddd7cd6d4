"""The backend: completes configurations, opens models, makes their instances."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.backends.arrays import graph
from nerite.backends.arrays.calls import OutputSelection
from nerite.backends.arrays.graph import GraphTensor, ModelGraph
from nerite.backends.arrays.instance import ArrayInstance, ModelFace
from nerite.backends.configuration import TensorPort, all_inputs, all_outputs, batching
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.backends.machine import core_share
from nerite.core import tensor as dtypes
from nerite.core.errors import InvalidArgument, NotInstalled, Unsupported
from nerite.core.signature import shape_text
from nerite.core.tensor import Array
from nerite.frameworks.trees import engines, onnx_engine, parameters
from nerite.frameworks.trees.engines import GtilEngine, NvforestEngine
from nerite.frameworks.trees.forest import Forest, ForestDescription, Task, find_forest
from nerite.frameworks.trees.native import Explainer, ForestEngine, NativeError
from nerite.frameworks.trees.parameters import Parameters

# The tensors of a model, as it has them and as its configuration does. Pure.
#
# The input is one row of features after another. One output is the prediction, whatever its name; ``treeshap_output``
# is the part that each feature has in it.

INPUT: Final = "input__0"
OUTPUT: Final = "output__0"
SHAP: Final = "treeshap_output"

_REAL: Final = (dtypes.FP32, dtypes.FP64, dtypes.FP16)
_NUMBERS: Final = tuple(dtype for dtype in dtypes.ALL if dtype not in (dtypes.BYTES, dtypes.BF16))


class ForestPorts(NamedTuple):
    """What a model takes and gives."""

    taken: TensorPort
    given: tuple[TensorPort, ...]
    both_classes: bool
    """The prediction is the probability of each of two classes, where the model tells of the second."""


def forest_graph(forest: ForestDescription, parameters: Parameters) -> ModelGraph:
    """Return the tensors that a model has if its configuration names none."""
    width = 1 if parameters.classes else forest.width
    taken = GraphTensor(INPUT, dtypes.FP32, (-1, forest.features))
    given = GraphTensor(OUTPUT, dtypes.FP32, (-1, width))
    return ModelGraph({INPUT: taken}, {OUTPUT: given}, {})


def agreed(name: str, config: Mapping[str, Any], forest: ForestDescription, parameters: Parameters) -> ForestPorts:
    """Return the tensors of a complete configuration.

    Raises ``InvalidArgument`` where they are not what the model takes and gives, with what to write instead.
    """
    head = f"unable to load model '{name}'"
    batched = batching(config)
    inputs = all_inputs(config)
    if len(inputs) != 1:
        names = ", ".join(entry["name"] for entry in inputs)
        raise InvalidArgument(f"{head}, configuration expects {len(inputs)} inputs ({names}), tree models have one")
    if parameters.classes and forest.targets > 1:
        raise InvalidArgument(
            f"{head}, it predicts {forest.targets} things at once, and classes are only told of one. Leave out "
            "parameter 'is_classifier'"
        )
    taken = _port(inputs[0], batched)
    _check_type(head, taken, _NUMBERS)
    _check_dims(head, taken, forest.features, f"it has {forest.features} features")
    outputs = [_port(entry, batched) for entry in all_outputs(config)]
    predictions = [port for port in outputs if port.name != SHAP]
    if len(predictions) != 1:
        names = ", ".join(port.name for port in outputs)
        raise InvalidArgument(f"{head}, its outputs are a prediction and, if wanted, '{SHAP}', and not: {names}")
    prediction = predictions[0]
    both = not parameters.classes and _two_classes(forest, parameters) and _row(prediction.dims, batched) == 2
    width = 1 if parameters.classes else 2 if both else forest.width
    _check_type(head, prediction, _NUMBERS if parameters.classes else _REAL)
    _check_dims(head, prediction, width, _why(forest, parameters))
    for port in outputs:
        if port.name == SHAP:
            _check_type(head, port, _REAL)
            parts = forest.width * (forest.features + 1)
            _check_dims(head, port, parts, f"there are {forest.features} features and a bias for each number predicted")
    return ForestPorts(taken, tuple(outputs), both)


def _port(entry: Mapping[str, Any], batching: bool) -> TensorPort:
    dims = tuple(int(dim) for dim in entry["dims"])
    return TensorPort(entry["name"], dtypes.BY_CONFIG_NAME[entry["data_type"]], dims, dims, batching)


def _two_classes(forest: ForestDescription, parameters: Parameters) -> bool:
    """Return whether the one number of a row is the probability of the second of two classes."""
    return forest.width == 1 and (forest.task is Task.BINARY or bool(parameters.is_classifier))


def _row(dims: Sequence[int], batching: bool) -> int:
    """Return how many elements a row has, by dims; -1 for any number."""
    own = dims if batching else dims[-1:]
    return -1 if -1 in own else prod(own)


def _check_type(head: str, port: TensorPort, allowed: Sequence[dtypes.DataType]) -> None:
    if port.datatype not in allowed:
        names = ", ".join(dtype.config_name for dtype in allowed)
        raise InvalidArgument(f"{head}, tensor '{port.name}' is of {port.datatype.config_name}, and may be of: {names}")


def _check_dims(head: str, port: TensorPort, width: int, why: str) -> None:
    found = _row(port.dims, port.batching)
    free = port.dims.count(-1)
    if found == width or (found == -1 and free <= (1 if port.batching else 2)):
        return
    raise InvalidArgument(
        f"{head}, tensor '{port.name}' has dims {shape_text(port.dims)}, but {why}. Set dims: "
        f"{[width] if port.batching else [-1, width]}"
    )


def _why(forest: ForestDescription, parameters: Parameters) -> str:
    if parameters.classes:
        return "with 'is_classifier' and without 'predict_proba' it gives the number of a class"
    if forest.classes > 1:
        return f"it gives the probabilities of {forest.classes} classes (parameter 'is_classifier': 'true' for a class)"
    return f"it gives {forest.width} {'number' if forest.width == 1 else 'numbers'} for a row"


# From a forest's numbers to what clients asked for.


class ForestComputation:
    """Computes the outputs of one model with an engine. What it returns is in memory of its own."""

    def __init__(self, engine: ForestEngine, ports: ForestPorts, parameters: Parameters, features: int) -> None:
        self._engine = engine
        self._ports = ports
        self._parameters = parameters
        self._features = features

    def __call__(self, selection: OutputSelection, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Return the outputs of a selection, in its order. Raises ``Internal``."""
        rows = self._rows(inputs[self._ports.taken.name])
        return [self._output(port, rows) for port in selection.ports]

    def _rows(self, values: Array) -> Array:
        """Return the input as the engine takes it: itself, where that is possible."""
        if values.dtype not in self._engine.takes:
            values = values.astype(self._engine.takes[0])
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
        if port.name == SHAP:
            assert isinstance(self._engine, Explainer)  # Checked when the instance was made.
            numbers = self._engine.contributions(rows) if len(rows) else np.empty(0)
        else:
            numbers = self._prediction(self._engine.predict(rows)) if len(rows) else np.empty(0)
        numbers = numbers.astype(port.datatype.numpy, copy=False)
        if port.batching:
            width = numbers.size // len(rows)
            inner = tuple(width if dim == -1 else dim for dim in port.dims)
            return numbers.reshape(len(rows), *inner)
        return _shaped(numbers, port.dims, len(rows), port.name)

    def _prediction(self, numbers: Array) -> Array:
        if self._parameters.classes:
            classes: Array = numbers > self._parameters.threshold if numbers.shape[1] == 1 else numbers.argmax(1)
            return classes
        if self._ports.both_classes:
            return np.concatenate((1 - numbers, numbers), 1)
        return numbers


def _shaped(numbers: Array, dims: Sequence[int], rows: int, name: str) -> Array:
    """Give the numbers of all rows the shape that a model without batches declares."""
    try:
        return numbers.reshape(rows, -1) if dims.count(-1) > 1 and rows else numbers.reshape(dims)
    except ValueError:
        raise InvalidArgument(
            f"output '{name}' has dims {list(dims)}, which do not hold the {numbers.size} numbers for {rows} rows"
        ) from None


# Which engine computes a model (``docs/decisions/0006-tree-engines.md`` says why).

_log = logging.getLogger("nerite.frameworks.trees")

Read = Callable[[], Forest]
"""Has treelite read a model, or gives the one that it has read."""


class _Missing(Exception):
    """A library is not installed."""


def _xgboost(forest: ForestDescription, threads: int, read: Read) -> ForestEngine:
    path = engines.xgboost_library()
    if path is None:
        raise _Missing("xgboost")
    return engines.XgboostEngine(path, forest, threads)


def _lightgbm(forest: ForestDescription, threads: int, read: Read) -> ForestEngine:
    path = engines.lightgbm_library()
    if path is None:
        raise _Missing("lightgbm")
    return engines.LightgbmEngine(path, forest, threads)


def _onnxruntime(forest: ForestDescription, threads: int, read: Read) -> ForestEngine:
    if not onnx_engine.installed():
        raise _Missing("onnxruntime")
    return onnx_engine.OnnxruntimeEngine(read(), threads)


def _treelite(forest: ForestDescription, threads: int, read: Read) -> ForestEngine:
    return GtilEngine(read(), threads)


_Opener = Callable[[ForestDescription, int, Read], ForestEngine]
_OPENERS: Final[dict[str, _Opener]] = {
    "xgboost": _xgboost,
    "lightgbm": _lightgbm,
    "onnxruntime": _onnxruntime,
    "treelite": _treelite,
}


def open_engine(name: str, forest: ForestDescription, wanted: str, threads: int, read: Read) -> ForestEngine:
    """Return an engine on the CPU. ``wanted`` is the parameter ``engine``.

    Raises ``NeriteError`` if the wanted one cannot compute this model, or is not installed.
    """
    own = explainer(forest)
    able = [*([own] if own else []), "onnxruntime", "treelite"]
    if wanted not in ("auto", *able):
        raise InvalidArgument(
            f"model '{name}' has 'engine': '{wanted}', but '{forest.artifact.path.name}' is of model_type "
            f"'{forest.artifact.model_type}'. Engines for it are: {', '.join(able)}"
        )
    reasons = []
    for engine in able if wanted == "auto" else [wanted]:
        try:
            opened = _OPENERS[engine](forest, threads, read)
        except _Missing:
            if wanted != "auto":
                raise NotInstalled(
                    f"model '{name}' has 'engine': '{wanted}', which is not installed: pip install {wanted}"
                ) from None
            reasons.append(f"{engine} is not installed")
        except (NativeError, OSError) as error:
            if wanted != "auto":
                raise InvalidArgument(f"unable to load model '{name}' with {wanted}: {error}") from error
            reasons.append(f"{engine} cannot: {error}")
        else:
            if reasons:
                _log.info("model '%s' is computed by %s; %s", name, engine, "; ".join(reasons))
            return opened
    raise AssertionError("treelite computes what it reads")


def explainer(forest: ForestDescription) -> str:
    """Return the name of the library that wrote a model, and explains its predictions, or an empty string."""
    if forest.artifact.of_xgboost:
        return "xgboost"
    return "lightgbm" if forest.artifact.model_type == "lightgbm" else ""


class TreesBackend:
    """Forests of decision trees: the work of Triton's FIL backend."""

    name = "fil"
    isolated = False

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        """Return the configuration with batch size, scheduler, input and output from the model.

        The forest that this takes is left in the context for ``open``. Raises ``NeriteError``.
        """
        if not graph.needs_completion(context):
            return context.config
        wanted = parameters.read(context.name, context.config)
        forest = _read(context, wanted)
        context.memo[forest.description.artifact] = forest
        return graph.complete_from_graph(context, forest_graph(forest.description, wanted))

    def open(self, context: ModelContext) -> TreesModel:
        """Open a model whose configuration is complete. Raises ``NeriteError`` where model and configuration differ."""
        return TreesModel(context)


class TreesModel:
    """An open model. Its instances share one engine for each number of threads that they compute with."""

    def __init__(self, context: ModelContext) -> None:
        self._name = context.name
        self._parameters = parameters.read(context.name, context.config)
        self._unused: Forest | None = _read(context, self._parameters)
        self._forest = self._unused.description
        self._ports = agreed(context.name, context.config, self._forest, self._parameters)
        self._face = ModelFace(context, [self._ports.taken], self._ports.given)
        self._lock = threading.Lock()
        self._engines: dict[tuple[str, int], ForestEngine] = {}

    def instance(self, context: InstanceContext) -> ArrayInstance:
        """Make an instance. Raises ``NeriteError`` where its engine is not installed, or cannot load the model."""
        with self._lock:
            engine = self._engine(context)
        return self._face.instance(ForestComputation(engine, self._ports, self._parameters, self._forest.features))

    def close(self) -> None:
        """Let go of the engines; they end with the last instance that has one."""
        self._engines.clear()
        self._unused = None

    def _engine(self, context: InstanceContext) -> ForestEngine:
        threads = self._parameters.threads or core_share(context)
        key = ("GPU", context.device) if context.kind == "GPU" else ("CPU", threads)
        engine = self._engines.get(key)
        if engine is None:
            self._forest.artifact.check_same(self._name)
            if context.kind == "GPU":
                engine = NvforestEngine(self._name, self._forest, self._parameters, context.device)
            else:
                engine = open_engine(self._name, self._forest, self._parameters.engine, threads, self._read)
            self._check_explains(engine)
            self._engines[key] = engine
            # Where another library computes, the trees need not be in memory twice.
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


def _read(context: ModelContext, wanted: parameters.Parameters) -> Forest:
    found = find_forest(context, wanted.model_type)
    kept: Forest | None = context.memo.pop(found, None)
    return kept or Forest(context.name, found, allow_unknown_field=wanted.allow_unknown_field)
