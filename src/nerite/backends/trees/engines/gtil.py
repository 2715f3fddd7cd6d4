"""treelite's own engine, which computes every model that treelite reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from nerite.backends.trees.engines.engine import FEW, address
from nerite.backends.trees.forest import Forest
from nerite.backends.trees.native import NativeError
from nerite.core.errors import Internal
from nerite.core.tensor import Array


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
