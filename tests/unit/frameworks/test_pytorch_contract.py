"""The backend for PyTorch passes the tests that every backend has to pass, with models of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch_models import AddSub, export, python, script

from nerite.frameworks.pytorch import PyTorchBackend
from nerite.testing import Answer, BackendContract

ROWS = [{"a": np.full((rows, 4), rows, np.float32), "b": np.ones((rows, 4), np.float32)} for rows in (1, 2)]
CONFIG = """
backend: "pytorch"
max_batch_size: 8
dynamic_batching { }
input { name: "a" data_type: TYPE_FP32 dims: [ -1 ] }
input { name: "b" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT__1" data_type: TYPE_FP32 dims: [ -1 ] }
"""


class AddsAndSubtracts(BackendContract):
    backend = PyTorchBackend()

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [*ROWS, {**ROWS[0], "b": np.full((1, 4), 7, np.float32)}]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        return {"OUTPUT__0": inputs["a"] + inputs["b"], "OUTPUT__1": inputs["a"] - inputs["b"]}


class TestExported(AddsAndSubtracts):
    def write_model(self, directory: Path) -> None:
        batch = torch.export.Dim("batch")
        export(directory, AddSub(), (torch.zeros(2, 4), torch.ones(2, 4)), dynamic_shapes=({0: batch}, {0: batch}))

    def break_model(self, directory: Path) -> None:
        path = directory / "1" / "model.pt2"
        path.write_bytes(path.read_bytes()[:-100])


class TestTorchScript(AddsAndSubtracts):
    def write_model(self, directory: Path) -> None:
        script(directory, AddSub())
        (directory / "config.pbtxt").write_text(CONFIG)

    def bad_request(self) -> Mapping[str, ArrayLike]:
        return {**ROWS[0], "b": np.ones((1, 3), np.float32)}

    def break_model(self, directory: Path) -> None:
        (directory / "1" / "model.pt").write_bytes(b"PK")


class TestPython(AddsAndSubtracts):
    def write_model(self, directory: Path) -> None:
        python(directory, "class Net(nn.Module):\n    def forward(self, a, b):\n        return a + b, a - b\n")
        (directory / "config.pbtxt").write_text(CONFIG)

    def bad_request(self) -> Mapping[str, ArrayLike]:
        return {**ROWS[0], "b": np.ones((1, 3), np.float32)}

    def break_model(self, directory: Path) -> None:
        python(directory, ")")


class Shouts(nn.Module):
    def forward(self, text: list[str]) -> list[str]:
        return [each.upper() for each in text]


class TestStrings(BackendContract):
    backend = PyTorchBackend()

    def write_model(self, directory: Path) -> None:
        script(directory, Shouts())
        tensors = [f'{side} {{ name: "{side}__0" data_type: TYPE_STRING dims: [ 1 ] }}' for side in ("input", "output")]
        (directory / "config.pbtxt").write_text(f'backend: "pytorch" max_batch_size: 4 {" ".join(tensors)}')

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [{"input__0": [["ant"]]}, {"input__0": [["bee"]]}, {"input__0": [["cat"], ["dog"]]}]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        # TorchScript knows the letters of ASCII.
        shouts = [text.upper() for text in inputs["input__0"].flat]
        return {"output__0": np.array(shouts, object).reshape(inputs["input__0"].shape)}


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class TestWhatComesBackAsItIs(BackendContract):
    backend = PyTorchBackend()

    def write_model(self, directory: Path) -> None:
        script(directory, Same())
        tensors = [f'{side} {{ name: "{side}__0" data_type: TYPE_FP32 dims: [ -1 ] }}' for side in ("input", "output")]
        (directory / "config.pbtxt").write_text(f'backend: "pytorch" max_batch_size: 4 {" ".join(tensors)}')

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [{"input__0": np.full((1, 5000), value, np.float32)} for value in (1, 2)]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        return {"output__0": inputs["input__0"]}
