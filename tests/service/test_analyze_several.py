"""``nerite analyze`` for what is more than one plain model: several at once, ensembles, callers, streams, sequences."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from serving import IDENTITY, NERITE, PATIENCE, ensemble, eventually, pbtxt, python_model, step

BRIEF = ("--warm-up", "0.05", "--window", "0.1", "--windows", "3", "--concurrency", "8", "--model-repository", "models")
ALL = ("--search", "brute", "--set", "instances=1", "--set", "delay=0", "--set", "max_batch=8")
SLEEPS = f"{IDENTITY.replace('    return', '    time.sleep(0.02)' + chr(10) + '    return', 1)}"
QUICK = f"{IDENTITY.replace('    return', '    time.sleep(0.005)' + chr(10) + '    return', 1)}"
"""Not as quick as it could be, which would take all the processor time there is."""
CALLS = """
def execute(self, requests):
    inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT0") for request in requests]
    slow = {"model_name": "slow", "requested_output_names": ["OUTPUT0"]}
    answers = [pb_utils.InferenceRequest(inputs=[each], **slow).exec() for each in inputs]
    for answer in answers:
        if answer.has_error():
            raise RuntimeError(answer.error().message())
    return [pb_utils.InferenceResponse(answer.output_tensors()) for answer in answers]
"""
TWICE = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for _ in range(2):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SEQUENCE = """sequence_batching { control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] }
] }"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    python_model(models, "slow", SLEEPS, pbtxt(batch=1))
    python_model(models, "quick", QUICK)
    ensemble(models, "chain", step("quick", "INPUT0", "between"), step("slow", "between", "OUTPUT0"))
    python_model(models, "calls", CALLS, pbtxt(batch=1))
    python_model(models, "stream", TWICE, pbtxt(0, "model_transaction_policy { decoupled: true }"))
    python_model(models, "sequence", IDENTITY, pbtxt(batch=4, more=SEQUENCE))
    return tmp_path


def analyze(folder: Path, *arguments: str, status: int = 0) -> tuple[str, list[dict[str, Any]]]:
    """Return what was printed, and what was found, the best first."""
    command = [str(NERITE), "analyze", *arguments, *BRIEF, "--json", "found.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    file = folder / "found.json"
    return done.stdout + done.stderr, json.loads(file.read_text())["findings"] if file.exists() else []


def test_several_models_are_asked_at_once(folder: Path) -> None:
    said, found = analyze(folder, "slow", "quick", *ALL, "--set", "slow.max_batch=1,8", "--protocol", "grpc")
    assert [each["changes"] for each in found] == [{"slow.max_batch": 8}, {}]
    assert [set(figure["each"]) for each in found for figure in each["figures"]] == [{"slow", "quick"}] * 2
    better, now = (each["figures"][0]["each"] for each in found)
    assert better["slow"] > 2 * now["slow"]
    assert "slow.max_batch=8" in said and "+max_batch_size: 8" in said
    assert (folder / "slow+quick.analysis.jsonl").exists()


def test_of_an_ensemble_the_models_are_varied(folder: Path) -> None:
    files = {name: folder / "models" / name / "config.pbtxt" for name in ("chain", "slow", "quick")}
    before = {name: file.read_text() for name, file in files.items()}
    _, found = analyze(folder, "chain", *ALL, "--set", "slow.max_batch=1,8", "--apply")
    assert found[0]["changes"] == {"slow.max_batch": 8}
    after = {name: file.read_text() for name, file in files.items()}
    assert after == before | {"slow": before["slow"].replace("max_batch_size: 1\n", "max_batch_size: 8\n")}


def test_of_a_model_that_calls_others_those_are_varied_too(folder: Path) -> None:
    flags = ("--set", "calls.max_batch=1", "--set", "calls.instances=1,4", "--set", "slow.max_batch=8")
    said, _ = analyze(folder, "calls", *ALL, status=1)
    assert "'slow'" in said and "add it with --bls-composing-models" in said
    _, found = analyze(folder, "calls", "--bls-composing-models", "slow", *ALL, *flags)
    assert {name for each in found for name in each["changes"]} == {"calls.instances", "slow.max_batch"}
    assert found[0]["changes"] == {"calls.instances": 4, "slow.max_batch": 8}


@pytest.mark.parametrize("model", ["stream", "sequence"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_streams_and_sequences(folder: Path, model: str, protocol: str) -> None:
    _, (found,) = analyze(folder, model, "--most", "1", "--protocol", protocol)
    assert found["figures"][0]["rate"] > 0
    assert found["figures"][0]["failed"] == 0
    (head, *_) = (folder / f"{model}.analysis.jsonl").read_text().splitlines()
    load = json.loads(head)["load"][model]
    assert (load["streaming"], load["sequence"]) == {"stream": (True, 0), "sequence": (False, 20)}[model]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_stopped_says_how_to_go_on(folder: Path, number: int) -> None:
    command = [str(NERITE), "analyze", "quick", *BRIEF]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    eventually((folder / "quick.analysis.jsonl").exists)
    os.killpg(process.pid, number)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Stopped: quick.analysis.jsonl has " in said and "Run the same command to resume." in said
    assert "Traceback" not in said
