"""docs/coming-from-triton.md: NVIDIA's examples with another image; a real Prometheus evaluates what scales pods."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from conformance.perf_analyzer import command as perf_analyzer
from conformance.triton_installation import TritonUnavailable
from kubernetes_tools import CHART, rendered
from nerite.cli.command_line import TRITON, parse_command_line
from pages import Page, run
from prometheus_server import Prometheus, prometheus_server
from serving import IDENTITY, Serving, eventually, pbtxt, python_model, serving
from tools import require, unavailable

PAGE = Page("docs/coming-from-triton.md")
SLOW = """
def execute(self, requests):
    time.sleep(0.05 * len(requests))
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", each.inputs()[0].as_numpy())]) for each in requests]
"""
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "FP32", "data": [7]}]}).encode()
CLIENTS = 8


def commands(part: str) -> list[str]:
    return PAGE.block(part).replace("\\\n", " ").splitlines()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("coming-from-triton") / "models"
    python_model(models, "identity", IDENTITY)
    python_model(models, "slow", SLOW, pbtxt(batch=0, more=""))
    return models


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Serving]:
    with serving(models, models.parent / "log") as running:
        yield running


def test_first_start_and_health(server: Serving) -> None:
    require("curl")
    started, *asked = commands("docker run")
    words = shlex.split(started)
    at = words.index("tritonserver")
    assert parse_command_line(words[at + 1 :], {}, TRITON).options.repository.paths == ("/models",)
    ready, config, metrics = asked
    run(f"{ready} --fail", server)
    assert json.loads(run(config, server))["name"] == "identity"
    page = run(metrics.replace("localhost:8002", f"localhost:{server.ports['Metrics']}"), server)
    assert 'nv_inference_queue_duration_us{model="identity",version="1"}' in page


@pytest.mark.timeout(150)
def test_load(server: Serving) -> None:
    try:
        program, variables = perf_analyzer()
    except TritonUnavailable as reason:
        unavailable(str(reason))
    http, grpc = (shlex.split(each)[1:] for each in commands("perf_analyzer -m"))
    short = ["--measurement-interval=150", "--stability-percentage=999"]
    for words, address in ((http, ("localhost:8000", server.http)), (grpc, ("localhost:8001", server.grpc))):
        shown = [address[1] if word == address[0] else word for word in words]
        done = subprocess.run(
            [*program, *shown, *short], capture_output=True, text=True, env=variables, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        paces = [float(pace) for pace in re.findall(r"Throughput: ([\d.]+) infer/sec", done.stdout + done.stderr)]
        assert len(paces) == (3 if words is http else 1)
        assert all(pace > 0 for pace in paces)


def test_the_values_of_the_chart(tmp_path: Path) -> None:
    values = yaml.safe_load(PAGE.block("# values.yaml"))
    manifests = rendered(values=values, folder=tmp_path)
    (scaler,) = [each for each in manifests if each["kind"] == "HorizontalPodAutoscaler"]
    assert (scaler["apiVersion"], scaler["spec"]["maxReplicas"]) == ("autoscaling/v2", 3)
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["target"]["averageValue"] == "50"


@contextmanager
def load(server: Serving) -> Iterator[None]:
    """Keep a slow model busy, so that requests wait."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            assert server.ask("POST", "/v2/models/slow/infer", BODY)[0] == 200

    threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def query_of(rule: dict[str, Any]) -> str:
    """Return the query that the adapter makes of a rule for all pods of a namespace, over short windows."""
    text = rule["metricsQuery"].replace("<<.GroupBy>>", "namespace,pod")
    text = text.replace("<<.LabelMatchers>>", 'namespace="models",pod=~"busy|idle"')
    return short(text)


def short(query: str) -> str:
    return re.sub(r"\[(1m|30s)\]", "[8s]", query)


def by_pod(prometheus: Prometheus, query: str) -> dict[str, float]:
    return {each["metric"]["pod"]: float(each["value"][1]) for each in prometheus.samples(query)}


@pytest.mark.timeout(200)
def test_the_autoscaler_s_metrics_in_prometheus(models: Path, server: Serving, tmp_path: Path) -> None:
    ours = yaml.safe_load((CHART / "files" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    rules = [yaml.safe_load(PAGE.block("the rule of Triton's example"))["rules"]["custom"][0]]
    rules += [rule for rule in ours if rule["name"]["as"] == "avg_time_queue_us"]
    recorded = yaml.safe_load(PAGE.block("triton:queue_compute:ratio"))
    for rule in recorded["groups"][0]["rules"]:
        rule["expr"] = short(rule["expr"])
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(recorded))
    require("promtool")
    run(["promtool", "check", "rules", str(tmp_path / "rules.yml")])
    pods: dict[str, dict[str, str]] = {}
    with serving(models, tmp_path / "idle.log") as idle:
        for name, running in (("busy", server), ("idle", idle)):
            pods[f"127.0.0.1:{running.ports['Metrics']}"] = {"namespace": "models", "pod": name}
        with prometheus_server(tmp_path, list(pods), tmp_path / "rules.yml", labels=pods) as prometheus, load(server):
            for rule in rules:
                series = rule["seriesQuery"]
                eventually(lambda: len({each["metric"]["pod"] for each in prometheus.samples(series)}) == 2)  # noqa: B023
                query = query_of(rule)
                # Eight clients of a model that takes 50 ms for one: each waits for the others.
                eventually(lambda: by_pod(prometheus, query).get("busy", 0) > 50_000, what=query)  # noqa: B023
                eventually(lambda: by_pod(prometheus, query).get("idle") == 0, what=query)  # noqa: B023
            eventually(lambda: by_pod(prometheus, "triton:queue_compute:ratio").get("busy", 0) > 2)
            names = [rule["record"] for rule in recorded["groups"][0]["rules"]]
            assert all(by_pod(prometheus, name).keys() == {"busy"} for name in names)
