"""TensorFlow and LiteRT pass the tests that every backend has to pass."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

from nerite.frameworks.litert import LiteRtBackend
from nerite.frameworks.tensorflow import TensorFlowBackend
from nerite.testing import Answer, BackendContract

ROWS = [{"x": np.full((rows, 4), rows, np.float32)} for rows in (1, 2, 1)]


class OfTensorFlow(BackendContract):
    artifact: str
    filename: str

    @pytest.fixture(autouse=True)
    def _made(self, tensorflow_artifacts: Path) -> None:
        self.artifacts = tensorflow_artifacts

    def write_model(self, directory: Path) -> None:
        (directory / "1").mkdir(parents=True)
        artifact, place = self.artifacts / self.artifact, directory / "1" / self.filename
        if artifact.is_dir():
            shutil.copytree(artifact, place)
        else:
            shutil.copy(artifact, place)


class Scaled(OfTensorFlow):
    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return ROWS

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        return {"doubled": inputs["x"] * 2, "total": inputs["x"].sum(1, keepdims=True)}


class TestSavedModel(Scaled):
    backend = TensorFlowBackend()
    artifact = "scaled"
    filename = "model.savedmodel"

    def break_model(self, directory: Path) -> None:
        (directory / "1" / self.filename / "saved_model.pb").write_bytes(b"no model")


class TestFrozenGraph(OfTensorFlow):
    backend = TensorFlowBackend()
    artifact = "frozen.pb"
    filename = "model.graphdef"

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [{"a": each["x"], "b": np.ones_like(each["x"])} for each in ROWS]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        a, b = inputs["a"], inputs["b"]
        return {"sum": a + b, "halves": (a - b)[:, :2], "halves:1": (a - b)[:, 2:]}

    def break_model(self, directory: Path) -> None:
        (directory / "1" / self.filename).write_bytes(b"no model")


class TestSavedModelStrings(OfTensorFlow):
    backend = TensorFlowBackend()
    artifact = "shouted"
    filename = "model.savedmodel"

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [{"t": [["ant"]]}, {"t": [["bee"], ["cat"]]}]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        loud = [text.upper() for text in inputs["t"].flat]
        return {"loud": np.array(loud, object).reshape(inputs["t"].shape)}


class TestLiteRt(Scaled):
    backend = LiteRtBackend()
    artifact = "scaled.tflite"
    filename = "model.tflite"

    def break_model(self, directory: Path) -> None:
        (directory / "1" / self.filename).write_bytes(b"no model")


class TestLiteRtStrings(OfTensorFlow):
    backend = LiteRtBackend()
    artifact = "upright.tflite"
    filename = "model.tflite"

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [{"t": [["ant", "bee"]]}, {"t": [["cat", ""], ["dog", "eel"]]}]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        return {"out": inputs["t"][..., None]}
