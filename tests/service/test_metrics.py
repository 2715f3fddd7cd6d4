"""What the metrics tell that Triton's do not, of servers that run."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from serving import HELD, IDENTITY, Serving, eventually, let_go, pbtxt, python_model, serving

TIMEOUT = """
dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy { default_timeout_microseconds: 1000 max_queue_size: 3 }
}
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    python_model(made, "identity", IDENTITY, pbtxt(batch=8, more="dynamic_batching {}"))
    python_model(
        made, "held", HELD, pbtxt(batch=1, more="dynamic_batching { priority_levels: 2 default_priority_level: 2 }")
    )
    python_model(made, "brief", HELD, pbtxt(batch=1, more=TIMEOUT))
    return made


@pytest.fixture
def server(models: Path, tmp_path: Path) -> Iterator[Serving]:
    with serving(models, tmp_path / "log") as running:
        yield running


def labelled(name: str, model: str, **labels: str) -> str:
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return f'{name}{{model="{model}",version="1"{more}}}'


def value(server: Serving, name: str, model: str, **labels: str) -> float:
    return server.metrics().get(labelled(name, model, **labels), 0)


def body(row: float) -> bytes:
    return json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [row]}]}).encode()


def post(server: Serving, model: str, row: float) -> socket.socket:
    """Send a request over HTTP and leave the answer where it is."""
    host, port = server.http.split(":")
    raw = body(row)
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
        % (model.encode(), len(raw), raw)
    )
    return connection


def tensor(row: float) -> list[grpcclient.InferInput]:
    made = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
    made.set_data_from_numpy(np.array([[row]], np.float32))
    return [made]


def test_histograms_agree_with_the_counters(server: Serving) -> None:
    assert not [name for name in server.metrics() if name.startswith("nerite_request_duration")]
    for number in range(20):
        server.infer("identity", [float(number)])
    eventually(lambda: value(server, "nv_inference_request_success", "identity") == 20)
    page = server.metrics()
    whole = "nerite_request_duration_seconds"
    assert page[labelled(f"{whole}_count", "identity")] == 20
    assert page[labelled(f"{whole}_bucket", "identity", le="+Inf")] == 20
    counted = page[labelled("nv_inference_request_duration_us", "identity")]
    assert int(page[labelled(f"{whole}_sum", "identity")] * 1e6) == pytest.approx(counted, abs=1)
    for stage, counter in {"queue": "queue", "input": "compute_input", "compute": "compute_infer"}.items():
        total = page[labelled("nerite_stage_duration_seconds_sum", "identity", stage=stage)]
        assert total * 1e6 == pytest.approx(page[labelled(f"nv_inference_{counter}_duration_us", "identity")], abs=1)
    executions = page[labelled("nv_inference_exec_count", "identity")]
    assert page[labelled("nerite_batch_rows_count", "identity")] == executions
    assert page[labelled("nerite_batch_rows_sum", "identity")] == 20
    assert page[labelled("nerite_batch_releases_total", "identity", reason="instance_free")] == executions
    assert page[labelled("nerite_model_memory_bytes", "identity")] > 1_000_000


def test_without_stage_histograms(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", "--metrics-config=stage_histograms=false") as server:
        server.infer("identity", [1.0])
        eventually(lambda: value(server, "nv_inference_request_success", "identity") == 1)
        assert not [name for name in server.metrics() if "duration_seconds" in name]


def test_who_gave_up_and_how(server: Serving, models: Path) -> None:
    running = post(server, "held", -1)
    eventually(lambda: "executes -1" in server.text)
    hung_up = post(server, "held", 0)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        dropped = client.async_infer("held", tensor(0), lambda result, error: None, priority=1)
        eventually(lambda: value(server, "nerite_queue_requests", "held", priority="1") == 1)
        eventually(lambda: sum(v for n, v in server.metrics().items() if "queue_requests" in n) == 2)
        dropped.cancel()
        hung_up.close()
        running.close()
        eventually(lambda: value(server, "nerite_requests_given_up_total", "held", reason="disconnected") == 2)
        eventually(lambda: value(server, "nerite_requests_given_up_total", "held", reason="cancelled") == 1)
    assert value(server, "nerite_requests_given_up_total", "held", reason="deadline") == 0
    assert value(server, "nerite_request_failures_total", "held", reason="cancelled") == 2, "one ran"
    assert value(server, "nerite_queue_requests", "held", priority="1") == 0
    let_go(models / "held")


def test_why_requests_failed(server: Serving, models: Path) -> None:
    running = post(server, "brief", -1)
    eventually(lambda: "executes -1" in server.text)
    assert server.ask("POST", "/v2/models/brief/infer", body(0))[0] == 503
    assert value(server, "nerite_request_failures_total", "brief", reason="queue_timeout") == 1
    assert value(server, "nv_inference_request_failure", "brief", reason="REJECTED") == 1
    (worker,) = (pid for name, pid in server.workers().items() if name.startswith("brief"))
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: value(server, "nerite_request_failures_total", "brief", reason="worker_died") == 1)
    eventually(lambda: value(server, "nerite_worker_restarts_total", "brief") == 1)
    assert value(server, "nv_inference_request_failure", "brief", reason="BACKEND") == 1
    running.close()
