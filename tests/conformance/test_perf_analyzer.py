"""NVIDIA's perf_analyzer in each of its modes against a running server."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.perf_analyzer import command
from conformance.triton_installation import TritonUnavailable
from serving import IDENTITY, Serving, pbtxt, python_model, serving
from tools import unavailable

pytestmark = pytest.mark.timeout(300)

THREE_TIMES = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for _ in range(3):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
START = 'control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ]'
TOTAL = """
def execute(self, requests):
    self.seen = getattr(self, "seen", set())
    responses = []
    for request in requests:
        of = request.correlation_id()
        if of and pb_utils.get_input_tensor_by_name(request, "START").as_numpy().any():
            self.seen.add(of)
        assert not of or of in self.seen
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
    return responses
"""
SHARED = ("--shared-memory=system", "--output-shared-memory-size=64")
STREAM = ("--streaming", "--async", "--concurrency-range=4")
SEQUENCES = ("--sequence-length=5", "--sequence-id-range=100:200")
SERVER_COLUMNS = ("Server Queue", "Server Compute Input", "Server Compute Infer", "Server Compute Output")
MODES = {
    "http": ("http", "identity", ("--sync",)),
    "http, async": ("http", "identity", ("--async", "--concurrency-range=4")),
    "http, several concurrencies": ("http", "identity", ("--concurrency-range=1:3",)),
    "http, JSON": ("http", "identity", ("--input-tensor-format=json", "--output-tensor-format=json")),
    "http, shared memory": ("http", "identity", SHARED),
    "grpc": ("grpc", "identity", ("--sync",)),
    "grpc, async": ("grpc", "identity", ("--async", "--concurrency-range=4")),
    "grpc, request rate": ("grpc", "identity", ("--request-rate-range=200",)),
    "grpc, request rate, Poisson": (
        "grpc",
        "identity",
        ("--request-rate-range=200", "--request-distribution=poisson"),
    ),
    "grpc, shared memory": ("grpc", "identity", SHARED),
    "grpc, stream": ("grpc", "identity", STREAM),
    "grpc, compression": ("grpc", "identity", ("--grpc-compression-algorithm=gzip",)),
    "grpc, stream, decoupled": ("grpc", "three_times", STREAM),
    "http, sequences": ("http", "total", ("--concurrency-range=3", *SEQUENCES)),
    "grpc, sequences that take turns": ("grpc", "oldest_total", ("--concurrency-range=4", *SEQUENCES)),
    "grpc, sequences at a rate": ("grpc", "oldest_total", ("--request-rate-range=200", "--num-of-sequences=6")),
    "grpc, stream, sequences": ("grpc", "total", (*STREAM, *SEQUENCES)),
    "grpc, stream, more sequences than slots": ("grpc", "oldest_total", ("--streaming", "--concurrency-range=12")),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("perf_analyzer")
    decoupled = pbtxt(batch=0, more="model_transaction_policy { decoupled: true }")
    python_model(folder / "models", "identity", IDENTITY)
    python_model(folder / "models", "three_times", THREE_TIMES, decoupled)
    for name, strategy in (("total", "direct { }"), ("oldest_total", "oldest { max_candidate_sequences: 4 }")):
        python_model(folder / "models", name, TOTAL, pbtxt(batch=8, more=f"sequence_batching {{ {strategy} {START} }}"))
    with serving(folder / "models", folder / "log", "--allow-client-shm=true") as running:
        yield running


@pytest.fixture(scope="module")
def program() -> tuple[list[str], dict[str, str]]:
    try:
        return command()
    except TritonUnavailable as reason:
        unavailable(str(reason))
        raise


@pytest.mark.parametrize("mode", MODES)
def test_it_measures(server: Serving, program: tuple[list[str], dict[str, str]], mode: str, tmp_path: Path) -> None:
    protocol, model, flags = MODES[mode]
    head, environment = program
    url = server.http if protocol == "http" else server.grpc
    counted = server.json("GET", f"/v2/models/{model}/stats")["model_stats"][0]["inference_count"]
    done = subprocess.run(
        [
            *head,
            f"-m{model}",
            f"-i{protocol}",
            f"-u{url}",
            "--shape=INPUT0:16",
            # So brief that it says nothing of the pace, which is no matter here: any measurement counts as stable.
            "--measurement-interval=150",
            "--stability-percentage=999",
            *flags,
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    paces = [float(pace) for pace in re.findall(r"Throughput: ([\d.]+) infer/sec", said)]
    assert paces, said
    assert all(pace > 0 for pace in paces), said
    assert "Failed" not in said, said
    stats = server.json("GET", f"/v2/models/{model}/stats")["model_stats"][0]
    assert stats["inference_count"] > counted
    assert stats["inference_stats"]["fail"]["count"] == 0
    if protocol == "http":
        assert server.json("GET", "/v2/systemsharedmemory/status") == []


def test_its_reports(server: Serving, program: tuple[list[str], dict[str, str]], tmp_path: Path) -> None:
    """What Model Analyzer and spreadsheets read: the columns are filled, with the server's own part of the latency."""
    head, environment = program
    metrics = f"127.0.0.1:{server.ports['Metrics']}/metrics"
    command = [*head, "-midentity", "-igrpc", f"-u{server.grpc}", "--shape=INPUT0:16", "--concurrency-range=1:4:1"]
    command += [
        "--measurement-interval=300",
        "--stability-percentage=999",
        "--percentile=95",
        "--latency-threshold=999",
    ]
    command += ["--binary-search", "-ffigures.csv", "--verbose-csv", "--profile-export-file=profile.json"]
    command += ["--collect-metrics", f"--metrics-url={metrics}", "--metrics-interval=100", "--verbose"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    rows = list(csv.DictReader((tmp_path / "figures.csv").read_text().splitlines()))
    assert len(rows) > 1, said
    for row in rows:
        parts = [float(row[name]) for name in SERVER_COLUMNS]
        assert sum(parts) > 0
        assert float(row["Inferences/Second"]) > 0
        assert float(row["Network+Server Send/Recv"]) > 0
        assert 0 < float(row["p50 latency"]) <= float(row["p95 latency"])
    experiments = json.loads((tmp_path / "profile.json").read_text())["experiments"]
    assert all(len(request["response_timestamps"]) == 1 for each in experiments for request in each["requests"])
    assert sum(len(each["requests"]) for each in experiments) > 0
