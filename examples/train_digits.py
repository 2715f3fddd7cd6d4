"""Trains the classifier of the example model ``digits``, and writes it as ONNX.

A small neural network on scikit-learn's 1,797 handwritten digits. The graph is written node by node from the trained
weights, which shows what is in an ONNX file; for larger models there are exporters.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

INK = 16.0
"""The darkest pixel of the data set."""


def train(path: Path) -> float:
    """Train, write the model to ``path`` and return its accuracy on a quarter of the digits, which it has not seen."""
    images, digits = load_digits(return_X_y=True)
    known, unseen, known_digits, unseen_digits = train_test_split(
        images / INK, digits, test_size=0.25, random_state=0, stratify=digits
    )
    network = MLPClassifier(hidden_layer_sizes=(64,), learning_rate_init=0.01, max_iter=500, random_state=0)
    network.fit(known, known_digits)
    onnx.save(as_onnx(network), path)
    return float(network.score(unseen, unseen_digits))


def as_onnx(network: MLPClassifier) -> onnx.ModelProto:
    """Return ``network`` as an ONNX model that takes unscaled pixels and gives probabilities."""
    node = helper.make_node
    nodes = [node("Div", ["pixels", "ink"], ["layer0"])]
    constants = [numpy_helper.from_array(np.float32(INK), "ink")]
    last = len(network.coefs_)
    for layer, (weights, bias) in enumerate(zip(network.coefs_, network.intercepts_, strict=True), start=1):
        constants.append(numpy_helper.from_array(weights.astype(np.float32), f"weights{layer}"))
        constants.append(numpy_helper.from_array(bias.astype(np.float32), f"bias{layer}"))
        nodes.append(node("Gemm", [f"layer{layer - 1}", f"weights{layer}", f"bias{layer}"], [f"sum{layer}"]))
        if layer < last:
            nodes.append(node("Relu", [f"sum{layer}"], [f"layer{layer}"]))
    nodes.append(node("Softmax", [f"sum{last}"], ["probabilities"], axis=1))
    graph = helper.make_graph(
        nodes,
        "digits",
        # A name in place of a size leaves it open: the first dimension is the batch.
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", len(network.coefs_[0])])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model
