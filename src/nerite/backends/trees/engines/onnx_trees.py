"""A forest as an ONNX model of one node, which sums the values of the leaves that a row comes to."""

from __future__ import annotations

from typing import Final

import numpy as np

from nerite.backends.trees.engines import onnx_wire as wire
from nerite.backends.trees.forest import Forest, Tree
from nerite.backends.trees.native import NativeError
from nerite.core.tensor import Array

INPUT, OUTPUT = "rows", "sums"
_DOMAIN: Final = "ai.onnx.ml"
_MODES: Final = ("LEAF", "BRANCH_EQ", "BRANCH_LT", "BRANCH_LEQ", "BRANCH_GT", "BRANCH_GTE")
"""By treelite's numbers of comparisons."""
_MOST_BYTES: Final = 1 << 30
"""Of a model; protobuf ends at twice that."""


def model(forest: Forest) -> tuple[bytes, Array]:
    """Return the model, and how many trees go into each of its ``width`` sums.

    It takes doubles and adds them; sums come in single precision. Raises ``NativeError`` for a forest with lists of
    categories, or too large a one.
    """
    width = forest.description.width
    columns: list[dict[str, Array]] = []
    counts = np.zeros(width, np.int64)
    for index, tree in enumerate(forest.trees()):
        if tree.categorical:
            raise NativeError("features with categories are not for ONNX Runtime")
        places = _places(tree, forest.description.targets, forest.description.classes)
        counts[places] += 1
        columns.append(_columns(index, tree, places))
    joined = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
    attributes = [
        wire.number("n_targets", width),
        wire.text("aggregate_function", "SUM"),
        wire.text("post_transform", "NONE"),
        wire.texts("nodes_modes", joined.pop("modes").tolist(), _MODES),
        *[
            wire.doubles(f"{name}_as_tensor", values) if values.dtype.kind == "f" else wire.numbers(name, values)
            for name, values in joined.items()
        ],
    ]
    made = wire.model(
        wire.node("TreeEnsembleRegressor", _DOMAIN, INPUT, OUTPUT, attributes),
        wire.table(INPUT, wire.DOUBLE, forest.description.features),
        wire.table(OUTPUT, wire.FLOAT, width),
        ((_DOMAIN, 3), ("", 17)),
    )
    if len(made) > _MOST_BYTES:
        raise NativeError("it is too large for ONNX Runtime")
    return made, counts


def _places(tree: Tree, targets: int, classes: int) -> Array:
    """Return which sums the values of a tree's leaves belong to, in the order of the values."""
    target, wanted = tree.targets
    rows = np.arange(targets) if target < 0 else np.array([target])
    columns = np.arange(classes) if wanted < 0 else np.array([wanted])
    return (rows[:, None] * classes + columns).reshape(-1)


def _columns(index: int, tree: Tree, places: Array) -> dict[str, Array]:
    """Return one tree's part of each attribute."""
    count = len(tree.leaf)
    nodes = np.arange(count)
    leaves = nodes[tree.leaf]
    branch = ~tree.leaf
    return {
        "modes": np.where(tree.leaf, 0, tree.comparison),
        "nodes_treeids": np.full(count, index),
        "nodes_nodeids": nodes,
        "nodes_featureids": tree.feature * branch,
        "nodes_values": np.where(tree.leaf, 0, tree.threshold).astype(np.float64),
        "nodes_truenodeids": tree.left * branch,
        "nodes_falsenodeids": tree.right * branch,
        "nodes_missing_value_tracks_true": (tree.missing_left & branch).astype(np.int64),
        "target_treeids": np.full(len(leaves) * len(places), index),
        "target_nodeids": leaves.repeat(len(places)),
        "target_ids": np.tile(places, len(leaves)),
        "target_weights": tree.values[leaves].reshape(-1).astype(np.float64),
    }
