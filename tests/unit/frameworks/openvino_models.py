"""Small OpenVINO models, opened without a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import opened
from configs import as_backends_get_it
from nerite.backends.interface import ModelContext
from nerite.frameworks.openvino import OpenVinoBackend
from nerite.frameworks.openvino.graph import openvino

ov = openvino()
ops = ov.opset13
# What the processor could do in less precision is left out: results are compared.
EXACT = {"INFERENCE_PRECISION_HINT": {"string_value": "f32"}}


def parameter(name: str, dims: Sequence[int] = (-1, 4), element: Any = ov.Type.f32) -> Any:
    node = ops.parameter(ov.PartialShape(list(dims)), element, name=f"{name}_node")
    node.output(0).set_names({name})
    return node


def model(parameters: Sequence[Any], **results: Any) -> Any:
    """A model with these results, by name."""
    ends = []
    for name, node in results.items():
        end = ops.result(node)
        # Added, as the tensor may be that of an input.
        end.output(0).add_names({name})
        ends.append(end)
    return ov.Model(ends, list(parameters), "model")


def mapped(function: Callable[[Any], Any] = ops.relu, dims: Sequence[int] = (-1, 4), element: Any = ov.Type.f32) -> Any:
    """OUT = function(IN)."""
    given = parameter("IN", dims, element)
    return model([given], OUT=function(given))


def identity(dims: Sequence[int] = (-1, 4), element: Any = ov.Type.f32) -> Any:
    return mapped(lambda node: node, dims, element)


def declared(datatype: str, dims: Sequence[int] = (4,), max_batch_size: int = 4) -> dict[str, Any]:
    """The configuration of a model with IN and OUT that are alike."""
    sides = {side: [{"name": name, "data_type": datatype, "dims": list(dims)}] for side, name in SIDES.items()}
    return {"max_batch_size": max_batch_size, **sides}


SIDES = {"input": "IN", "output": "OUT"}


def scaled(factor: float = 2.0, dims: Sequence[int] = (-1, 4)) -> Any:
    return mapped(lambda node: ops.multiply(node, ops.constant(np.float32(factor))), dims)


def add_sub() -> Any:
    """SUM = A + B and DIFFERENCE = A - B."""
    a, b = parameter("A"), parameter("B")
    return model([a, b], SUM=ops.add(a, b), DIFFERENCE=ops.subtract(a, b))


def network() -> Any:
    """A convolution and a layer, with weights: [N, 3, 8, 8] to [N, 5]."""
    given = parameter("IN", (-1, 3, 8, 8))
    random = np.random.default_rng(0)
    kernel = ops.constant(random.standard_normal((6, 3, 3, 3)).astype(np.float32))
    hidden = ops.relu(ops.convolution(given, kernel, [2, 2], [1, 1], [1, 1], [1, 1]))
    flat = ops.reshape(hidden, ops.constant([0, -1]), special_zero=True)
    weights = ops.constant(random.standard_normal((96, 5)).astype(np.float32))
    return model([given], OUT=ops.softmax(ops.matmul(flat, weights, False, False), 1))


def counting() -> Any:
    """OUT = IN + what was added in all earlier inferences: a model with a state of its own."""
    given = parameter("IN", (1, 1))
    variable = ov.op.util.VariableInfo()
    variable.data_shape, variable.data_type, variable.variable_id = ov.PartialShape([1, 1]), ov.Type.f32, "total"
    kept = ov.op.util.Variable(variable)
    before = ov.opset6.read_value(ops.constant(np.zeros((1, 1), np.float32)), kept)
    total = ops.add(given, before)
    sink = ov.opset6.assign(total, kept)
    end = ops.result(total)
    end.output(0).set_names({"OUT"})
    return ov.Model([end], [sink], [given], "model")


def save(directory: Path, made: Any, version: int = 1, name: str = "model.xml") -> Path:
    path = directory / str(version) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    ov.serialize(made, str(path), str(path.with_suffix(".bin")))
    return path


def parameters(**values: str) -> dict[str, Any]:
    return {"parameters": {**EXACT, **{name: {"string_value": value} for name, value in values.items()}}}


def context(
    directory: Path, config: Mapping[str, Any] | None = None, settings: Mapping[str, str] | None = None
) -> ModelContext:
    return ModelContext("m", 1, directory, as_backends_get_it({"parameters": EXACT, **(config or {})}), settings or {})


class Opened(opened.Opened):
    """Opened from a model that is written first, or from None, where its file is there already."""

    def __init__(
        self,
        directory: Path,
        made: Any = None,
        config: Mapping[str, Any] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        if made is not None:
            save(directory, made)
        super().__init__(OpenVinoBackend(), context(directory, config, settings))
