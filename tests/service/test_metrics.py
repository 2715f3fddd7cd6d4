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

from serving import HELD, IDENTITY, IN_PROCESS, Serving, eventually, let_go, pbtxt, python_model, serving

TIMEOUT = """
dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy { default_timeout_microseconds: 200000 max_queue_size: 3 }
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
    last = {label: labels.pop(label) for label in ("le", "quantile") if label in labels}
    pairs = [*sorted({"model": model, "version": "1", **labels}.items()), *last.items()]
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in pairs) + "}"


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
        b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
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
    assert page[labelled("nv_inference_compute_output_duration_us", "identity")] > 0
    assert page[labelled("nv_model_load_duration_secs", "identity")] > 0
    assert page[labelled("nv_inference_count", "identity")] == 20
    executions = page[labelled("nv_inference_exec_count", "identity")]
    assert 0 < executions <= 20
    assert page[labelled("nerite_batch_rows_count", "identity")] == executions
    assert page[labelled("nerite_batch_rows_sum", "identity")] == 20
    assert page[labelled("nerite_batch_releases_total", "identity", reason="instance_free")] == executions
    assert page[labelled("nerite_model_memory_bytes", "identity")] > 1_000_000


def test_pinned_memory_is_told_as_by_a_triton_without_gpus(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", "--allow-cpu-metrics=false") as server:
        found = {name: value for name, value in server.metrics().items() if "_memory_" in name and "model" not in name}
        assert found == {"nv_pinned_memory_pool_total_bytes": 0, "nv_pinned_memory_pool_used_bytes": 0}


def test_the_machine(server: Serving) -> None:
    page = server.metrics()
    assert 0 < page["nv_cpu_memory_used_bytes"] < page["nv_cpu_memory_total_bytes"]
    assert page["nv_cpu_memory_total_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    eventually(lambda: 0 < server.metrics()["nv_cpu_utilization"] <= 1)


def test_without_stage_histograms(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", "--metrics-config=stage_histograms=false") as server:
        server.infer("identity", [1.0])
        eventually(lambda: value(server, "nv_inference_request_success", "identity") == 1)
        assert not [name for name in server.metrics() if "duration_seconds" in name]


def test_tags_of_a_model(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY, pbtxt() + 'metric_tags { key: "team" value: "blue" }')
    with serving(tmp_path / "models", tmp_path / "log") as server:
        server.infer("identity", [1.0])
        (name,) = [name for name in server.metrics() if name.startswith("nv_inference_request_success{")]
    assert '_team="blue"' in name


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


COUNTS = """
def initialize(self, args):
    counter, gauge, histogram = (getattr(pb_utils.MetricFamily, kind) for kind in ("COUNTER", "GAUGE", "HISTOGRAM"))
    self.families = [
        pb_utils.MetricFamily(f"of_models_{name}", name, kind)
        for name, kind in (("rows", counter), ("level", gauge), ("size", histogram))
    ]
    rows, level, size = self.families
    self.rows = rows.Metric(labels={"why": 'a "good" one'})
    self.level = level.Metric(labels={"model": args["model_name"]})
    self.size = size.Metric(labels={}, buckets=[1.0, 10.0])

def execute(self, requests):
    responses = []
    for request in requests:
        value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        if value[0, 0] < 0:
            os._exit(1)
        self.rows.increment(1)
        self.level.set(float(value[0, 0]))
        self.size.observe(float(value[0, 0]))
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
    return responses
"""


def test_metrics_that_models_count_themselves(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "counts", COUNTS, pbtxt(batch=4, more="instance_group { count: 2 kind: KIND_CPU }"))
    python_model(models, "inside", COUNTS, pbtxt(batch=4, parameters=IN_PROCESS))
    with serving(models, tmp_path / "log", "--model-control-mode=explicit", "--load-model=*") as server:
        rows = 'of_models_rows{why="a \\"good\\" one"}'
        assert server.metrics()[rows] == 0
        for number in range(10):
            server.infer("counts", [float(number)])
            page = server.metrics()
            assert page[rows] == number + 1, "a response was there before what goes with it"
        assert page['of_models_level{model="counts"}'] == 9
        assert [page[f'of_models_size_bucket{{le="{le}"}}'] for le in ("1", "10", "+Inf")] == [2, 10, 10]
        with pytest.raises(RuntimeError, match="died"):
            server.infer("counts", [-1.0])
        eventually(lambda: value(server, "nerite_worker_restarts_total", "counts") == 1)
        server.infer("counts", [3.0])
        server.infer("inside", [3.0])
        assert server.metrics()[rows] == 12
        assert server.ask("POST", "/v2/repository/models/counts/unload", b"{}")[0] == 200
        eventually(lambda: server.metrics().get(rows) == 1)


READS = """
def execute(self, requests):
    import urllib.request

    (request,) = requests
    family = pb_utils.MetricFamily("made_here", "d", pb_utils.MetricFamily.COUNTER)
    port = int(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().flat[0])
    metric, found = family.Metric(labels={"a": "b"}), []
    for _ in range(3):
        metric.increment(2)
        page = urllib.request.urlopen(f"http://localhost:{port}/metrics").read().decode()
        found += [float(line.split()[-1]) for line in page.splitlines() if line.startswith("made_here{")]
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([found], np.float32))])]
"""


def test_metrics_made_in_execute_are_on_the_page_during_execute(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "reads", READS, pbtxt(1, ""))
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert server.infer("reads", [float(server.ports["Metrics"])]) == [2, 4, 6]


def test_summaries_and_the_histogram_of_first_responses(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "identity", IDENTITY, pbtxt(batch=8))
    shaped = """
    response_cache { enable: true }
    model_metrics { metric_control {
      metric_identifier { family: "nv_inference_first_response_histogram_ms" }
      histogram_options { buckets: [ 0.001, 60000 ] }
    } }"""
    python_model(models, "cached", IDENTITY, pbtxt(batch=8, more=shaped))
    flags = ("histogram_latencies=true", "summary_latencies=true", "summary_quantiles=0.5:0.05,0.9:0.01")
    cache = "--cache-config=local,size=1048576"
    with serving(models, tmp_path / "log", cache, *(f"--metrics-config={flag}" for flag in flags)) as server:
        for _ in range(5):
            server.infer("identity", [1.0])
            server.infer("cached", [1.0])
        eventually(lambda: value(server, "nv_inference_request_success", "identity") == 5)
        eventually(lambda: value(server, "nv_inference_request_success", "cached") == 5)
        page = server.metrics()
    first = "nv_inference_first_response_histogram_ms"
    assert [page[labelled(f"{first}_bucket", "identity", le=le)] for le in ("5000", "+Inf")] == [5, 5]
    assert [page[labelled(f"{first}_bucket", "cached", le=le)] for le in ("0.001", "60000")] == [0, 5]
    summary = "nv_inference_request_summary_us"
    assert page[labelled(f"{summary}_count", "identity")] == 5
    assert (
        page[labelled(f"{summary}_sum", "identity")] == page[labelled("nv_inference_request_duration_us", "identity")]
    )
    middle, high = (page[labelled(summary, "identity", quantile=quantile)] for quantile in ("0.5", "0.9"))
    assert 0 < middle <= high
    assert labelled(f"{summary}_count", "cached") not in page
    assert page[labelled("nv_cache_hit_summary_per_model_count", "cached")] == 4
    assert page[labelled("nv_cache_miss_summary_per_model_count", "cached")] == 1
    assert labelled("nv_cache_hit_summary_per_model_count", "identity") not in page
    for stage in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert page[labelled(f"nv_inference_{stage}_summary_us_count", "identity")] == 5
