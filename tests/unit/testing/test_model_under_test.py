"""``nerite.testing``: a model in a plain test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from nerite.core.errors import InvalidArgument, NeriteError, NotFound
from nerite.testing import Request, load_model
from serving import PATIENCE

SOURCE = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            if tensor.as_numpy().size == 0:
                raise LookupError("nothing there")
            tensors = [pb_utils.Tensor("OUTPUT0", tensor.as_numpy() + 1)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
CONFIG = """\
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "adder" / "1").mkdir(parents=True)
    (tmp_path / "adder" / "1" / "model.py").write_text(SOURCE)
    (tmp_path / "adder" / "config.pbtxt").write_text(CONFIG)
    return tmp_path / "adder"


class Echo:
    """A model that answers with what it got, in every way that a test may want to see."""

    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config.add_input({"name": "WORDS", "data_type": "TYPE_STRING", "dims": [-1], "optional": True})
        config.add_input({"name": "HALVES", "data_type": "TYPE_BF16", "dims": [-1], "optional": True})
        config.add_output({"name": "WORDS", "data_type": "TYPE_STRING", "dims": [-1]})
        config.add_output({"name": "HALVES", "data_type": "TYPE_BF16", "dims": [-1]})
        config.set_max_batch_size(4)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        self.args = args
        self.finalized = False

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        self.requests = requests
        return [pb_utils.InferenceResponse(request.inputs()) for request in requests]

    def finalize(self) -> None:
        self.finalized = True


def test_a_directory(directory: Path) -> None:
    with load_model(directory) as model:
        assert model.infer({"INPUT0": np.zeros(2, np.float32)})["OUTPUT0"].tolist() == [1, 1]
        assert model.infer({"INPUT0": [1, 2]})["OUTPUT0"].dtype == np.float32
        assert model.config["input"][0]["data_type"] == "TYPE_FP32"
        assert model.model.args["model_instance_name"] == "adder_0"
        assert model.model.args["model_repository"] == str(directory)
        assert model.is_ready()


def test_another_version(directory: Path) -> None:
    (directory / "2").mkdir()
    (directory / "2" / "model.py").write_text(SOURCE.replace("+ 1", "+ 2"))
    with load_model(str(directory), version=2) as two, load_model(directory) as one:
        assert two.infer({"INPUT0": [0]})["OUTPUT0"].tolist() == [2]
        assert one.infer({"INPUT0": [0]})["OUTPUT0"].tolist() == [1]


def test_a_configuration_of_the_tests_own(directory: Path) -> None:
    config = {
        "backend": "python",
        "max_batch_size": 2,
        "input": [],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    with load_model(directory, config) as model:
        assert model.config["max_batch_size"] == 2
        with pytest.raises(InvalidArgument, match="unexpected inference input 'INPUT0' for model 'adder'"):
            model.infer({"INPUT0": [1.0]})


def test_a_wrong_configuration_shows_all_mistakes_with_their_lines(directory: Path) -> None:
    (directory / "config.pbtxt").write_text(CONFIG.replace("FP32", "FP33"))
    with pytest.raises(ValueError, match=r"config\.pbtxt:2:.*TYPE_FP33[\s\S]*config\.pbtxt:3:.*TYPE_FP33"):
        load_model(directory)


def test_a_class() -> None:
    with load_model(Echo) as model:
        words = model.infer({"WORDS": [["a", "bé"]]})["WORDS"]
        assert words.tolist() == [[b"a", "bé".encode()]]
        assert model.infer({"WORDS": np.array([["a"]])})["WORDS"].tolist() == [[b"a"]]
        assert model.config["max_batch_size"] == 4
        echo = model.model
    assert echo.finalized


def test_bf16_is_given_and_taken_as_words() -> None:
    with load_model(Echo) as model:
        halves = model.infer({"HALVES": np.array([[0x3F80]], np.uint16)})["HALVES"]
    assert halves.dtype == np.uint16
    assert halves.tolist() == [[0x3F80]]


def test_what_a_client_may_say() -> None:
    with load_model(Echo) as model:
        answer = model.infer(
            {"WORDS": [["a"]], "HALVES": np.zeros((1, 1), np.uint16)},
            id="7",
            outputs=["HALVES"],
            parameters={"k": "v"},
            timeout_us=5,
            sequence_id=9,
            sequence_start=True,
        )
        (seen,) = model.model.requests
        assert list(answer) == ["HALVES"]
        assert (seen.request_id(), seen.parameters(), seen.timeout()) == ("7", '{"k":"v"}', 5)
        assert (seen.correlation_id(), seen.flags()) == (9, 1)


def test_a_batch() -> None:
    with load_model(Echo) as model:
        one, two = model.execute([{"WORDS": [["a"]]}, Request({"WORDS": [["b"], ["c"]]}, id="2")])
        assert isinstance(one, dict)
        assert isinstance(two, dict)
        assert [one["WORDS"].tolist(), two["WORDS"].tolist()] == [[[b"a"]], [[b"b"], [b"c"]]]
        assert [request.request_id() for request in model.model.requests] == ["", "2"]


def test_answers_and_inputs_are_the_tests_own(directory: Path) -> None:
    class InPlace:
        def execute(self, requests: list[Any]) -> list[pb_utils.InferenceResponse]:
            self.array = requests[0].inputs()[0].as_numpy()
            self.array += 1
            return [pb_utils.InferenceResponse([pb_utils.Tensor("X", self.array)])]

    tensor = {"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}
    given = np.zeros(2, np.float32)
    with load_model(InPlace, {"input": [tensor], "output": [tensor]}) as model:
        answer = model.infer({"X": given})
        model.model.array += 1
    assert given.tolist() == [0, 0]
    assert answer["X"].tolist() == [1, 1]


def test_the_models_own_exception(directory: Path) -> None:
    with load_model(directory) as model, pytest.raises(LookupError, match=r"^nothing there$") as raised:
        model.infer({"INPUT0": np.zeros(0, np.float32)})
    assert raised.traceback[-1].path == directory / "1" / "model.py"
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("self.args = args", "raise LookupError('begin')", LookupError),
        ("import numpy as np", "import nothing_of_that_name", ModuleNotFoundError),
        ("class TritonPythonModel", "class Model", AttributeError),
        (
            "    def initialize",
            "    @staticmethod\n    def auto_complete_config(c):\n        1 / 0\n\n    def initialize",
            ZeroDivisionError,
        ),
    ],
)
def test_the_models_own_exception_while_it_is_loaded(
    old: str, new: str, kind: type[Exception], directory: Path
) -> None:
    (directory / "1" / "model.py").write_text(SOURCE.replace(old, new))
    path = list(sys.path)
    with pytest.raises(kind):
        load_model(directory)
    assert sys.path == path


def test_a_wrong_answer(directory: Path) -> None:
    (directory / "1" / "model.py").write_text(SOURCE.replace("return responses", "return None"))
    with load_model(directory) as model, pytest.raises(NeriteError, match="Expected a list in the execute return"):
        model.infer({"INPUT0": [1]})


def test_an_error_for_an_answer() -> None:
    class Refusing:
        def execute(self, requests: list[Any]) -> list[pb_utils.InferenceResponse]:
            error = pb_utils.TritonError("no such user", pb_utils.TritonError.NOT_FOUND)
            return [pb_utils.InferenceResponse(error=error) for _ in requests]

    with load_model(Refusing) as model:
        with pytest.raises(NotFound, match=r"^no such user$"):
            model.infer({})
        (answer,) = model.execute([{}])
        assert isinstance(answer, NotFound)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({}, "expected 1 inputs but got 0 inputs for model 'adder'"),
        (
            {"INPUT0": np.zeros(1, np.int64)},
            "inference input 'INPUT0' data-type is 'INT64', but model 'adder' expects 'FP32'",
        ),
        ({"INPUT0": np.zeros((1, 1), np.float32)}, r"unexpected shape for input 'INPUT0' for model 'adder'"),
    ],
)
def test_requests_are_checked_as_in_the_server(inputs: dict[str, Any], text: str, directory: Path) -> None:
    with load_model(directory) as model, pytest.raises(InvalidArgument, match=text):
        model.infer(inputs)


def test_pytest_shows_the_model_and_nothing_of_ours(directory: Path) -> None:
    (directory.parent / "test_it.py").write_text(
        "import numpy as np\nfrom nerite.testing import load_model\n\n\ndef test_it():\n"
        "    with load_model('adder') as model:\n        model.infer({'INPUT0': np.zeros(0, np.float32)})\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "test_it.py"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=directory.parent,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
    )
    assert 'raise LookupError("nothing there")' in done.stdout
    assert "nerite/" not in done.stdout


def test_shapes_of_callers_and_of_the_model(directory: Path) -> None:
    config = CONFIG.replace("dims: [ -1 ]", "dims: [ 4 ] reshape { shape: [ 2, 2 ] }")
    (directory / "config.pbtxt").write_text(config)
    source = SOURCE.replace("tensor.as_numpy() + 1", "tensor.as_numpy() @ np.ones((2, 2), np.float32)")
    (directory / "1" / "model.py").write_text(source)
    with load_model(directory) as model:
        assert model.infer({"INPUT0": np.arange(4, dtype=np.float32)})["OUTPUT0"].tolist() == [1, 1, 5, 5]
