"""ONNX Runtime: for the forests of scikit-learn, and where the library that wrote a model is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from nerite.backends.onnxruntime.session import onnxruntime
from nerite.core.errors import Internal, Unsupported
from nerite.core.tensor import Array
from nerite.frameworks.trees.forest import Forest, Sums, Tree
from nerite.frameworks.trees.native import NativeError
from nerite.wire.fields import nested_field, varint
from nerite.wire.fields import number_field as field

# What is needed of protobuf to write an ONNX model of one node. Field numbers are those of onnx.proto.
#
# By hand, since the package ``onnx`` is not there where models are served, and this is a page.

DOUBLE, FLOAT = 11, 1
"""Data types."""
_INT, _STRING, _TENSOR, _INTS, _STRINGS = 2, 3, 4, 7, 8
"""Types of attributes."""


def number(name: str, value: int) -> bytes:
    """Return an attribute that is a number."""
    return _attribute(name, _INT, field(3, value))


def text(name: str, value: str) -> bytes:
    """Return an attribute that is a text."""
    return _attribute(name, _STRING, nested_field(4, value.encode()))


def numbers(name: str, values: Array) -> bytes:
    """Return an attribute that is a list of numbers, none of them below 0."""
    known = [varint(value) for value in range(int(values.max(initial=0)) + 1)]
    return _attribute(name, _INTS, nested_field(8, b"".join([known[value] for value in values.tolist()])))


def texts(name: str, values: Iterable[int], known: Sequence[str]) -> bytes:
    """Return an attribute that is a list of texts, each given as its place in ``known``."""
    written = [nested_field(9, value.encode()) for value in known]
    return _attribute(name, _STRINGS, b"".join([written[value] for value in values]))


def doubles(name: str, values: Array) -> bytes:
    """Return an attribute that is a tensor of doubles."""
    raw = np.ascontiguousarray(values, "<f8").tobytes()
    tensor = field(1, len(values)) + field(2, DOUBLE) + nested_field(8, name.encode()) + nested_field(9, raw)
    return _attribute(name, _TENSOR, nested_field(5, tensor))


def node(operator: str, domain: str, taken: str, given: str, attributes: Iterable[bytes]) -> bytes:
    """Return a node of one input and one output."""
    names = nested_field(1, taken.encode()) + nested_field(2, given.encode()) + nested_field(4, operator.encode())
    return b"".join(
        [names, *[nested_field(5, attribute) for attribute in attributes], nested_field(7, domain.encode())]
    )


def table(name: str, kind: int, width: int) -> bytes:
    """Return what an input or output is, which is a tensor of any number of rows."""
    rows, columns = nested_field(1, nested_field(2, b"rows")), nested_field(1, field(1, width))
    return nested_field(1, name.encode()) + nested_field(
        2, nested_field(1, field(1, kind) + nested_field(2, rows + columns))
    )


def wire_model(node: bytes, taken: bytes, given: bytes, opsets: Iterable[tuple[str, int]]) -> bytes:
    """Return a model of one node."""
    graph = nested_field(1, node) + nested_field(2, b"graph") + nested_field(11, taken) + nested_field(12, given)
    used = [nested_field(8, nested_field(1, domain.encode()) + field(2, version)) for domain, version in opsets]
    return b"".join([field(1, 8), nested_field(7, graph), *used])


def _attribute(name: str, kind: int, value: bytes) -> bytes:
    return b"".join([nested_field(1, name.encode()), value, field(20, kind)])


# A forest as an ONNX model of one node, which sums the values of the leaves that a row comes to.

INPUT, OUTPUT = "rows", "sums"
_DOMAIN: Final = "ai.onnx.ml"
_MODES: Final = ("LEAF", "BRANCH_EQ", "BRANCH_LT", "BRANCH_LEQ", "BRANCH_GT", "BRANCH_GTE")
"""By treelite's numbers of comparisons."""
_MAX_BYTES: Final = 1 << 30
"""Of a model; protobuf ends at twice that."""


def forest_model(forest: Forest) -> tuple[bytes, Array]:
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
        number("n_targets", width),
        text("aggregate_function", "SUM"),
        text("post_transform", "NONE"),
        texts("nodes_modes", joined.pop("modes").tolist(), _MODES),
        *[
            doubles(f"{name}_as_tensor", values) if values.dtype.kind == "f" else numbers(name, values)
            for name, values in joined.items()
        ],
    ]
    made = wire_model(
        node("TreeEnsembleRegressor", _DOMAIN, INPUT, OUTPUT, attributes),
        table(INPUT, DOUBLE, forest.description.features),
        table(OUTPUT, FLOAT, width),
        ((_DOMAIN, 3), ("", 17)),
    )
    if len(made) > _MAX_BYTES:
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


Function = Callable[[Array, Sums], Array]


def installed() -> bool:
    """Return whether ONNX Runtime is."""
    return importlib.util.find_spec("onnxruntime") is not None


class OnnxruntimeEngine:
    """A session that sums; the rest is numpy's. It keeps nothing of treelite's forest."""

    name = "onnxruntime"
    takes: tuple[np.dtype[Any], ...] = (np.dtype(np.float64),)

    def __init__(self, forest: Forest, threads: int) -> None:
        """Write the forest as an ONNX model, and open that. Raises ``NativeError`` where that cannot be."""
        self._sums = forest.sums()
        function = _FUNCTIONS.get(self._sums.postprocessor)
        if function is None:
            raise NativeError(f"'{self._sums.postprocessor}' is not known to Nerite")
        self._function: Function = function
        model, counts = forest_model(forest)
        self._shape = (-1, forest.description.targets, forest.description.classes)
        self._counts = counts.reshape(self._shape[1:]) if self._sums.averaged else np.ones(1)
        self._base = self._sums.base.reshape(self._shape[1:])
        framework = _framework()
        options = framework.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            session = framework.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # Whatever the framework raises says why the model cannot be opened.
            raise NativeError(str(error)) from error
        self._run = session.run

    def predict(self, rows: Array) -> Array:
        """Return the forest's numbers for each row. Raises ``Internal``."""
        try:
            (sums,) = self._run([OUTPUT], {INPUT: rows})
        except Exception as error:  # Whatever the framework raises says why it cannot compute this batch.
            raise Internal(f"onnx runtime error: {error}") from error
        values: Array = sums.reshape(self._shape) / self._counts + self._base
        numbers: Array = self._function(values, self._sums)
        return numbers.reshape(len(rows), -1)


def _framework() -> Any:
    try:
        return onnxruntime()
    except Unsupported as error:
        raise NativeError(error.message) from error


def _softmax(values: Array, sums: Sums) -> Array:
    powers: Array = np.exp(values - values.max(-1, keepdims=True))
    total: Array = powers.sum(-1, keepdims=True)
    return powers / total


def _sigmoid(values: Array, sums: Sums) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-sums.sigmoid_alpha * values))


_FUNCTIONS: Final[dict[str, Function]] = {
    "identity": lambda values, sums: values,
    "identity_multiclass": lambda values, sums: values,
    "sigmoid": _sigmoid,
    "multiclass_ova": _sigmoid,
    "softmax": _softmax,
    "exponential": lambda values, sums: np.exp(values),
    "exponential_standard_ratio": lambda values, sums: np.exp2(-values / sums.ratio_c),
    "logarithm_one_plus_exp": lambda values, sums: np.logaddexp(0, values),
    "signed_square": lambda values, sums: np.copysign(values * values, values),
    "hinge": lambda values, sums: np.asarray(values > 0, np.float64),
}
"""What becomes of sums, by treelite's names."""
