"""docs/tensorflow.md is followed, and TensorFlow and LiteRT models are served to the clients of Triton."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from pages import Page, run
from serving import Serving, eventually, serving

PAGE = Page("docs/tensorflow.md")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tensorflow_artifacts: Path) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tensorflow")
    run([sys.executable, "-c", PAGE.block("class Doubler")], cwd=folder)
    models = folder / "models"
    # All in one process, as the page says: TensorFlow is imported once.
    for name in ("doubler", "shouted", "weightless"):
        version = models / name / "1"
        if name != "doubler":
            shutil.copytree(tensorflow_artifacts / name, version / "model.savedmodel")
        (version.parent / "config.pbtxt").write_text(PAGE.block("WORKER"))
    lite = models / "quantised" / "1"
    lite.mkdir(parents=True)
    shutil.copy(tensorflow_artifacts / "quantised.tflite", lite / "model.tflite")
    (lite.parent / "config.pbtxt").write_text('backend: "tflite"')
    flags = ["--model-control-mode=explicit"]
    flags += [f"--load-model={name}" for name in ("doubler", "doubler_lite", "shouted", "quantised")]
    with serving(models, folder / "log", *flags) as server:
        yield server


def test_every_block_is_known_here() -> None:
    assert len(PAGE.blocks) == 3


def test_the_command_of_the_page(server: Serving) -> None:
    told = run(PAGE.block("curl"), server)
    decoder = json.JSONDecoder()
    first, end = decoder.raw_decode(told)
    second, _ = decoder.raw_decode(told[end:].lstrip())
    assert [answer["outputs"][0]["data"] for answer in (first, second)] == [[2.0, 4.0, 6.0, 8.0]] * 2


@pytest.mark.parametrize("kind", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
@pytest.mark.parametrize("model", ["doubler", "doubler_lite"])
def test_triton_clients(server: Serving, kind: Any, model: str) -> None:
    url = server.http if kind is tritonclient.http else server.grpc
    with kind.InferenceServerClient(url) as client:
        for rows in (1, 4, 3):
            given = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
            tensor = kind.InferInput("x", given.shape, "FP32")
            tensor.set_data_from_numpy(given)
            answer = client.infer(model, [tensor], outputs=[kind.InferRequestedOutput("y")])
            np.testing.assert_array_equal(answer.as_numpy("y"), 2 * given)


def test_strings_of_any_bytes(server: Serving) -> None:
    with tritonclient.http.InferenceServerClient(server.http) as client:
        config = client.get_model_config("doubler")
        assert (config["max_batch_size"], config["platform"]) == (4, "tensorflow_savedmodel")
        words = np.array([[b"x" * 100_000], [b"\xff\x00y"]], object)
        tensor = tritonclient.http.InferInput("t", words.shape, "BYTES")
        tensor.set_data_from_numpy(words)
        answer = client.infer("shouted", [tensor]).as_numpy("loud")
    assert answer.tolist() == [[b"X" * 100_000], [b"\xff\x00Y"]]


def test_models_share_a_process_with_tensorflow_in_it(server: Serving) -> None:
    assert len(server.workers()) == 1


def test_integers_of_a_quantised_model(server: Serving) -> None:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "INT8", "data": [-128] * 4}
    answer = server.json("POST", "/v2/models/quantised/infer", {"inputs": [tensor]})
    # All of them mean zero, and zero times anything is that.
    assert answer["outputs"][0] == {"name": "y", "datatype": "INT8", "shape": [1, 4], "data": [-128] * 4}
    assert "'quantised' is quantised: 'x' means" in server.text


def test_what_is_wrong_with_a_model_is_said_to_who_loads_it(server: Serving) -> None:
    status, _, body = server.ask("POST", "/v2/repository/models/weightless/load")
    assert status == 400
    assert "The weights are missing: copy the directory 'variables'" in json.loads(body)["error"]
    assert server.ready("doubler")


def test_frameworks_keep_quiet(server: Serving) -> None:
    for word in ("oneDNN", "absl", "XNNPACK", "deprecat"):
        assert word not in server.text


def test_the_process_ends_with_its_last_model(server: Serving) -> None:
    for name in ("doubler", "shouted"):
        server.ask("POST", f"/v2/repository/models/{name}/unload")
    eventually(lambda: not server.workers())
    assert server.ready("doubler_lite")
