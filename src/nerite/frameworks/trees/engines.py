"""LightGBM's library, for the models that it wrote."""

from __future__ import annotations

import ctypes
import importlib
import json
from ctypes import byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np

from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotInstalled
from nerite.core.tensor import Array
from nerite.frameworks.trees import native
from nerite.frameworks.trees.forest import Forest, ForestDescription
from nerite.frameworks.trees.native import FEW, Library, NativeError, address
from nerite.frameworks.trees.parameters import Parameters

_DOUBLE: Final = np.dtype(np.float64)
_FLOAT: Final = np.dtype(np.float32)
_TYPES: Final = {_FLOAT: 0, _DOUBLE: 1}
_VALUES, _CONTRIBUTIONS = 0, 3
_ROW_MAJOR: Final = 1
_FROM_FIRST_TREE, _TO_LAST_TREE = 0, -1
_ON_ONE_THREAD: Final = b"num_threads=1 verbosity=-1"
_PREPARE: Final = "LGBM_BoosterPredictForMatSingleRowFastInit"


def lightgbm_library() -> Path | None:
    """Return where LightGBM's library is, or None where it is not installed."""
    return native.find("lightgbm", "lib_lightgbm")


class LightgbmEngine:
    """A booster. It computes in doubles, from rows of either precision."""

    name = "lightgbm"
    takes: tuple[np.dtype[Any], ...] = (_DOUBLE, _FLOAT)

    def __init__(self, path: Path, forest: ForestDescription, threads: int) -> None:
        """Open a file that treelite has read. Raises ``NativeError`` where this version of LightGBM cannot."""
        opened = native.open_library(path, "LGBM_GetLastError")
        self._width = forest.width
        self._features = forest.features
        self._handle = c_void_p()
        opened.function("LGBM_BoosterCreateFromModelfile", c_char_p, c_void_p, c_void_p)(
            str(forest.artifact.path).encode(), byref(c_int()), byref(self._handle)
        )
        native.release(self, opened.function("LGBM_BoosterFree", c_void_p), self._handle)
        self._predict = opened.function(
            "LGBM_BoosterPredictForMat",
            *(c_void_p, c_void_p, c_int, c_int32, c_int32, c_int),
            *(c_int, c_int, c_int, c_char_p, c_void_p, c_void_p),
        )
        self._options = f"num_threads={threads} verbosity=-1".encode()
        self._single = _SingleRow(self, opened, self._handle, forest) if opened.has(_PREPARE) else None

    def predict(self, rows: Array) -> Array:
        """Return the forest's numbers for each row. Raises ``Internal``."""
        if len(rows) == 1 and self._single is not None and (numbers := self._single.predict(rows)) is not None:
            return numbers
        return self._numbers(rows, _VALUES, self._width)

    def contributions(self, rows: Array) -> Array:
        """Return the part of each feature in each number. Raises ``Internal``."""
        return self._numbers(rows, _CONTRIBUTIONS, self._width * (self._features + 1))

    def _numbers(self, rows: Array, kind: int, width: int) -> Array:
        count, features = rows.shape
        results = np.empty((count, width), _DOUBLE)
        length = c_int64()
        options = _ON_ONE_THREAD if count < FEW else self._options
        try:
            self._predict(
                *(self._handle, address(rows), _TYPES[rows.dtype], count, features, _ROW_MAJOR),
                *(kind, _FROM_FIRST_TREE, _TO_LAST_TREE, options, byref(length), address(results)),
            )
        except NativeError as error:
            raise Internal(f"lightgbm error: {error}") from error
        return results


class _SingleRow:
    """Predicts one row with what LightGBM otherwise makes anew in each call, which takes as long as 500 trees."""

    def __init__(self, engine: LightgbmEngine, opened: Library, booster: c_void_p, forest: ForestDescription) -> None:
        self._width = forest.width
        self._prepared: dict[Any, c_void_p] = {}
        prepare = opened.function(_PREPARE, c_void_p, c_int, c_int, c_int, c_int, c_int32, c_char_p, c_void_p)
        free = opened.function("LGBM_FastConfigFree", c_void_p)
        for dtype, number in _TYPES.items():
            handle = c_void_p()
            prepare(
                *(booster, _VALUES, _FROM_FIRST_TREE, _TO_LAST_TREE, number),
                *(forest.features, _ON_ONE_THREAD, byref(handle)),
            )
            # Of the engine, too, and noted after the booster: what is noted last goes first.
            native.release(engine, free, handle)
            self._prepared[dtype] = handle
        self._predict = opened.function(
            "LGBM_BoosterPredictForMatSingleRowFast", c_void_p, c_void_p, c_void_p, c_void_p
        )
        self._lock = Lock()

    def predict(self, row: Array) -> Array | None:
        """Return the numbers of a row; None while another thread computes in the same memory. Raises ``Internal``."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            results, length = np.empty((1, self._width), _DOUBLE), c_int64()
            self._predict(self._prepared[row.dtype], address(row), byref(length), address(results))
        except NativeError as error:
            raise Internal(f"lightgbm error: {error}") from error
        finally:
            self._lock.release()
        return results


# XGBoost's library, for the models that it wrote.

_XGBOOST_VALUES, _XGBOOST_CONTRIBUTIONS = 0, 2
_BLOCK: Final = 64
"""Rows that XGBoost computes with one thread, however many it has; see ``FEW`` for what the others would cost."""
_MISSING: Final = float("nan")


def xgboost_library() -> Path | None:
    """Return where XGBoost's library is, or None where it is not installed."""
    return native.find("xgboost", "libxgboost")


class XgboostEngine:
    """A booster, whose answers are XGBoost's to the last bit; and another of one thread, for batches of few rows."""

    name = "xgboost"
    takes: tuple[np.dtype[Any], ...] = (_FLOAT,)

    def __init__(self, path: Path, forest: ForestDescription, threads: int) -> None:
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
        self._configuration = _configuration(_XGBOOST_VALUES)
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
        configuration = _configuration(_XGBOOST_CONTRIBUTIONS)
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


# treelite's own engine, which computes every model that treelite reads.


class GtilEngine:
    """General Tree Inference Library: it computes everything, and many rows slowly."""

    name = "treelite"

    def __init__(self, forest: Forest, threads: int) -> None:
        self._width = forest.description.width
        self._dtype = forest.description.dtype
        self._predict = forest.predictor(threads)
        self._predict_few = forest.predictor(1)
        self.takes: tuple[np.dtype[Any], ...] = (self._dtype,)

    def predict(self, rows: Array) -> Array:
        """Return the forest's numbers for each row. Raises ``Internal``."""
        results = np.zeros((len(rows), self._width), self._dtype)
        try:
            predict = self._predict_few if len(rows) < FEW else self._predict
            predict(address(rows), len(rows), address(results))
        except NativeError as error:
            raise Internal(f"treelite error: {error}") from error
        return results


# nvForest, on a GPU: the library that was cuML's Forest Inference Library.
#
# Written against its documented interface (26.10), and not yet run by us: no machine of ours had it installed.

_MODEL_TYPES: Final = {"xgboost": "xgboost_legacy"}


class NvforestEngine:
    """A forest on one GPU."""

    name = "nvforest"
    takes: tuple[np.dtype[Any], ...] = (np.dtype(np.float32),)

    def __init__(self, name: str, forest: ForestDescription, parameters: Parameters, device: int) -> None:
        """Load the forest's file on a GPU. Raises ``NeriteError`` with what has to be installed, or what is wrong."""
        try:
            nvforest: Any = importlib.import_module("nvforest")
        except ImportError as error:
            raise NotInstalled(
                f"model '{name}' has an instance_group of KIND_GPU, and nvForest is not installed ({error}): "
                "pip install nvforest-cu12 or nvforest-cu13, or set kind: KIND_CPU"
            ) from error
        model_type = forest.artifact.model_type
        try:
            model = nvforest.load_model(
                forest.artifact.path,
                model_type=_MODEL_TYPES.get(model_type, model_type),
                device="gpu",
                device_id=device,
                layout=parameters.layout,
                default_chunk_size=parameters.chunk_size or None,
            )
        except Exception as error:  # Whatever it raises says why the model cannot be loaded.
            raise InvalidArgument(f"unable to load model '{name}' on GPU {device}: {error}") from error
        self._width = forest.width
        self._predict = getattr(model, "predict_proba", model.predict)

    def predict(self, rows: Array) -> Array:
        """Return the forest's numbers for each row. Raises ``Internal``."""
        try:
            found = self._predict(rows)
            found = found.get() if hasattr(found, "get") else found
            found = np.asarray(found).reshape(len(rows), -1)
            # Both of two classes, where the other engines tell of the second.
            found = found[:, 1:] if found.shape[1] == 2 and self._width == 1 else found
            return np.ascontiguousarray(found.reshape(len(rows), self._width))
        except NeriteError:
            raise
        except Exception as error:  # Whatever it raises says why it cannot compute this batch.
            raise Internal(f"nvforest error: {error}") from error
