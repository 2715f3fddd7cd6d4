"""Forests that are opened and called without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import opened
from configs import as_backends_get_it
from nerite.backends.interface import ModelContext
from nerite.frameworks.trees import TreesBackend
from opened import request
from tree_models import ROWS, Forest


def context(directory: Path, config: Mapping[str, Any] | None = None, **settings: str) -> ModelContext:
    return ModelContext("m", 1, directory, as_backends_get_it({"max_batch_size": 128, **(config or {})}), settings)


def parameters(**values: str) -> dict[str, Any]:
    return {"parameters": {key: {"string_value": value} for key, value in values.items()}}


def output(*dims: int, kind: str = "TYPE_FP32", name: str = "output__0") -> dict[str, Any]:
    return {"name": name, "data_type": kind, "dims": list(dims)}


def save(forest: Forest, directory: Path, filename: str = "") -> Path:
    path = directory / "1" / (filename or forest.filename)
    path.parent.mkdir(parents=True, exist_ok=True)
    forest.save(path)
    return path


class Opened(opened.Opened):
    """Opened from a forest that is written first, or from None, where its file is there already."""

    def __init__(
        self, directory: Path, forest: Forest | None = None, config: Mapping[str, Any] | None = None, kind: str = "CPU"
    ) -> None:
        if forest is not None:
            save(forest, directory)
        super().__init__(TreesBackend(), context(directory, config), kind)

    def prediction(self, rows: Any = ROWS, outputs: Sequence[str] = ()) -> Any:
        """Send rows in one request, and return the prediction."""
        return self.answer(outputs, input__0=rows)["output__0"]

    def joined(self, *parts: Any) -> list[Any]:
        """Send parts in a request each, as one batch; return their predictions."""
        return [answer["output__0"] for answer in self.answers(*(request(input__0=part) for part in parts))]


def as_rows(values: Any) -> Any:
    """Return what a library predicts in the shape in which it is served: rows, each with at least one number."""
    return np.asarray(values).reshape(len(values), -1)
