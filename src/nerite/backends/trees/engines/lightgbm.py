"""LightGBM's library, for the models that it wrote."""

from __future__ import annotations

from ctypes import byref, c_char_p, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np

from nerite.backends.trees import native
from nerite.backends.trees.engines.engine import FEW, address
from nerite.backends.trees.forest import Description
from nerite.backends.trees.native import Library, NativeError
from nerite.core.errors import Internal
from nerite.core.tensor import Array

_DOUBLE: Final = np.dtype(np.float64)
_FLOAT: Final = np.dtype(np.float32)
_TYPES: Final = {_FLOAT: 0, _DOUBLE: 1}
_VALUES, _CONTRIBUTIONS = 0, 3
_ROW_MAJOR: Final = 1
_FROM_FIRST_TREE, _TO_LAST_TREE = 0, -1
_ON_ONE_THREAD: Final = b"num_threads=1 verbosity=-1"
_PREPARE: Final = "LGBM_BoosterPredictForMatSingleRowFastInit"


def library() -> Path | None:
    """Return where LightGBM's library is, or None where it is not installed."""
    return native.find("lightgbm", "lib_lightgbm")


class LightgbmEngine:
    """A booster. It computes in doubles, from rows of either precision."""

    name = "lightgbm"
    takes: tuple[np.dtype[Any], ...] = (_DOUBLE, _FLOAT)

    def __init__(self, path: Path, forest: Description, threads: int) -> None:
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

    def __init__(self, engine: LightgbmEngine, opened: Library, booster: c_void_p, forest: Description) -> None:
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
