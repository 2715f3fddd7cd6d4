"""XGBoost's library, for the models that it wrote."""

from __future__ import annotations

import ctypes
import json
from ctypes import byref, c_char_p, c_size_t, c_uint64, c_void_p
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from nerite.backends.trees import native
from nerite.backends.trees.engines.engine import address
from nerite.backends.trees.forest import Description
from nerite.backends.trees.native import NativeError
from nerite.core.errors import Internal
from nerite.core.tensor import Array

_FLOAT: Final = np.dtype(np.float32)
_VALUES, _CONTRIBUTIONS = 0, 2
_BLOCK: Final = 64
"""Rows that XGBoost computes with one thread, however many it has; see ``FEW`` for what the others would cost."""
_MISSING: Final = float("nan")


def library() -> Path | None:
    """Return where XGBoost's library is, or None where it is not installed."""
    return native.find("xgboost", "libxgboost")


class XgboostEngine:
    """A booster, whose answers are XGBoost's to the last bit; and another of one thread, for batches of few rows."""

    name = "xgboost"
    takes: tuple[np.dtype[Any], ...] = (_FLOAT,)

    def __init__(self, path: Path, forest: Description, threads: int) -> None:
        """Open a file that treelite has read. Raises ``NativeError`` where this version of XGBoost cannot."""
        self._library = native.open_library(path, "XGBGetLastError")
        self._width = forest.width
        self._features = forest.features
        result = (c_void_p, c_void_p, c_void_p)
        function = self._library.function
        self._predict = function("XGBoosterPredictFromDense", c_void_p, c_char_p, c_char_p, c_void_p, *result)
        self._predict_matrix = function("XGBoosterPredictFromDMatrix", c_void_p, c_void_p, c_char_p, *result)
        self._make_matrix = function("XGDMatrixCreateFromDense", c_char_p, c_char_p, c_void_p)
        self._free_matrix = function("XGDMatrixFree", c_void_p)
        self._configuration = _configuration(_VALUES)
        self._matrix_configuration = json.dumps({"missing": _MISSING, "nthread": threads}).encode()
        # From memory: of a file, it takes the format from its name.
        raw = forest.artifact.path.read_bytes()
        self._booster = self._opened(raw, threads)
        self._booster_few = self._booster if threads == 1 else self._opened(raw, 1)

    def predict(self, rows: Array) -> Array:
        """Return the forest's numbers for each row. Raises ``Internal``."""
        booster = self._booster_few if len(rows) <= _BLOCK else self._booster
        try:
            return self._numbers(
                self._predict, len(rows), self._width, booster, _interface(rows), self._configuration, None
            )
        except NativeError as error:
            raise Internal(f"xgboost error: {error}") from error

    def contributions(self, rows: Array) -> Array:
        """Return the part of each feature in each number. Raises ``Internal``."""
        width = self._width * (self._features + 1)
        configuration = _configuration(_CONTRIBUTIONS)
        matrix = c_void_p()
        try:
            self._make_matrix(_interface(rows), self._matrix_configuration, byref(matrix))
            try:
                return self._numbers(self._predict_matrix, len(rows), width, self._booster, matrix, configuration)
            finally:
                self._free_matrix(matrix)
        except NativeError as error:
            raise Internal(f"xgboost error: {error}") from error

    def _opened(self, raw: bytes, threads: int) -> c_void_p:
        """Return a booster that computes with so many threads, until this engine is gone."""
        function = self._library.function
        booster = c_void_p()
        function("XGBoosterCreate", c_void_p, c_uint64, c_void_p)(None, 0, byref(booster))
        native.release(self, function("XGBoosterFree", c_void_p), booster)
        function("XGBoosterLoadModelFromBuffer", c_void_p, c_char_p, c_uint64)(booster, raw, len(raw))
        say = function("XGBoosterSetParam", c_void_p, c_char_p, c_char_p)
        say(booster, b"nthread", str(threads).encode())
        length, text = c_size_t(), c_char_p()
        function("XGBoosterSaveJsonConfig", c_void_p, c_void_p, c_void_p)(booster, byref(length), byref(text))
        if json.loads(text.value or b"{}")["learner"]["objective"]["name"] == "multi:softmax":
            # It was made to give the class alone.
            say(booster, b"objective", b"multi:softprob")
        return booster

    @staticmethod
    def _numbers(function: native.Function, rows: int, width: int, *arguments: Any) -> Array:
        shape, dims, result = c_void_p(), c_uint64(), c_void_p()
        function(*arguments, byref(shape), byref(dims), byref(result))
        sizes = (c_uint64 * dims.value).from_address(shape.value or 0)
        count = rows * width
        if prod(sizes) != count:
            raise NativeError(f"a prediction of shape {list(sizes)}, where {rows} by {width} were expected")
        # A copy: the memory is the calling thread's, until its next prediction.
        raw = ctypes.string_at(result.value or 0, count * _FLOAT.itemsize)
        return np.ndarray((rows, width), _FLOAT, raw)


def _interface(rows: Array) -> bytes:
    """Return what tells XGBoost where rows are."""
    count, features = rows.shape
    return b'{"data":[%d,true],"shape":[%d,%d],"typestr":"<f4","version":3}' % (address(rows), count, features)


def _configuration(kind: int) -> bytes:
    return json.dumps(
        {
            "type": kind,
            "training": False,
            "iteration_begin": 0,
            "iteration_end": 0,
            "missing": _MISSING,
            "strict_shape": True,
            "cache_id": 0,
        }
    ).encode()
