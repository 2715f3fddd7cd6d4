"""Engines that compute forests on CPUs and GPUs, and the choice between them.

``docs/decisions/0006-tree-engines.md`` says why each is used as it is, and what it was measured to take.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from math import prod
from threading import Lock
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from nerite.backends import gpu_builds
from nerite.core.errors import InvalidArgument, NotInstalled
from nerite.core.tensor import Array
from nerite.frameworks.trees import native
from nerite.frameworks.trees.forest import Forest, ForestDescription
from nerite.frameworks.trees.native import MissingLibrary, NativeError, address
from nerite.frameworks.trees.onnx_engine import OnnxruntimeEngine
from nerite.frameworks.trees.parameters import Parameters

_log = logging.getLogger("nerite.frameworks.trees")
_DOUBLE: Final = np.dtype(np.float64)
_FLOAT: Final = np.dtype(np.float32)
_FEW: Final = 8
"""Batches of fewer rows are computed by one thread: waking others costs more. On a machine with other work it can cost
a hundred times as much, because OpenMP waits for every thread at the end of every loop."""

ReadForest: TypeAlias = Callable[[], Forest]
"""Returns the model as treelite reads it, which most engines do not need."""


class ForestEngine(Protocol):
    """A forest that is ready to compute. Thread-safe; instances with the same number of threads share it."""

    name: str
    """Value of the parameter ``engine``."""
    takes: tuple[np.dtype[Any], ...]
    """Accepted types of rows. Rows of other types are converted to the first."""

    def predict(self, rows: Array) -> Array:
        """Return the forest's ``width`` numbers for each row, in memory of their own. Raises ``NativeError``.

        ``rows`` are contiguous and aligned, one or more, as wide as the forest has features.
        """


@runtime_checkable
class Explainer(Protocol):
    """An engine that also explains its predictions."""

    def contributions(self, rows: Array) -> Array:
        """Return, for each row and each predicted number, the contribution of each feature, and the bias.

        Raises ``NativeError``.
        """


class LightgbmEngine:
    """A booster of LightGBM. It computes in doubles, from rows of either precision."""

    name = "lightgbm"
    takes: tuple[np.dtype[Any], ...] = (_DOUBLE, _FLOAT)
    _TYPES: Final[dict[Any, int]] = {_FLOAT: 0, _DOUBLE: 1}
    _VALUES, _CONTRIBUTIONS = 0, 3
    _ROW_MAJOR = 1
    _FIRST_TREE, _LAST_TREE = 0, -1
    _ONE_THREAD = b"num_threads=1 verbosity=-1"
    _PREPARE = "LGBM_BoosterPredictForMatSingleRowFastInit"

    def __init__(self, forest: ForestDescription, threads: int, read: ReadForest) -> None:
        """Open a file that treelite has read. Raises ``NativeError`` if this version of LightGBM cannot."""
        library = native.library("lightgbm", "lib_lightgbm", "LGBM_GetLastError")
        self._width, self._features = forest.width, forest.features
        self._handle = c_void_p()
        path = str(forest.artifact.path).encode()
        library.call("LGBM_BoosterCreateFromModelfile", path, byref(c_int()), byref(self._handle))
        native.release(self, library.function("LGBM_BoosterFree"), self._handle)
        self._predict = library.function(
            "LGBM_BoosterPredictForMat",
            *(c_void_p, c_void_p, c_int, c_int32, c_int32, c_int),
            *(c_int, c_int, c_int, c_char_p, c_void_p, c_void_p),
        )
        self._options = f"num_threads={threads} verbosity=-1".encode()
        self._single: dict[np.dtype[Any], c_void_p] = {}
        """For single rows, by their type: what LightGBM otherwise sets up in each call, which takes as long as 500
        trees. Its memory can be used by one thread at a time. Empty for versions that do not have it."""
        self._lock = Lock()
        if library.has(self._PREPARE):
            for dtype, number in self._TYPES.items():
                handle = c_void_p()
                library.call(
                    *(self._PREPARE, self._handle, self._VALUES, self._FIRST_TREE, self._LAST_TREE, number),
                    *(c_int32(forest.features), self._ONE_THREAD, byref(handle)),
                )
                # Registered after the booster, so that it is released before it.
                native.release(self, library.function("LGBM_FastConfigFree"), handle)
                self._single[dtype] = handle
            self._predict_single = library.function(
                "LGBM_BoosterPredictForMatSingleRowFast", c_void_p, c_void_p, c_void_p, c_void_p
            )

    def predict(self, rows: Array) -> Array:
        """Return the forest's numbers for each row. Raises ``NativeError``."""
        if len(rows) == 1 and self._single and self._lock.acquire(blocking=False):
            try:
                results, length = np.empty((1, self._width), _DOUBLE), c_int64()
                self._predict_single(self._single[rows.dtype], address(rows), byref(length), address(results))
            finally:
                self._lock.release()
            return results
        return self._numbers(rows, self._VALUES, self._width)

    def contributions(self, rows: Array) -> Array:
        """Return the contribution of each feature to each number. Raises ``NativeError``."""
        return self._numbers(rows, self._CONTRIBUTIONS, self._width * (self._features + 1))

    def _numbers(self, rows: Array, kind: int, width: int) -> Array:
        count, features = rows.shape
        results = np.empty((count, width), _DOUBLE)
        options = self._ONE_THREAD if count < _FEW else self._options
        self._predict(
            *(self._handle, address(rows), self._TYPES[rows.dtype], count, features, self._ROW_MAJOR),
            *(kind, self._FIRST_TREE, self._LAST_TREE, options, byref(c_int64()), address(results)),
        )
        return results


class XgboostEngine:
    """A booster of XGBoost, whose answers are XGBoost's to the last bit, and one of a single thread for few rows."""

    name = "xgboost"
    takes: tuple[np.dtype[Any], ...] = (_FLOAT,)
    _VALUES, _CONTRIBUTIONS = 0, 2
    _FEW = 64
    """XGBoost computes that many rows in one block, with one thread however many it has."""

    def __init__(self, forest: ForestDescription, threads: int, read: ReadForest) -> None:
        """Open a file that treelite has read. Raises ``NativeError`` if this version of XGBoost cannot."""
        self._library = native.library("xgboost", "libxgboost", "XGBGetLastError")
        self._width, self._features = forest.width, forest.features
        self._threads = threads
        self._predict = self._library.function(
            "XGBoosterPredictFromDense", *(c_void_p, c_char_p, c_char_p, c_void_p), *(c_void_p, c_void_p, c_void_p)
        )
        self._configuration = self._configured(self._VALUES)
        # From memory, because XGBoost derives the format of a file from its name.
        raw = forest.artifact.path.read_bytes()
        self._booster = self._opened(raw, threads)
        self._booster_few = self._booster if threads == 1 else self._opened(raw, 1)

    def predict(self, rows: Array) -> Array:
        """Return the forest's numbers for each row. Raises ``NativeError``."""
        booster = self._booster_few if len(rows) <= self._FEW else self._booster
        arguments = (booster, self._interface(rows), self._configuration, None)
        return self._numbers(self._predict, len(rows), self._width, *arguments)

    def contributions(self, rows: Array) -> Array:
        """Return the contribution of each feature to each number. Raises ``NativeError``."""
        width = self._width * (self._features + 1)
        options = json.dumps({"missing": float("nan"), "nthread": self._threads}).encode()
        matrix = c_void_p()
        self._library.call("XGDMatrixCreateFromDense", self._interface(rows), options, byref(matrix))
        try:
            predict = self._library.function("XGBoosterPredictFromDMatrix")
            arguments = (self._booster, matrix, self._configured(self._CONTRIBUTIONS))
            return self._numbers(predict, len(rows), width, *arguments)
        finally:
            self._library.call("XGDMatrixFree", matrix)

    def _opened(self, raw: bytes, threads: int) -> c_void_p:
        """Return a booster that computes with ``threads`` threads; it is released with this engine."""
        call = self._library.call
        booster = c_void_p()
        call("XGBoosterCreate", None, c_uint64(0), byref(booster))
        native.release(self, self._library.function("XGBoosterFree"), booster)
        call("XGBoosterLoadModelFromBuffer", booster, raw, c_uint64(len(raw)))
        call("XGBoosterSetParam", booster, b"nthread", str(threads).encode())
        length, text = c_size_t(), c_char_p()
        call("XGBoosterSaveJsonConfig", booster, byref(length), byref(text))
        if json.loads(text.value or b"{}")["learner"]["objective"]["name"] == "multi:softmax":
            # Such a model predicts only the class; this one predicts its probabilities.
            call("XGBoosterSetParam", booster, b"objective", b"multi:softprob")
        return booster

    @staticmethod
    def _configured(kind: int) -> bytes:
        options = {"type": kind, "training": False, "iteration_begin": 0, "iteration_end": 0, "strict_shape": True}
        return json.dumps({**options, "missing": float("nan"), "cache_id": 0}).encode()

    @staticmethod
    def _interface(rows: Array) -> bytes:
        """Return the description of an array in memory, as XGBoost expects it."""
        count, features = rows.shape
        return b'{"data":[%d,true],"shape":[%d,%d],"typestr":"<f4","version":3}' % (address(rows), count, features)

    @staticmethod
    def _numbers(function: native.Function, rows: int, width: int, *arguments: Any) -> Array:
        shape, dims, result = c_void_p(), c_uint64(), c_void_p()
        function(*arguments, byref(shape), byref(dims), byref(result))
        sizes = (c_uint64 * dims.value).from_address(shape.value or 0)
        count = rows * width
        if prod(sizes) != count:
            raise NativeError(f"a prediction of shape {list(sizes)}, where {rows} by {width} were expected")
        # A copy, because the memory is overwritten by the thread's next prediction.
        raw = ctypes.string_at(result.value or 0, count * _FLOAT.itemsize)
        return np.ndarray((rows, width), _FLOAT, raw)


class GtilEngine:
    """treelite's General Tree Inference Library, which computes every model that treelite reads; slow for many rows."""

    name = "treelite"

    def __init__(self, forest: ForestDescription, threads: int, read: ReadForest) -> None:
        model = read()
        self._width, self._dtype = forest.width, forest.dtype
        self._predict, self._predict_few = model.predictor(threads), model.predictor(1)
        self.takes: tuple[np.dtype[Any], ...] = (self._dtype,)

    def predict(self, rows: Array) -> Array:
        """Return the forest's numbers for each row. Raises ``NativeError``."""
        results = np.zeros((len(rows), self._width), self._dtype)
        predict = self._predict_few if len(rows) < _FEW else self._predict
        predict(address(rows), len(rows), address(results))
        return results


class NvforestEngine:
    """A forest on one GPU, computed by nvForest, which was cuML's Forest Inference Library.

    Written to its documented interface (26.10), and not yet run: no machine with it was available.
    """

    name = "nvforest"
    takes: tuple[np.dtype[Any], ...] = (_FLOAT,)

    def __init__(self, name: str, forest: ForestDescription, parameters: Parameters, device: int) -> None:
        """Load the forest's file on a GPU. Raises ``NeriteError`` if that fails or nvForest is not installed."""
        try:
            nvforest: Any = importlib.import_module("nvforest")
        except ImportError as error:
            raise NotInstalled(
                f"model '{name}' has an instance_group of KIND_GPU, and nvForest cannot be imported ({error}). Set "
                f"kind: KIND_CPU, or {gpu_builds.remedy_here('fil')}"
            ) from error
        model_type = forest.artifact.model_type
        try:
            model = nvforest.load_model(
                forest.artifact.path,
                model_type="xgboost_legacy" if model_type == "xgboost" else model_type,
                device="gpu",
                device_id=device,
                layout=parameters.layout,
                default_chunk_size=parameters.chunk_size or None,
            )
        except Exception as error:  # any error of the framework explains why the model cannot be loaded
            raise InvalidArgument(f"unable to load model '{name}' on GPU {device}: {error}") from error
        self._width = forest.width
        self._predict = getattr(model, "predict_proba", model.predict)

    def predict(self, rows: Array) -> Array:
        """Return the forest's numbers for each row. Raises ``NativeError``."""
        try:
            found = self._predict(rows)
            found = found.get() if hasattr(found, "get") else found
            found = np.asarray(found).reshape(len(rows), -1)
            # It predicts both of two classes, where the other engines predict the second.
            found = found[:, 1:] if found.shape[1] == 2 and self._width == 1 else found
            return np.ascontiguousarray(found.reshape(len(rows), self._width))
        except Exception as error:  # any error of the framework explains why it cannot compute this batch
            raise NativeError(str(error)) from error


ENGINES: Final[dict[str, Callable[[ForestDescription, int, ReadForest], ForestEngine]]] = {
    "xgboost": XgboostEngine,
    "lightgbm": LightgbmEngine,
    "onnxruntime": OnnxruntimeEngine,
    "treelite": GtilEngine,
}
"""Engines on CPUs, by the value of the parameter ``engine``."""


def open_engine(name: str, forest: ForestDescription, wanted: str, threads: int, read: ReadForest) -> ForestEngine:
    """Return an engine on the CPU. ``wanted`` is the parameter ``engine``.

    Raises ``NeriteError`` if the wanted one cannot compute this model, or is not installed.
    """
    own = explainer(forest)
    able = [*([own] if own else []), "onnxruntime", "treelite"]
    if wanted not in ("auto", *able):
        raise InvalidArgument(
            f"model '{name}' has 'engine': '{wanted}', but '{forest.artifact.path.name}' is of model_type "
            f"'{forest.artifact.model_type}'. Engines for it are: {', '.join(able)}"
        )
    reasons = []
    for engine in able if wanted == "auto" else [wanted]:
        try:
            opened = ENGINES[engine](forest, threads, read)
        except MissingLibrary:
            if wanted != "auto":
                raise NotInstalled(
                    f"model '{name}' has 'engine': '{wanted}', which is not installed: pip install {wanted}"
                ) from None
            reasons.append(f"{engine} is not installed")
        except (NativeError, OSError) as error:
            if wanted != "auto":
                raise InvalidArgument(f"unable to load model '{name}' with {wanted}: {error}") from error
            reasons.append(f"{engine} cannot: {error}")
        else:
            if reasons:
                _log.info("model '%s' is computed by %s; %s", name, engine, "; ".join(reasons))
            return opened
    raise AssertionError("treelite computes what it reads")


def explainer(forest: ForestDescription) -> str:
    """Return the name of the library that wrote a model and explains its predictions, or an empty string."""
    if forest.artifact.of_xgboost:
        return "xgboost"
    return "lightgbm" if forest.artifact.model_type == "lightgbm" else ""
