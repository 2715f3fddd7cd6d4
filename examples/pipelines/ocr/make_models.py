"""Makes the two networks of the pipeline: one that finds words, and one that knows letters.

pip install onnx pillow
python examples/pipelines/ocr/make_models.py

Takes seconds. What finds words has no weights to train: ink, blurred, is where a word is. What knows letters is linear,
and fitted to letters of all sizes with noise on them. Replace either with yours: the pipeline does not notice.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import numpy as np
import onnx
from drawing import ALPHABET, drawn_letter
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).resolve().parent
MODELS = HERE / "models"
sys.path.insert(0, str(MODELS / "ocr" / "1"))
from letters import SIDE, letters  # noqa: E402  # the same in training and in the server

CELL = 4
"""Pixels of the page for each value of the map."""


def main() -> None:
    """Write both networks."""
    save(detector(), "detect")
    weights, right = fitted()
    save(classifier(weights), "recognise")
    print(f"{right:.1%} of {len(ALPHABET)} letters in sizes and noise of their own are read right")


def detector() -> onnx.ModelProto:
    """Return a network that maps a page to how likely each place of it belongs to a word."""
    nodes = [
        helper.make_node("Sub", ["one", "page"], ["ink"]),
        helper.make_node("MaxPool", ["ink"], ["cells"], kernel_shape=[CELL, CELL], strides=[CELL, CELL]),
        # Letters of a word grow together.
        helper.make_node("MaxPool", ["cells"], ["words"], kernel_shape=[1, 5], pads=[0, 2, 0, 2]),
        helper.make_node("Sub", ["words", "threshold"], ["above"]),
        helper.make_node("Mul", ["above", "slope"], ["logits"]),
        helper.make_node("Sigmoid", ["logits"], ["words_map"]),
    ]
    constants = {"one": 1.0, "threshold": 0.4, "slope": 20.0}
    return network(nodes, constants, "page", ["N", 1, "H", "W"], "words_map", ["N", 1, "h", "w"])


def fitted() -> tuple[np.ndarray, float]:
    """Return the weights of the letters, by ridge regression, and how many others they read right."""
    chance, noise = Random(0), np.random.default_rng(0)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return letters as they are cut out of pages: ink is not quite black there, and paper not quite white."""
        numbers = [chance.randrange(len(ALPHABET)) for _ in range(count)]
        rows = np.empty((count, SIDE * SIDE))
        for row, number in zip(rows, numbers, strict=True):
            ink = np.pad(drawn_letter(ALPHABET[number], chance.randint(18, 30)), 2)
            ink = noise.uniform(0.05, 0.12) + noise.uniform(0.7, 0.85) * ink + noise.normal(0, 0.025, ink.shape)
            row[:] = next(letters(ink)).ravel()
        return np.hstack([rows, np.ones((count, 1))]), np.array(numbers)

    seen, numbers = samples(4000)
    target = np.eye(len(ALPHABET))[numbers]
    weights = np.linalg.solve(seen.T @ seen + np.eye(seen.shape[1]), seen.T @ target)
    unseen, numbers = samples(1000)
    return weights, float(np.mean((unseen @ weights).argmax(axis=1) == numbers))


def classifier(weights: np.ndarray) -> onnx.ModelProto:
    """Return a network that maps letters to a score for each of the alphabet."""
    nodes = [
        helper.make_node("Flatten", ["letters"], ["rows"]),
        helper.make_node("Gemm", ["rows", "weights", "bias"], ["scores"]),
    ]
    constants = {"weights": weights[:-1], "bias": weights[-1]}
    return network(nodes, constants, "letters", ["N", SIDE, SIDE], "scores", ["N", len(ALPHABET)])


def network(nodes: list, constants: dict, source: str, source_dims: list, target: str, target_dims: list) -> object:
    """Return a network with one input and one output."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(source, TensorProto.FLOAT, source_dims)],
        [helper.make_tensor_value_info(target, TensorProto.FLOAT, target_dims)],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def save(model: onnx.ModelProto, name: str) -> None:
    """Check a network and write it where the server looks for it."""
    onnx.checker.check_model(model, full_check=True)
    file = MODELS / name / "1" / "model.onnx"
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, file)


if __name__ == "__main__":
    main()
