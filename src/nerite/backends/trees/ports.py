"""The tensors of a model, as it has them and as its configuration does. Pure.

The input is one row of features after another. One output is the prediction, whatever its name; ``treeshap_output`` is
the part that each feature has in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

from nerite.backends.arrays.graph import Graph, GraphTensor
from nerite.backends.configuration import all_inputs, all_outputs, batching
from nerite.backends.ports import Port
from nerite.backends.trees.forest import Description, Task
from nerite.backends.trees.parameters import Parameters
from nerite.core import dtype as dtypes
from nerite.core.errors import InvalidArgument
from nerite.core.signature import show

INPUT: Final = "input__0"
OUTPUT: Final = "output__0"
SHAP: Final = "treeshap_output"

_REAL: Final = (dtypes.FP32, dtypes.FP64, dtypes.FP16)
_NUMBERS: Final = tuple(dtype for dtype in dtypes.ALL if dtype not in (dtypes.BYTES, dtypes.BF16))


class Ports(NamedTuple):
    """What a model takes and gives."""

    taken: Port
    given: tuple[Port, ...]
    both_classes: bool
    """The prediction is the probability of each of two classes, where the model tells of the second."""


def graph(forest: Description, parameters: Parameters) -> Graph:
    """Return the tensors that a model has if its configuration names none."""
    width = 1 if parameters.classes else forest.width
    taken = GraphTensor(INPUT, dtypes.FP32, (-1, forest.features))
    given = GraphTensor(OUTPUT, dtypes.FP32, (-1, width))
    return Graph({INPUT: taken}, {OUTPUT: given}, {})


def agreed(name: str, config: Mapping[str, Any], forest: Description, parameters: Parameters) -> Ports:
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
    return Ports(taken, tuple(outputs), both)


def _port(entry: Mapping[str, Any], batching: bool) -> Port:
    dims = tuple(int(dim) for dim in entry["dims"])
    return Port(entry["name"], dtypes.BY_CONFIG_NAME[entry["data_type"]], dims, dims, batching)


def _two_classes(forest: Description, parameters: Parameters) -> bool:
    """Return whether the one number of a row is the probability of the second of two classes."""
    return forest.width == 1 and (forest.task is Task.BINARY or bool(parameters.is_classifier))


def _row(dims: Sequence[int], batching: bool) -> int:
    """Return how many elements a row has, by dims; -1 for any number."""
    own = dims if batching else dims[-1:]
    return -1 if -1 in own else prod(own)


def _check_type(head: str, port: Port, allowed: Sequence[dtypes.DataType]) -> None:
    if port.datatype not in allowed:
        names = ", ".join(dtype.config_name for dtype in allowed)
        raise InvalidArgument(f"{head}, tensor '{port.name}' is of {port.datatype.config_name}, and may be of: {names}")


def _check_dims(head: str, port: Port, width: int, why: str) -> None:
    found = _row(port.dims, port.batching)
    free = port.dims.count(-1)
    if found == width or (found == -1 and free <= (1 if port.batching else 2)):
        return
    raise InvalidArgument(
        f"{head}, tensor '{port.name}' has dims {show(port.dims)}, but {why}. Set dims: "
        f"{[width] if port.batching else [-1, width]}"
    )


def _why(forest: Description, parameters: Parameters) -> str:
    if parameters.classes:
        return "with 'is_classifier' and without 'predict_proba' it gives the number of a class"
    if forest.classes > 1:
        return f"it gives the probabilities of {forest.classes} classes (parameter 'is_classifier': 'true' for a class)"
    return f"it gives {forest.width} {'number' if forest.width == 1 else 'numbers'} for a row"
