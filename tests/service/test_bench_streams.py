"""``nerite bench`` where a request is more than a request: streams, sequences, shared memory, data, chats."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_models import language_model
from pages import ROOT
from serving import IDENTITY, NERITE, PATIENCE, Serving, pbtxt, python_model, serving

THREE_TIMES = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        values = request.inputs()[0].as_numpy()
        if values.flat[0] == 13:
            error = pb_utils.TritonError("not thirteen")
            sender.send(pb_utils.InferenceResponse([], error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            continue
        for _ in range(3):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONTROLS = """
control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] }
]
"""
IN_SEQUENCE = """
def execute(self, requests):
    self.steps = getattr(self, "steps", {})
    responses = []
    for request in requests:
        key = request.correlation_id()
        start, end = (pb_utils.get_input_tensor_by_name(request, name).as_numpy().any() for name in ("START", "END"))
        assert start or key in self.steps, key
        step = self.steps[key] = 1 if start else self.steps[key] + 1
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        assert values.flat[0] == step and end == (step == 3), (values, step, end)
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
    return responses
"""
HOW_MANY_OPEN = """
def execute(self, requests):
    self.open = getattr(self, "open", set())
    responses = []
    for request in requests:
        start, end = (pb_utils.get_input_tensor_by_name(request, name).as_numpy().any() for name in ("START", "END"))
        if start:
            self.open.add(request.correlation_id())
        if end:
            self.open.remove(request.correlation_id())
        count = np.array([[len(self.open)]], np.float32)
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", count)]))
    return responses
"""
BRIEF = ("--warm-up", "0.1", "--window", "0.2", "--windows", "3")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("bench")
    models = folder / "models"
    python_model(models, "identity", IDENTITY)
    python_model(models, "texts", IDENTITY, pbtxt(batch=0, more="", datatype="TYPE_STRING"))
    python_model(models, "three_times", THREE_TIMES, pbtxt(0, "model_transaction_policy { decoupled: true }"))
    python_model(
        models,
        "in_sequence",
        IN_SEQUENCE,
        pbtxt(8, f"sequence_batching {{ oldest {{ max_candidate_sequences: 8 }} {CONTROLS} }}"),
    )
    python_model(
        models,
        "how_many_open",
        HOW_MANY_OPEN,
        pbtxt(8, f"sequence_batching {{ oldest {{ max_candidate_sequences: 8 }} {CONTROLS} }}"),
    )
    shutil.copytree(ROOT / "examples" / "sources" / "babble", models / "babble")
    (models / "docent").mkdir()
    language_model(models / "docent" / "1")
    with serving(models, folder / "log", "--allow-client-shm=true") as running:
        yield running


def bench(server: Serving, folder: Path, model: str, *more: str, status: int = 0) -> dict[str, Any]:
    """Measure one level; return what the JSON says of it, or where it is refused, what is said."""
    url = server.grpc if "grpc" in more else server.http
    file = folder / "figures.json"
    command = [str(NERITE), "bench", model, "--url", url, *BRIEF, "--json", str(file), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if status:
        return {"said": done.stderr}
    (level,) = json.loads(file.read_text())["levels"]
    assert isinstance(level, dict)
    return level


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_each_response_is_timed(server: Serving, tmp_path: Path, protocol: str) -> None:
    more = (
        "--protocol",
        protocol,
        "--streaming",
        "--concurrency",
        "3",
        "--slo",
        "latency:100000",
        "--slo",
        "ttft:100000",
    )
    level = bench(server, tmp_path, "three_times", *more)
    assert level["failed"] == 0, level["failures"]
    assert level["tokens"]["per_request"] == 3
    assert level["tokens"]["time_to_first_ms"]["p50"] <= level["latency_ms"]["p50"]
    assert level["good_requests_per_second"] == level["requests_per_second"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_error_in_a_stream(server: Serving, tmp_path: Path, protocol: str) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"data": [{"INPUT0": [1]}, {"INPUT0": [13]}]}))
    level = bench(server, tmp_path, "three_times", "--protocol", protocol, "--streaming", "--data", str(file))
    assert level["tokens"]["per_request"] == 3
    assert level["failed"] == pytest.approx(level["requests"], rel=0.5)
    assert all("not thirteen" in reason for reason in level["failures"])


def test_a_model_that_writes_in_turns_needs_no_sequences(server: Serving, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"data": [{"prompt": ["Once"], "length": [5]}]}))
    level = bench(server, tmp_path, "babble", "--protocol", "grpc", "--streaming", "--data", str(file))
    assert level["failed"] == 0, level["failures"]
    assert level["tokens"]["per_request"] == 5


def test_a_stream_of_whole_answers(server: Serving, tmp_path: Path) -> None:
    level = bench(server, tmp_path, "identity", "--protocol", "grpc", "--streaming", "--concurrency", "4")
    assert level["failed"] == 0, level["failures"]
    assert level["tokens"]["per_request"] == 1


@pytest.mark.parametrize("more", [(), ("--protocol", "grpc"), ("--protocol", "grpc", "--streaming")])
def test_sequences_are_whole_and_in_order(server: Serving, tmp_path: Path, more: tuple[str, ...]) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"data": [[{"INPUT0": [step]} for step in (1, 2, 3)]] * 2}))
    wanted = ("--sequence-length", "3", "--data", str(file), "--concurrency", "4", "--processes", "2")
    level = bench(server, tmp_path, "in_sequence", *wanted, *more)
    assert level["failed"] == 0, level["failures"]


@pytest.mark.parametrize("more", [(), ("--protocol", "grpc"), ("--protocol", "grpc", "--streaming"), ("--rate", "200")])
def test_no_sequence_stays_open(server: Serving, tmp_path: Path, more: tuple[str, ...]) -> None:
    load = () if "--rate" in more else ("--concurrency", "3")
    level = bench(server, tmp_path, "how_many_open", "--sequence-length", "1000000", *load, *more)
    assert level["failed"] == 0, level["failures"]
    last = {
        "inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [0]}],
        "parameters": {"sequence_id": 99_999_999, "sequence_start": True, "sequence_end": True},
    }
    assert server.json("POST", "/v2/models/how_many_open/infer", last)["outputs"][0]["data"] == [0]


def test_data_in_all_forms(server: Serving, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    three = base64.b64encode(np.arange(3, dtype=np.float32).tobytes()).decode()
    streams = [
        [{"INPUT0": [1, 2, 3]}, {"INPUT0": {"content": [4, 5], "shape": [2]}}],
        [{"INPUT0": {"content": {"b64": three}, "shape": [3]}}, {"INPUT0": {"b64": three, "shape": [3]}}],
    ]
    file.write_text(json.dumps({"data": streams, "validation_data": []}))
    level = bench(server, tmp_path, "identity", "--data", str(file))
    assert level["failed"] == 0, level["failures"]


@pytest.mark.parametrize(
    "data, said",
    [
        ({"data": [1]}, 'data 0: write {"INPUT": [values], ...} for each request. Inputs of the model: INPUT0'),
        ({"data": [{"INPUT0": {"shape": [1]}}]}, 'write [values], {"content": [values]'),
        ({"data": [{"INPUT0": {"b64": "A"}}]}, "data 0, input INPUT0"),
        ({"data": [{"INPUT0": {"b64": "AAAA", "shape": [1]}}]}, "3 bytes are not 4"),
        ({"data": [{"INPUT0": ["one"]}]}, "data 0, input INPUT0"),
        ({"data": [{"INPUT1": [1]}]}, "the model has no input 'INPUT1'. Its inputs: INPUT0"),
        ({"date": []}, 'has no list of data: write {"data":'),
    ],
)
def test_data_that_are_none(server: Serving, tmp_path: Path, data: Any, said: str) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps(data))
    assert said in bench(server, tmp_path, "identity", "--data", str(file), status=1)["said"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("outputs", [(), ("--output-shared-memory", "4096")])
def test_shared_memory(server: Serving, tmp_path: Path, protocol: str, outputs: tuple[str, ...]) -> None:
    more = ("--protocol", protocol, "--shared-memory", "--shape", "INPUT0:1000", "--batch", "1")
    level = bench(server, tmp_path, "identity", *more, *outputs)
    assert level["failed"] == 0, level["failures"]
    assert server.json("GET", "/v2/systemsharedmemory/status") == []


def test_data_in_a_directory(server: Serving, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "INPUT0").write_text("one\ntwo\n")
    for model, shape, status in (("texts", "2", 0), ("texts", "3", 1)):
        more = ("--data", str(tmp_path / "texts"), "--shape", f"INPUT0:{shape}")
        said = bench(server, tmp_path, model, *more, status=status)
        assert said.get("failed") == 0 or "has 2 lines" in said["said"]


def test_chats(server: Serving, tmp_path: Path) -> None:
    more = (
        "--protocol",
        "openai",
        "--parameter",
        "max_tokens=5",
        "--parameter",
        "ignore_eos=true",
        "--prompt-words",
        "3",
    )
    level = bench(server, tmp_path, "docent", *more, "--concurrency", "2")
    assert level["failed"] == 0, level["failures"]
    assert level["tokens"]["per_request"] == 5
    assert level["tokens"]["inter_token_ms"]["mean"] > 0


@pytest.mark.parametrize(
    "model, more, said",
    [
        ("three_times", (), "measure it with --streaming"),
        ("in_sequence", (), "set their length with --sequence-length"),
        ("nobody", ("--protocol", "openai"), "nobody"),
        ("docent", ("--protocol", "openai", "--data", "/nowhere"), "cannot read the prompts in /nowhere"),
    ],
)
def test_what_cannot_be_measured(server: Serving, tmp_path: Path, model: str, more: tuple[str, ...], said: str) -> None:
    assert said in bench(server, tmp_path, model, *more, status=1)["said"]
