"""Small ONNX models, opened without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import opened
from configs import as_backends_get_it
from nerite.backends.interface import ModelContext
from nerite.backends.onnxruntime import OnnxRuntimeBackend

Dims = Sequence[int | str | None] | None
Node = onnx.NodeProto
node = helper.make_node


def tensor(name: str, dims: Dims, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def constant(name: str, value: Any) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


def model(
    nodes: Sequence[Node],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[onnx.TensorProto] = (),
    opset: int = 17,
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, list(constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def identity(dims: Dims = ("N", 4), kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """OUT = IN, one tensor of any type."""
    return model([node("Identity", ["IN"], ["OUT"])], [tensor("IN", dims, kind)], [tensor("OUT", dims, kind)])


def scaled(factor: float = 2.0, dims: Dims = ("N", 4)) -> onnx.ModelProto:
    """OUT = IN * factor."""
    return model(
        [node("Mul", ["IN", "factor"], ["OUT"])],
        [tensor("IN", dims)],
        [tensor("OUT", dims)],
        [constant("factor", np.float32(factor))],
    )


def add_sub() -> onnx.ModelProto:
    """SUM = A + B and DIFFERENCE = A - B."""
    return model(
        [node("Add", ["A", "B"], ["SUM"]), node("Sub", ["A", "B"], ["DIFFERENCE"])],
        [tensor("A", ["N", 4]), tensor("B", ["N", 4])],
        [tensor("SUM", ["N", 4]), tensor("DIFFERENCE", ["N", 4])],
    )


def save(directory: Path, proto: onnx.ModelProto, version: int = 1, name: str = "model.onnx") -> Path:
    path = directory / str(version) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, path)
    return path


def context(
    directory: Path, config: Mapping[str, Any] | None = None, settings: Mapping[str, str] | None = None
) -> ModelContext:
    return ModelContext("m", 1, directory, as_backends_get_it(config or {}), settings or {})


class Opened(opened.Opened):
    """Opened from a model that is written first."""

    def __init__(
        self,
        directory: Path,
        proto: onnx.ModelProto,
        config: Mapping[str, Any] | None = None,
        settings: Mapping[str, str] | None = None,
        kind: str = "CPU",
    ) -> None:
        save(directory, proto)
        super().__init__(OnnxRuntimeBackend(), context(directory, config, settings), kind)
