"""PyTorch models on a server: those of docs/pytorch.md, over both protocols, and what else happens to them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from pages import Page
from serving import Serving, serving

PAGE = Page("docs/pytorch.md")
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
WORDS = """
import torch


class Words(torch.nn.Module):
    def forward(self, words: list[str]) -> list[str]:
        return [word + "!" for word in words]


torch.jit.script(Words()).save("models/words/1/model.pt")
"""
WORDS_CONFIG = """
backend: "pytorch"
max_batch_size: 8
input { name: "words" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUTPUT__0" data_type: TYPE_STRING dims: [ 1 ] }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository, made by the programs of the page."""
    folder = tmp_path_factory.mktemp("pytorch")
    for name in ("scores", "addsub", "doubler", "words", "broken"):
        (folder / "models" / name / "1").mkdir(parents=True)
    programs = [WORDS]
    for language, text in PAGE.blocks:
        first = text.partition("\n")[0]
        if first.startswith("# models/"):
            (folder / first.removeprefix("# ")).write_text(text)
        elif language == "python":
            programs.append(text)
    (folder / "models" / "words" / "config.pbtxt").write_text(WORDS_CONFIG)
    (folder / "models" / "broken" / "config.pbtxt").write_text('backend: "pytorch"')
    (folder / "models" / "broken" / "1" / "model.pt").write_bytes(b"PK, and then nothing")
    files = []
    for number, program in enumerate(programs):
        # TorchScript reads the source of what it translates, so it has to be in a file.
        files.append(folder / f"program_{number}.py")
        files[-1].write_text(program)
    command = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, run_name='__main__')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", command, *map(str, files)], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    assert PAGE.block("nerite serve") == "nerite serve models\n"
    with serving(
        folder / "models",
        folder / "log",
        "--exit-on-error=false",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in ("scores", "addsub", "doubler", "words")),
    ) as server:
        yield server


def ask(server: Serving, protocol: str, model: str, **arrays: Any) -> dict[str, Any]:
    """Send a request with a stock client; return the outputs."""
    library: Any = httpclient if protocol == "http" else grpcclient
    inputs = []
    for name, array in arrays.items():
        datatype = "BYTES" if array.dtype == object else "FP32"
        inputs.append(library.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    with library.InferenceServerClient(server.http if protocol == "http" else server.grpc) as client:
        answer = client.infer(model, inputs)
        outputs = answer.get_response()["outputs"] if protocol == "http" else answer.get_response().outputs
        names = [each["name"] if protocol == "http" else each.name for each in outputs]
        return {name: answer.as_numpy(name) for name in names}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_models_of_the_page(server: Serving, protocol: str) -> None:
    answer = ask(server, protocol, "addsub", a=ROWS, b=ROWS[::-1].copy())
    np.testing.assert_array_equal(answer["SUM__0"], ROWS + ROWS[::-1])
    np.testing.assert_array_equal(answer["DIFFERENCE__1"], ROWS - ROWS[::-1])
    np.testing.assert_array_equal(ask(server, protocol, "doubler", x=np.ones(3, np.float32))["doubled"], [2, 2, 2])
    bias = ask(server, protocol, "doubler", x=np.ones(3, np.float32), bias=np.ones(3, np.float32))
    np.testing.assert_array_equal(bias["doubled"], [3, 3, 3])
    assert ask(server, protocol, "scores", input=np.zeros((3, 16), np.float32))["OUTPUT__0"].shape == (3, 4)
    words = ask(server, protocol, "words", words=np.array([["né"], ["ja"]], object))["OUTPUT__0"]
    assert words.tolist() == [["né!".encode()], [b"ja!"]]


def test_the_answers_are_those_of_the_framework(server: Serving, folder: Path) -> None:
    rows = np.random.default_rng(1).random((4, 16), dtype=np.float32)
    program = (
        "import sys, numpy, torch\n"
        "module = torch.export.load('models/scores/1/model.pt2').module()\n"
        "rows = torch.from_numpy(numpy.random.default_rng(1).random((4, 16), dtype=numpy.float32))\n"
        "sys.stdout.buffer.write(module(rows).detach().numpy().tobytes())"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    own = np.frombuffer(subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout, np.float32)
    served = ask(server, "grpc", "scores", input=rows)["OUTPUT__0"]
    np.testing.assert_allclose(served, own.reshape(4, 4), rtol=1e-6)


def test_what_the_server_says_of_them(server: Serving) -> None:
    config = server.json("GET", "/v2/models/scores/config")
    assert (config["backend"], config["platform"], config["max_batch_size"]) == ("pytorch", "torch_aoti", 4)
    assert [(each["name"], each["dims"]) for each in config["input"]] == [("input", [16])]
    assert server.text.count("'addsub' is TorchScript, which PyTorch has deprecated") == 1
    assert "Warning" not in server.text


def test_a_load_that_fails_says_what_to_do(server: Serving) -> None:
    status, _, body = server.ask("POST", "/v2/repository/models/broken/load")
    assert status == 400
    assert b"model.pt' is damaged or was cut off" in body
    assert b"Copy it once more" in body
    assert server.ready("addsub")


def test_shapes_that_the_model_refuses(server: Serving) -> None:
    tensor = {"name": "input", "shape": [1, 15], "datatype": "FP32", "data": [0.0] * 15}
    status, _, body = server.ask("POST", "/v2/models/scores/infer", {"inputs": [tensor]})
    assert status == 400
    assert b"unexpected shape for input 'input' for model 'scores'" in body


def test_unloading_and_loading_again(server: Serving) -> None:
    for _ in range(2):
        assert server.ask("POST", "/v2/repository/models/doubler/unload")[0] == 200
        assert server.ask("POST", "/v2/repository/models/doubler/load")[0] == 200
        np.testing.assert_array_equal(ask(server, "http", "doubler", x=np.ones(3, np.float32))["doubled"], [2, 2, 2])
