"""ONNX Runtime, for scikit-learn's forests, and for others if the library that wrote them is not installed.

A forest is written as an ONNX model of one node, which sums the values of the leaves that a row reaches. It is encoded
here, because the package ``onnx`` is not installed where models are served. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from nerite.backends.onnxruntime.session import onnxruntime
from nerite.core.errors import Unsupported
from nerite.core.tensor import Array
from nerite.frameworks.trees.forest import Forest, ForestDescription
from nerite.frameworks.trees.native import MissingLibrary, NativeError
from nerite.wire.fields import nested_field, number_field, varint

_FLOAT, _DOUBLE = 1, 11
"""Data types."""
_INT, _STRING, _TENSOR, _INTS, _STRINGS = 2, 3, 4, 7, 8
"""Types of attributes."""
_INPUT, _OUTPUT = b"rows", b"sums"
_DOMAIN: Final = b"ai.onnx.ml"
_MODES: Final = ("LEAF", "BRANCH_EQ", "BRANCH_LT", "BRANCH_LEQ", "BRANCH_GT", "BRANCH_GTE")
"""Comparisons, by treelite's numbers."""
_MAX_BYTES: Final = 1 << 30
"""Maximum size of a model: half of what protobuf allows."""


def _attribute(name: str, value: int | str | Sequence[str] | Array) -> bytes:
    """Encode an attribute: a number, a text, texts, doubles, or numbers of which none is negative."""
    if isinstance(value, int):
        kind, data = _INT, number_field(3, value)
    elif isinstance(value, str):
        kind, data = _STRING, nested_field(4, value.encode())
    elif not isinstance(value, np.ndarray):
        known = {each: nested_field(9, each.encode()) for each in set(value)}
        kind, data = _STRINGS, b"".join([known[each] for each in value])
    elif value.dtype.kind == "f":
        raw = np.ascontiguousarray(value, "<f8").tobytes()
        head = number_field(1, len(value)) + number_field(2, _DOUBLE) + nested_field(8, name.encode())
        kind, data = _TENSOR, nested_field(5, head + nested_field(9, raw))
    else:
        encoded = [varint(number) for number in range(int(value.max(initial=0)) + 1)]
        kind, data = _INTS, nested_field(8, b"".join([encoded[number] for number in value.tolist()]))
    return nested_field(5, nested_field(1, name.encode()) + data + number_field(20, kind))


def _tensor(name: bytes, kind: int, width: int) -> bytes:
    """Encode the description of an input or output, which has any number of rows."""
    shape = nested_field(1, nested_field(2, b"rows")) + nested_field(1, number_field(1, width))
    return nested_field(1, name) + nested_field(2, nested_field(1, number_field(1, kind) + nested_field(2, shape)))


def _encoded(forest: ForestDescription, attributes: dict[str, Any]) -> bytes:
    """Encode the model of one node. It takes and adds doubles; its sums have single precision."""
    node = [nested_field(1, _INPUT), nested_field(2, _OUTPUT), nested_field(4, b"TreeEnsembleRegressor")]
    node += [_attribute(name, value) for name, value in attributes.items()]
    node.append(nested_field(7, _DOMAIN))
    graph = nested_field(1, b"".join(node)) + nested_field(2, b"graph")
    graph += nested_field(11, _tensor(_INPUT, _DOUBLE, forest.features))
    graph += nested_field(12, _tensor(_OUTPUT, _FLOAT, forest.width))
    opsets = [nested_field(8, nested_field(1, _DOMAIN) + number_field(2, 3))]
    opsets.append(nested_field(8, nested_field(1, b"") + number_field(2, 17)))
    return b"".join([number_field(1, 8), nested_field(7, graph), *opsets])


def onnx_model(forest: Forest) -> tuple[bytes, Array]:
    """Return a forest as an ONNX model, and the number of trees in each of its ``width`` sums.

    Raises ``NativeError`` for a forest with categorical features, or one that is too large.
    """
    description = forest.description
    columns: list[dict[str, Array]] = []
    counts = np.zeros(description.width, np.int64)
    # What the values of a tree's leaves are added to: a target and a class, where -1 stands for all of them.
    targets, classes = forest.header("target_id", "i4"), forest.header("class_id", "i4")
    for index in range(description.trees):
        rows = np.arange(description.targets) if targets[index] < 0 else targets[index : index + 1]
        places = np.arange(description.classes) if classes[index] < 0 else classes[index : index + 1]
        sums = (rows[:, None] * description.classes + places).reshape(-1)
        counts[sums] += 1
        columns.append(_columns(forest, index, sums))
    joined = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
    model = _encoded(
        description,
        {
            "n_targets": description.width,
            "aggregate_function": "SUM",
            "post_transform": "NONE",
            "nodes_modes": [_MODES[mode] for mode in joined.pop("modes").tolist()],
            **{f"{name}_as_tensor" if each.dtype.kind == "f" else name: each for name, each in joined.items()},
        },
    )
    if len(model) > _MAX_BYTES:
        raise NativeError("it is too large for ONNX Runtime")
    return model, counts


def _columns(forest: Forest, index: int, sums: Array) -> dict[str, Array]:
    """Return one tree's part of each attribute. Its nodes are numbered; the first is the root."""
    read = partial(forest.tree, index)
    if read("has_categorical_split", "?")[0]:
        raise NativeError("features with categories are not for ONNX Runtime")
    value = forest.description.dtype.str
    leaf = read("node_type", "i1") == 0
    branch = ~leaf  # others have a test, and go left if it is true
    count = len(leaf)
    nodes = np.arange(count)
    leaves = nodes[leaf]
    weights = read("leaf_value", value)[leaf]
    if len(vectors := read("leaf_vector", value)):
        begin, end = (read(f"leaf_vector_{side}", "u8")[leaf].astype(int) for side in ("begin", "end"))
        weights = vectors[begin[:, None] + np.arange(end[0] - begin[0])]
    return {
        "modes": np.where(leaf, 0, read("cmp", "i1")),
        "nodes_treeids": np.full(count, index),
        "nodes_nodeids": nodes,
        "nodes_featureids": read("split_index", "i4") * branch,
        "nodes_values": np.where(leaf, 0, read("threshold", value)).astype(np.float64),
        "nodes_truenodeids": read("cleft", "i4") * branch,
        "nodes_falsenodeids": read("cright", "i4") * branch,
        "nodes_missing_value_tracks_true": (read("default_left", "?") & branch).astype(np.int64),
        "target_treeids": np.full(len(leaves) * len(sums), index),
        "target_nodeids": leaves.repeat(len(sums)),
        "target_ids": np.tile(sums, len(leaves)),
        "target_weights": weights.reshape(-1).astype(np.float64),
    }


class OnnxruntimeEngine:
    """An ONNX Runtime session that sums; NumPy computes the rest. It keeps nothing of treelite's model."""

    name = "onnxruntime"
    takes: tuple[np.dtype[Any], ...] = (np.dtype(np.float64),)

    def __init__(self, forest: ForestDescription, threads: int, read: Callable[[], Forest]) -> None:
        """Write the forest as an ONNX model, and open it. Raises ``NativeError`` if that is not possible."""
        if importlib.util.find_spec("onnxruntime") is None:
            raise MissingLibrary("onnxruntime is not installed")
        source = read()
        name = source.header("postprocessor", "S1").tobytes().decode()
        functions = _functions(source)
        if name not in functions:
            raise NativeError(f"'{name}' is not known to Nerite")
        self._function = functions[name]
        model, counts = onnx_model(source)
        self._shape = (-1, forest.targets, forest.classes)
        averaged = source.header("average_tree_output", "?")[0]
        self._counts = counts.reshape(self._shape[1:]) if averaged else np.ones(1)
        self._base = source.header("base_scores", "f8").reshape(self._shape[1:])
        try:
            framework = onnxruntime()
            options = framework.SessionOptions()
            options.intra_op_num_threads = threads
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            session = framework.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Unsupported as error:
            raise NativeError(error.message) from error
        except Exception as error:  # any error of the framework explains why the model cannot be opened
            raise NativeError(str(error)) from error
        self._run = session.run

    def predict(self, rows: Array) -> Array:
        """Return the forest's numbers for each row. Raises ``NativeError``."""
        try:
            (sums,) = self._run(["sums"], {"rows": rows})
        except Exception as error:  # any error of the framework explains why it cannot compute this batch
            raise NativeError(str(error)) from error
        numbers = self._function(sums.reshape(self._shape) / self._counts + self._base)
        return numbers.reshape(len(rows), -1)


def _functions(forest: Forest) -> dict[str, Callable[[Array], Array]]:
    """Return the functions that are applied to sums, by treelite's names."""
    alpha = float(forest.header("sigmoid_alpha", "f4")[0])
    ratio = float(forest.header("ratio_c", "f4")[0])

    def softmax(values: Array) -> Array:
        powers: Array = np.exp(values - values.max(-1, keepdims=True))
        total: Array = powers.sum(-1, keepdims=True)
        return powers / total

    def sigmoid(values: Array) -> Array:
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-alpha * values))

    return {
        "identity": lambda values: values,
        "identity_multiclass": lambda values: values,
        "sigmoid": sigmoid,
        "multiclass_ova": sigmoid,
        "softmax": softmax,
        "exponential": np.exp,
        "exponential_standard_ratio": lambda values: np.exp2(-values / ratio),
        "logarithm_one_plus_exp": lambda values: np.logaddexp(0, values),
        "signed_square": lambda values: np.copysign(values * values, values),
        "hinge": lambda values: np.asarray(values > 0, np.float64),
    }
