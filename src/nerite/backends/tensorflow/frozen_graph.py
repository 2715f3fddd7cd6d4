"""Frozen graphs (GraphDef): what they take and give, as far as TensorFlow can tell.

Such a file names no inputs and outputs. Inputs are its placeholders; outputs are what the configuration asks for, under
the name of an operation (``probabilities``) or of one of its tensors (``probabilities:1``). Where nothing is
configured, they are the tensors that nothing else in the graph takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from nerite.backends.arrays.graph import Graph
from nerite.backends.configuration import all_inputs, all_outputs
from nerite.backends.tensorflow.signature import Described, Signature, tensors
from nerite.core.errors import InvalidArgument

_PLACEHOLDER: Final = "Placeholder"
_WITH_DEFAULT: Final = "PlaceholderWithDefault"
_NO_OUTPUT: Final = frozenset({"Assert", "Const", "NoOp", _PLACEHOLDER})


def read_graph(framework: Any, model: str, path: Path, *, placed: bool) -> Any:
    """Return the ``tf.Graph`` in a file. ``placed``: its devices count. Raises ``NeriteError`` if there is none."""
    from google.protobuf.message import DecodeError

    v1 = framework.compat.v1
    definition = v1.GraphDef()
    remedy = "It has to be a frozen graph: a binary GraphDef with its variables made constants"
    if not path.is_file():
        raise InvalidArgument(f"unable to load model '{model}', '{path}' is a directory. {remedy}")
    try:
        definition.ParseFromString(path.read_bytes())
    except DecodeError:
        raise InvalidArgument(
            f"unable to load model '{model}', '{path}' cannot be read as a GraphDef, or was copied in part. {remedy}"
        ) from None
    if not definition.node:
        raise InvalidArgument(f"model {model} has an empty network. {remedy}")
    if not placed:
        for node in definition.node:
            node.device = ""
    graph = framework.Graph()
    with graph.as_default():
        try:
            v1.import_graph_def(definition, name="")
        except ValueError as error:
            raise InvalidArgument(f"unable to load model '{model}', '{path}': {error}") from error
    return graph


def signature_of(graph: Any, model: str, config: Mapping[str, Any]) -> Signature:
    """Return what a graph takes and gives, seen through a configuration. Raises ``NeriteError``."""
    placeholders = {op.name: op.outputs[0] for op in graph.get_operations() if op.type == _PLACEHOLDER}
    defaulted = {op.name: op.outputs[0] for op in graph.get_operations() if op.type == _WITH_DEFAULT}
    asked = [entry["name"] for entry in all_outputs(config)]
    outputs = {name: found for name in asked if (found := _tensor(graph, name)) is not None}
    if not asked:
        outputs = _loose_ends(graph)
    told = {entry["name"] for entry in all_inputs(config)}
    needed = _ancestors(outputs.values())
    inputs = {name: tensor for name, tensor in placeholders.items() if name in told or tensor.op in needed}
    optional = {name: tensor for name, tensor in defaulted.items() if name in told}
    described = [
        tensors(model, {name: _described(tensor) for name, tensor in side.items()}, config, key)
        for side, key in ((inputs, "input"), (outputs, "output"), (optional, "input"))
    ]
    return Signature(
        Graph(*described),
        {name: tensor.name for name, tensor in (*inputs.items(), *optional.items())},
        {name: tensor.name for name, tensor in outputs.items()},
    )


def _tensor(graph: Any, name: str) -> Any:
    try:
        return graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
    except (KeyError, ValueError):
        return None


def _loose_ends(graph: Any) -> dict[str, Any]:
    found = {}
    for operation in graph.get_operations():
        for index, tensor in enumerate(operation.outputs):
            if operation.type not in _NO_OUTPUT and not tensor.consumers():
                found[tensor.name if index else operation.name] = tensor
    return found


def _ancestors(of: Iterable[Any]) -> set[Any]:
    """Return the operations that these tensors are made by, and what those take, and so on."""
    seen: set[Any] = set()
    ahead = [tensor.op for tensor in of]
    while ahead:
        operation = ahead.pop()
        if operation not in seen:
            seen.add(operation)
            ahead += [tensor.op for tensor in operation.inputs]
            ahead += operation.control_inputs
    return seen


def _described(tensor: Any) -> Described:
    shape = tensor.shape
    dims = None if shape.rank is None else tuple(-1 if size is None else int(size) for size in shape)
    return Described(tensor.name, tensor.dtype.base_dtype.name, dims)
