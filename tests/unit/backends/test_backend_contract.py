"""Our own backends pass the tests that every backend has to pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from onnx import TensorProto

import onnx_models
from nerite.backends.onnxruntime import OnnxRuntimeBackend
from nerite.backends.python import PythonBackend
from nerite.testing import Answer, BackendContract

MATRICES = [{"A": np.full((rows, 4), rows, np.float32), "B": np.ones((rows, 4), np.float32)} for rows in (1, 2)]

ADD_SUB = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        for name in ("A", "B"):
            config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [-1]})
        for name in ("SUM", "DIFFERENCE"):
            config.add_output({"name": name, "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(8)
        return config

    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "AB"]
            if a.size and a[0, 0] < 0:
                raise ValueError("no negative numbers")
            outputs = [pb_utils.Tensor("SUM", a + b), pb_utils.Tensor("DIFFERENCE", a - b)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
SHOUT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy() for request in requests]
        shouts = [np.array([each.upper() for each in text.flat], object).reshape(text.shape) for text in texts]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SHOUT", shout)]) for shout in shouts]
"""


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class AddsAndSubtracts(BackendContract):
    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [*MATRICES, {**MATRICES[0], "B": np.full((1, 4), 7, np.float32)}]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        return {"SUM": inputs["A"] + inputs["B"], "DIFFERENCE": inputs["A"] - inputs["B"]}


class TestPython(AddsAndSubtracts):
    backend = PythonBackend()

    def write_model(self, directory: Path) -> None:
        written(directory / "1" / "model.py", ADD_SUB)

    def bad_request(self) -> Mapping[str, ArrayLike]:
        return {**MATRICES[0], "A": np.full((1, 4), -1, np.float32)}

    def break_model(self, directory: Path) -> None:
        written(directory / "1" / "model.py", ADD_SUB + "\n)")


class TestPythonStrings(BackendContract):
    backend = PythonBackend()

    def write_model(self, directory: Path) -> None:
        written(directory / "1" / "model.py", SHOUT)
        tensors = 'input { name: "TEXT" data_type: TYPE_STRING dims: -1 }'
        outputs = 'output { name: "SHOUT" data_type: TYPE_STRING dims: -1 }'
        written(directory / "config.pbtxt", f'backend: "python" {tensors} {outputs}')

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [{"TEXT": ["ant"]}, {"TEXT": ["bee", "cat"]}]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        shouts = [text.upper() for text in inputs["TEXT"].flat]
        return {"SHOUT": np.array(shouts, object).reshape(inputs["TEXT"].shape)}


class TestOnnxRuntime(AddsAndSubtracts):
    backend = OnnxRuntimeBackend()

    def write_model(self, directory: Path) -> None:
        onnx_models.save(directory, onnx_models.add_sub())

    def break_model(self, directory: Path) -> None:
        written(directory / "1" / "model.onnx", "no model")


class TestOnnxRuntimeStrings(BackendContract):
    backend = OnnxRuntimeBackend()

    def write_model(self, directory: Path) -> None:
        onnx_models.save(directory, onnx_models.identity(("N", "M"), TensorProto.STRING))

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [{"IN": [["ant"]]}, {"IN": [["bee"]]}, {"IN": [["cat", "dog"]]}]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        return {"OUT": inputs["IN"]}
