"""Shadows of routes through a real server: what is found, and that a caller never notices a bad shadow."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving import HELD, IN_PROCESS, Serving, adds, binary_request, eventually, let_go, pbtxt, python_model, serving

DIES = """
def execute(self, requests):
    os.kill(os.getpid(), signal.SIGKILL)
"""
IN_PLACE = """
def execute(self, requests):
    answers = []
    for request in requests:
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        values += 1
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
    return answers
"""
SAYS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        words = %r.split(" ")
        for number, word in enumerate(words):
            last = number == len(words) - 1
            sender.send(pb_utils.InferenceResponse([
                pb_utils.Tensor("text_output", np.array([(word if last else word + " ").encode()], object)),
                pb_utils.Tensor("finish_reason", np.array([%r if last else b"None"], object)),
            ]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENGINE = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "finish_reason" data_type: TYPE_STRING dims: [ 1 ] }
]
"""
ONE = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
LARGE = np.ones((1, 100_000), np.float32)


def shadowed(repository: Path, name: str, *settings: str) -> None:
    """Let version 1 of a model answer, and send all requests to version 2, too."""
    text = "\n".join(["[[arm]]", "version = 1", "weight = 1", "[shadow]", "version = 2", 'share = "100%"', *settings])
    (repository / name / "route.toml").write_text(text)


@pytest.fixture(scope="module", params=["1", "2"], ids=["one process", "front processes"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shadows")
    models = folder / "models"
    for version in (1, 2):
        python_model(models, "numbers", adds(version), pbtxt(more=IN_PROCESS), version)
        python_model(models, "large", adds(version), pbtxt(), version)
        python_model(models, "in_place", IN_PLACE, pbtxt(more=""), version)
        python_model(models, "crashes", adds(1) if version == 1 else DIES, pbtxt(), version)
        python_model(models, "hangs", adds(1) if version == 1 else HELD, pbtxt(), version)
        words = ("to be or not", b"stop") if version == 1 else ("to be sure", b"length")
        python_model(models, "text", SAYS % words, ENGINE, version)
    shadowed(models, "numbers", f"samples = {json.dumps(str(folder / 'numbers.jsonl'))}")
    shadowed(models, "large")
    shadowed(models, "in_place")
    shadowed(models, "crashes")
    shadowed(models, "hangs", "timeout = 0.2", "concurrency = 2")
    shadowed(models, "text", f"samples = {json.dumps(str(folder / 'text.jsonl'))}", "contents = true")
    with serving(models, folder / "log", f"--front-processes={request.param}") as running:
        yield running
        let_go(models / "hangs", 2)


def count(server: Serving, metric: str, route: str, **labels: str) -> float:
    pairs = {"arm": f"{route}:2", "route": route, **labels}
    text = ",".join(f'{name}="{value}"' for name, value in sorted(pairs.items()))
    return server.metrics().get(f"nerite_shadow_{metric}{{{text}}}", 0)


def added(server: Serving, model: str, body: Any = ONE) -> float:
    status, _, answer = server.ask("POST", f"/v2/models/{model}/infer", body)
    assert status == 200, answer
    return float(json.loads(answer)["outputs"][0]["data"][0]) - 1


def test_answers_that_differ_are_found_with_their_distance(server: Serving) -> None:
    assert {added(server, "numbers") for _ in range(10)} == {1}
    eventually(lambda: count(server, "compared_total", "numbers", result="different") >= 10)
    assert count(server, "distance_sum", "numbers") / count(server, "distance_count", "numbers") == pytest.approx(0.5)
    path = server.log.parent / "numbers.jsonl"
    eventually(lambda: path.exists() and path.read_text().count("\n") >= 10)
    sample = json.loads(path.read_text().splitlines()[0])
    (output,) = sample["outputs"]
    assert (sample["arm"], sample["shadow"], sample["agreement"]) == ("numbers:1", "numbers:2", "different")
    assert (output["largest"], output["relative"], output["differing"]) == (1.0, 0.5, 1)
    assert not {"inputs", "answer", "shadow_answer"} & sample.keys()
    results = server.json("GET", "/v2/models/numbers/route")["shadow_results"]
    assert (results["agreement"], results["largest"], results["held"]) == (0.0, 1.0, 0)


def test_large_tensors(server: Serving) -> None:
    body, headers = binary_request(LARGE)
    for _ in range(3):
        status, _, answer = server.ask("POST", "/v2/models/large/infer", body, **headers)
        assert status == 200
        assert np.frombuffer(answer[-LARGE.nbytes :], np.float32)[-1] == 2
    eventually(lambda: count(server, "compared_total", "large", result="different") == 3)


def test_a_model_that_changes_its_inputs_in_place(server: Serving) -> None:
    """The shadow must not get what is left of them."""
    body, headers = binary_request(LARGE)
    for _ in range(3):
        status, _, answer = server.ask("POST", "/v2/models/in_place/infer", body, **headers)
        assert status == 200
        assert np.frombuffer(answer[-LARGE.nbytes :], np.float32)[-1] == 2
    eventually(lambda: count(server, "dropped_total", "in_place", reason="changed") == 1)
    eventually(lambda: count(server, "compared_total", "in_place", result="equal") == 2)


def test_texts_are_compared(server: Serving) -> None:
    status, _, body = server.ask("POST", "/v2/models/text/generate_stream", {"text_input": "a question"})
    assert (status, body.count(b"data: "), b"sure" in body) == (200, 4, False)
    eventually(lambda: count(server, "compared_total", "text", result="different") == 1)
    path = server.log.parent / "text.jsonl"
    eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    sample = json.loads(path.read_text())
    text = next(each for each in sample["outputs"] if each["name"] == "text_output")
    assert (text["shared"], text["length"], text["shadow_length"]) == (6, 12, 10)
    assert (sample["finish_reason"], sample["responses"]) == (["stop", "length"], [4, 3])
    assert sample["inputs"] == {"text_input": ["a question"]}


def test_a_shadow_that_crashes_fails_nobody(server: Serving) -> None:
    for _ in range(5):
        assert added(server, "crashes") == 1
    eventually(
        lambda: (
            count(server, "compared_total", "crashes", result="shadow_failed")
            + count(server, "dropped_total", "crashes", reason="not_ready")
            >= 5
        )
    )


def test_a_shadow_that_hangs_delays_nobody(server: Serving) -> None:
    body = {"inputs": [{**ONE["inputs"][0], "data": [-1.0]}]}
    for _ in range(20):
        assert added(server, "hangs", body) == -1
    eventually(lambda: count(server, "dropped_total", "hangs", reason="timeout") >= 1)
    eventually(lambda: count(server, "dropped_total", "hangs", reason="late") >= 10)
    assert added(server, "hangs", body) == -1


def test_sequences_are_left_out(server: Serving) -> None:
    before = count(server, "dropped_total", "numbers", reason="sequence")
    body = {**ONE, "parameters": {"sequence_id": 7, "sequence_start": True}}
    assert added(server, "numbers", body) == 1
    assert count(server, "dropped_total", "numbers", reason="sequence") == before + 1


def test_a_server_stops_beside_a_shadow_that_hangs(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "m", adds(1), pbtxt(), 1)
    python_model(models, "m", HELD, pbtxt(), 2)
    shadowed(models, "m")
    with serving(models, tmp_path / "log") as running:
        added(running, "m", {"inputs": [{**ONE["inputs"][0], "data": [-1.0]}]})
        eventually(lambda: count(running, "requests_total", "m") == 1)
        os.kill(running.process.pid, signal.SIGTERM)
        let_go(models / "m", 2)
        assert running.process.wait(60) == 0
