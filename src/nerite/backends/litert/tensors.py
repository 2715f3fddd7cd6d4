"""What a model takes and gives, and under which names.

A model has names for its tensors, such as ``serving_default_x:0``, and most have signatures that call them ``x``. We go
by a signature; where a configuration has the names of tensors, we go by those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from nerite.backends.arrays.graph import Graph, GraphTensor
from nerite.core import dtype as dtypes
from nerite.core.errors import InvalidArgument, Unsupported

_PARAMETER: Final = "SIGNATURE"

Details = Mapping[str, Any]
"""LiteRT's description of a tensor."""


class Tensors(NamedTuple):
    """The inputs and outputs of a model, by name, as LiteRT describes them."""

    inputs: Mapping[str, Details]
    outputs: Mapping[str, Details]
    runner: Any = None
    """Of a signature that is not that of the model's main graph."""


def of_interpreter(interpreter: Any, model: str, config: Mapping[str, Any], signature: str) -> Tensors:
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


def graph_of(tensors: Tensors) -> Graph:
    """Return what a model says of itself. Raises ``Unsupported`` for a tensor that the protocol cannot carry."""
    return Graph(_graph_tensors(tensors.inputs), _graph_tensors(tensors.outputs), {})


def with_rows(graph: Graph, interpreter: Any, tensors: Tensors, rows: int) -> Graph:
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
    return Graph(inputs, outputs, {})


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
