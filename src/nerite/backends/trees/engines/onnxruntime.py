"""ONNX Runtime: for the forests of scikit-learn, and where the library that wrote a model is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from nerite.backends.onnxruntime.framework import onnxruntime
from nerite.backends.trees.engines import onnx_trees
from nerite.backends.trees.forest import Forest, Sums
from nerite.backends.trees.native import NativeError
from nerite.core.errors import Internal, Unsupported
from nerite.core.tensor import Array

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
        model, counts = onnx_trees.model(forest)
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
            (sums,) = self._run([onnx_trees.OUTPUT], {onnx_trees.INPUT: rows})
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
