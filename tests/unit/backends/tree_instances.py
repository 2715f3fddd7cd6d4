"""Forests that are opened and called without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx_models import decoded, request

from nerite.backends.interface import InstanceContext, Marks, ModelContext
from nerite.backends.trees import TreesBackend
from nerite.core.request import InferenceRequest
from tree_models import ROWS, Forest


def context(directory: Path, config: Mapping[str, Any] | None = None, **settings: str) -> ModelContext:
    return ModelContext("m", 1, directory, {"max_batch_size": 128, **(config or {})}, settings)


def parameters(**values: str) -> dict[str, Any]:
    return {"parameters": {key: {"string_value": value} for key, value in values.items()}}


def output(*dims: int, kind: str = "TYPE_FP32", name: str = "output__0") -> dict[str, Any]:
    return {"name": name, "data_type": kind, "dims": list(dims)}


def save(forest: Forest, directory: Path, filename: str = "") -> Path:
    path = directory / "1" / (filename or forest.filename)
    path.parent.mkdir(parents=True, exist_ok=True)
    forest.save(path)
    return path


class Opened:
    """A model with one instance, opened as the server does it: complete, then open."""

    def __init__(
        self, directory: Path, forest: Forest | None = None, config: Mapping[str, Any] | None = None, kind: str = "CPU"
    ) -> None:
        if forest is not None:
            save(forest, directory)
        first = context(directory, config)
        backend = TreesBackend()
        self.config = backend.complete(first)
        self.model = backend.open(ModelContext("m", 1, directory, self.config, {}, first.memo))
        self.instance = self.model.instance(InstanceContext("m_0", kind))

    def execute(self, *requests: InferenceRequest) -> list[dict[str, Any]]:
        return [decoded(response) for response in self.instance.execute(requests, Marks())]  # type: ignore[arg-type]

    def answer(self, rows: Any = ROWS, outputs: Sequence[str] = ()) -> Any:
        """Send rows in one request, and return the prediction."""
        return self.execute(request(outputs, input__0=rows))[0]["output__0"]

    def joined(self, *parts: Any) -> list[Any]:
        """Send parts in a request each, as one batch; return their predictions."""
        return [answer["output__0"] for answer in self.execute(*(request(input__0=part) for part in parts))]


def as_rows(values: Any) -> Any:
    """Return what a library predicts in the shape in which it is served: rows, each with at least one number."""
    return np.asarray(values).reshape(len(values), -1)
