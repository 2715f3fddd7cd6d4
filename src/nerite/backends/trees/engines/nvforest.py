"""nvForest, on a GPU: the library that was cuML's Forest Inference Library.

Written against its documented interface (26.10), and not yet run by us: no machine of ours had it installed.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import numpy as np

from nerite.backends.trees.forest import Description
from nerite.backends.trees.parameters import Parameters
from nerite.core.errors import Internal, InvalidArgument, NeriteError, NotHere
from nerite.core.tensor import Array

_MODEL_TYPES: Final = {"xgboost": "xgboost_legacy"}


class NvforestEngine:
    """A forest on one GPU."""

    name = "nvforest"
    takes: tuple[np.dtype[Any], ...] = (np.dtype(np.float32),)

    def __init__(self, name: str, forest: Description, parameters: Parameters, device: int) -> None:
        """Load the forest's file on a GPU. Raises ``NeriteError`` with what has to be installed, or what is wrong."""
        try:
            nvforest: Any = importlib.import_module("nvforest")
        except ImportError as error:
            raise NotHere(
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
