"""OpenVINO passes the tests that every backend has to pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import openvino_models
from numpy.typing import ArrayLike

from nerite.frameworks.openvino import OpenVinoBackend
from nerite.testing import Answer, BackendContract

ONES = np.ones((1, 4), np.float32)
TEXT = """
backend: "openvino"
max_batch_size: 4
input { name: "IN" data_type: TYPE_STRING dims: -1 }
output { name: "OUT" data_type: TYPE_STRING dims: -1 }
"""


class TestOpenVino(BackendContract):
    backend = OpenVinoBackend()

    def write_model(self, directory: Path) -> None:
        openvino_models.save(directory, openvino_models.add_sub())

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [
            {"A": ONES, "B": ONES * 7},
            {"A": ONES * 2, "B": ONES},
            {"A": np.vstack([ONES] * 2), "B": np.eye(2, 4, dtype=np.float32)},
        ]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        return {"SUM": inputs["A"] + inputs["B"], "DIFFERENCE": inputs["A"] - inputs["B"]}

    def break_model(self, directory: Path) -> None:
        (directory / "1" / "model.bin").unlink()
        (directory / "1" / "model.xml").write_text("no model")


class TestOpenVinoStrings(BackendContract):
    backend = OpenVinoBackend()

    def write_model(self, directory: Path) -> None:
        made = openvino_models.identity((-1, -1), openvino_models.ov.Type.string)
        openvino_models.save(directory, made)
        (directory / "config.pbtxt").write_text(TEXT)

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [{"IN": [["ant"]]}, {"IN": [["bee"]]}, {"IN": [["cat", "dog"]]}]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        return {"OUT": inputs["IN"]}
