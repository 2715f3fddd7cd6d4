"""LightGBM's library, for the models that it wrote."""

from __future__ import annotations

from ctypes import byref, c_char_p, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

import numpy as np

from nerite.backends.trees import native
from nerite.backends.trees.engines.engine import FEW, address
from nerite.backends.trees.forest import Description
from nerite.backends.trees.native import NativeError
from nerite.core.errors import Internal
from nerite.core.tensor import Array

_DOUBLE: Final = np.dtype(np.float64)
_FLOAT: Final = np.dtype(np.float32)
_TYPES: Final = {_FLOAT: 0, _DOUBLE: 1}
_VALUES, _CONTRIBUTIONS = 0, 3
_ROW_MAJOR: Final = 1
_FROM_FIRST_TREE, _TO_LAST_TREE = 0, -1


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
        self._options_few = b"num_threads=1 verbosity=-1"

    def predict(self, rows: Array) -> Array:
        """Return the forest's numbers for each row. Raises ``Internal``."""
        return self._numbers(rows, _VALUES, self._width)

    def contributions(self, rows: Array) -> Array:
        """Return the part of each feature in each number. Raises ``Internal``."""
        return self._numbers(rows, _CONTRIBUTIONS, self._width * (self._features + 1))

    def _numbers(self, rows: Array, kind: int, width: int) -> Array:
        count, features = rows.shape
        results = np.empty((count, width), _DOUBLE)
        length = c_int64()
        options = self._options_few if count < FEW else self._options
        try:
            self._predict(
                *(self._handle, address(rows), _TYPES[rows.dtype], count, features, _ROW_MAJOR),
                *(kind, _FROM_FIRST_TREE, _TO_LAST_TREE, options, byref(length), address(results)),
            )
        except NativeError as error:
            raise Internal(f"lightgbm error: {error}") from error
        return results
