"""Small ONNX models, made in code: each function returns the model and the shape of one row of its input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def _weights(name: str, *shape: int) -> onnx.TensorProto:
    values = np.random.default_rng(0).normal(size=shape) / np.sqrt(np.prod(shape[1:]))
    return numpy_helper.from_array(values.astype(np.float32), name)


def _model(nodes: list[onnx.NodeProto], dims: list[int], weights: list[onnx.TensorProto]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("IN", TensorProto.FLOAT, ["N", *dims])],
        [helper.make_tensor_value_info("OUT", TensorProto.FLOAT, ["N", 10])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def mlp() -> tuple[onnx.ModelProto, list[int]]:
    """784 - 256 - 128 - 10: the classifier of handwritten digits that everybody starts with."""
    return _perceptron(784, 256, 128)


def wide_mlp() -> tuple[onnx.ModelProto, list[int]]:
    """256 - 2048 - 2048 - 10: most of the time for one row is that for reading the weights."""
    return _perceptron(256, 2048, 2048)


def _perceptron(width: int, first: int, second: int) -> tuple[onnx.ModelProto, list[int]]:
    node = helper.make_node
    nodes = [
        node("MatMul", ["IN", "w1"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("MatMul", ["b", "w2"], ["c"]),
        node("Relu", ["c"], ["d"]),
        node("MatMul", ["d", "w3"], ["OUT"]),
    ]
    weights = [_weights("w1", width, first), _weights("w2", first, second), _weights("w3", second, 10)]
    return _model(nodes, [width], weights), [width]


def cnn() -> tuple[onnx.ModelProto, list[int]]:
    """Two convolutions over 32 x 32 colour images."""
    node = helper.make_node
    shape: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}
    nodes = [
        node("Conv", ["IN", "w1"], ["a"], **shape),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "w2"], ["c"], **shape),
        node("Relu", ["c"], ["d"]),
        node("GlobalAveragePool", ["d"], ["e"]),
        node("Flatten", ["e"], ["f"]),
        node("MatMul", ["f", "w3"], ["OUT"]),
    ]
    weights = [_weights("w1", 16, 3, 3, 3), _weights("w2", 32, 16, 3, 3), _weights("w3", 32, 10)]
    return _model(nodes, [3, 32, 32], weights), [3, 32, 32]


def resnet() -> tuple[onnx.ModelProto, list[int]]:
    """The layers of ResNet-18 without its normalisation: pictures of 64 x 64, 0.15 GFLOP a row."""
    node = helper.make_node
    nodes, weights = [], []

    def conv(source: str, name: str, channels: tuple[int, int], size: int, stride: int) -> str:
        weights.append(_weights(f"w_{name}", channels[1], channels[0], size, size))
        pads = [size // 2] * 4
        shape: dict[str, Any] = {"kernel_shape": [size, size], "pads": pads, "strides": [stride, stride]}
        nodes.append(node("Conv", [source, f"w_{name}"], [name], **shape))
        return name

    def relu(source: str) -> str:
        nodes.append(node("Relu", [source], [f"{source}_relu"]))
        return f"{source}_relu"

    last = relu(conv("IN", "stem", (3, 64), 7, 2))
    nodes.append(node("MaxPool", [last], ["pool"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]))
    last, width = "pool", 64
    for block in range(8):
        wide = 64 << block // 2
        stride = 2 if wide != width else 1
        inner = relu(conv(last, f"{block}_a", (width, wide), 3, stride))
        inner = conv(inner, f"{block}_b", (wide, wide), 3, 1)
        if stride == 2:
            last = conv(last, f"{block}_down", (width, wide), 1, 2)
        nodes.append(node("Add", [inner, last], [f"{block}_sum"]))
        last, width = relu(f"{block}_sum"), wide
    nodes.append(node("GlobalAveragePool", [last], ["mean"]))
    nodes.append(node("Flatten", ["mean"], ["flat"]))
    weights.append(_weights("w_out", 512, 10))
    nodes.append(node("MatMul", ["flat", "w_out"], ["OUT"]))
    return _model(nodes, [3, 64, 64], weights), [3, 64, 64]


def many(repository: Path, count: int) -> Path:
    """Write a repository of ``count`` models that do next to nothing, named m0, m1, and so on; return it."""
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 16]) for name in ("INPUT0", "OUTPUT0")]
    graph = helper.make_graph([helper.make_node("Relu", ["INPUT0"], ["OUTPUT0"])], "graph", sides[:1], sides[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    for number in range(count):
        (repository / f"m{number}" / "1").mkdir(parents=True)
        (repository / f"m{number}" / "1" / "model.onnx").write_bytes(proto)
    return repository
