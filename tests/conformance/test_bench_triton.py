"""``nerite bench`` against a real Triton: other heads, other tables of headers, other pieces."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.exchange import Scene
from conformance.servers import Server, start_triton
from conformance.triton_installation import TritonUnavailable
from serving import IDENTITY, NERITE, pbtxt, python_model
from tools import unavailable

pytestmark = pytest.mark.timeout(300)

TWICE = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for _ in range(2):
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SEQUENCES = """sequence_batching { direct { } control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] }
] }"""
MODES = {
    "http": ("identity", "http", ("--shape", "INPUT0:16")),
    "http, large": ("identity", "http", ("--shape", "INPUT0:200000")),
    "http, at a rate": ("identity", "http", ("--rate", "100")),
    "http, stream": ("twice", "http", ("--streaming",)),
    "http, shared memory": ("identity", "http", ("--shared-memory", "--output-shared-memory", "4096")),
    "grpc": ("identity", "grpc", ("--shape", "INPUT0:16", "--concurrency", "9")),
    "grpc, large": ("identity", "grpc", ("--shape", "INPUT0:200000", "--concurrency", "3")),
    "grpc, stream": ("twice", "grpc", ("--streaming", "--concurrency", "3")),
    "grpc, stream of whole answers": ("identity", "grpc", ("--streaming",)),
    "grpc, sequences": ("sequences", "grpc", ("--sequence-length", "3", "--concurrency", "3")),
}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bench")
    repository = folder / "repository"
    python_model(repository, "identity", IDENTITY)
    python_model(repository, "sequences", IDENTITY, pbtxt(8, SEQUENCES))
    python_model(repository, "twice", TWICE, pbtxt(0, "model_transaction_policy { decoupled: true }"))
    try:
        # An absolute path is where it is, whatever stands before it.
        server = start_triton(Scene("bench", repository=str(repository)), folder / "triton")
    except TritonUnavailable as reason:
        unavailable(str(reason))
        raise
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("mode", MODES)
def test_it_measures(triton: Server, mode: str, tmp_path: Path) -> None:
    model, protocol, more = MODES[mode]
    file = tmp_path / "figures.json"
    url = f"127.0.0.1:{triton.grpc if protocol == 'grpc' else triton.http}"
    command = [str(NERITE), "bench", model, "--url", url, "--protocol", protocol, "--json", str(file)]
    command += ["--warm-up", "0.2", "--window", "0.2", "--windows", "3", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (level,) = json.loads(file.read_text())["levels"]
    assert level["failed"] == 0, level["failures"]
    assert level["requests"] > 0
    assert level["server"]["requests"] >= level["requests"] * 0.5
    if model == "twice":
        assert level["tokens"]["per_request"] == 2
