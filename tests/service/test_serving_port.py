"""What is asked on the serving port itself: vLLM's health, version and metrics, ``/``, and ORCA's load reports."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc
from google.protobuf.duration_pb2 import Duration
from prometheus_client.parser import text_string_to_metric_families

from envoy_proxy import weighted_envoy
from llm_models import language_model
from nerite import __version__
from nerite.transports.grpc.wire import read_field
from serving import IDENTITY, Serving, eventually, python_model, serving

LOAD = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
FAILS = """
def initialize(self, args):
    raise RuntimeError("no")
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("serving-port") / "models"
    python_model(models, "m", IDENTITY)
    return models


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Serving]:
    with serving(models, models.parent / "log") as running:
        yield running


@pytest.mark.parametrize(("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
def test_what_vllm_answers(server: Serving, method: str, path: str) -> None:
    status, _, body = server.ask(method, path)
    assert (status, body) == (200, b"")
    assert server.json("GET", "/version") == {"version": __version__}
    assert server.ask("POST", "/health")[0] == 405


def test_a_server_that_is_not_ready_says_so(models: Path, tmp_path: Path) -> None:
    python_model(tmp_path / "models", "broken", FAILS)
    with serving(tmp_path / "models", tmp_path / "log", "--exit-on-error=false", "--allow-metrics=false") as server:
        assert has_no_metrics(server)
        assert [server.ask("GET", path)[0] for path in ("/health", "/ping", "/v2/health/ready")] == [503, 503, 400]
        assert server.ask("GET", "/v2/health/live")[0] == 200


def test_the_root_leads_somewhere(server: Serving) -> None:
    links = server.json("GET", "/")
    assert links.keys() == {"documentation", "openapi", "server", "health", "openai_models", "metrics", "console"}
    for path in links.values():
        assert server.ask("GET", path)[0] == 200, path
    status, headers, _ = server.ask("GET", "/", Accept="text/html,application/xhtml+xml;q=0.9")
    assert (status, headers["Location"]) == (302, "v2/docs")


def names(page: bytes) -> set[str]:
    return {family.name for family in text_string_to_metric_families(page.decode())}


def test_the_metrics_are_those_of_the_metrics_port(server: Serving) -> None:
    status, headers, page = server.ask("GET", "/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert names(page) == names(server.ask("GET", "/metrics", service="Metrics")[2])
    assert b'nv_inference_request_success{model="m",version="1"}' in page
    assert server.ask("POST", "/metrics")[0] == 405


def test_the_metrics_need_the_keys_of_statistics_and_of_metrics(models: Path, tmp_path: Path) -> None:
    locks = ("--http-restricted-api=statistics:X-A=a", "--http-restricted-api=metrics:X-B=b")
    with serving(models, tmp_path / "log", *locks, "--allow-console=false") as server:
        assert [server.ask("GET", "/metrics", **keys)[0] for keys in ({}, {"X_A": "a"}, {"X_B": "b"})] == [403] * 3
        assert server.ask("GET", "/metrics", X_A="a", X_B="b")[0] == 200
        assert "console" not in server.json("GET", "/")


def has_no_metrics(server: Serving) -> bool:
    status, _, body = server.ask("GET", "/metrics")
    return status == 404 and b"this port has no metrics" in body and "metrics" not in server.json("GET", "/")


def test_front_processes_have_them_too(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", "--front-processes=2") as server:
        assert [server.ask("GET", path)[0] for path in ("/health", "/ping", "/version", "/metrics", "/")] == [200] * 5
        with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
            next(channel.unary_stream(LOAD)(b"", timeout=20))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "--front-processes" in refused.value.details()


def report_of(message: bytes) -> tuple[dict[int, float], dict[str, float]]:
    """Return the numbers of an ``OrcaLoadReport`` by field, and its named metrics."""
    numbers: dict[int, float] = {}
    named: dict[str, float] = {}
    view, at = memoryview(message), 0
    while at < len(view):
        tag, at, stop = read_field(view, at)
        if tag >> 3 == 8:
            entry = view[at:stop]
            _, begin, end = read_field(entry, 0)
            (named[bytes(entry[begin:end]).decode()],) = struct.unpack("<d", entry[end + 1 : end + 9])
        else:
            (numbers[tag >> 3],) = struct.unpack("<d", view[at:stop])
        at = stop
    return numbers, named


def asked(seconds: float) -> bytes:
    """Return an ``OrcaLoadReportRequest``."""
    duration = Duration(seconds=int(seconds), nanos=int(math.modf(seconds)[0] * 1e9)).SerializeToString()
    return bytes([1 << 3 | 2, len(duration)]) + duration


def test_load_reports_without_requests(server: Serving) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stream = channel.unary_stream(LOAD)(asked(0.1), timeout=60)
        numbers, named = report_of(next(stream))
        assert (named, 6 in numbers) == ({}, False)
        assert server.infer("m", [1.0]) == [1.0]
        rates = (report_of(report)[0].get(6, 0.0) for report in stream)
        assert 0 < next(rate for rate in rates if rate) <= 20
        stream.cancel()


def test_load_reports_of_language_models(tmp_path: Path) -> None:
    language_model(tmp_path / "models" / "chat" / "1")
    (tmp_path / "models" / "chat" / "config.pbtxt").write_text('backend: "llm"')
    with serving(tmp_path / "models", tmp_path / "log") as server, grpc.insecure_channel(server.grpc) as channel:
        _, named = report_of(next(channel.unary_stream(LOAD)(b"", timeout=20)))
        names = {"kv_cache_utilization", "max_token_capacity", "num_requests_running", "num_requests_waiting"}
        assert (named.keys(), named["max_token_capacity"] > 1) == (names, True)
        page = server.ask("GET", "/metrics")[2].decode()
        assert 'vllm:num_requests_waiting{model="chat",model_name="chat",version="1"} 0' in page
        assert 'vllm:cache_config_info{model="chat",model_name="chat",version="1",block_size="' in page


def test_a_question_that_is_none_is_refused(server: Serving) -> None:
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as refused:
        next(channel.unary_stream(LOAD)(b"\x0a\x7f", timeout=20))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_server_that_stops_ends_its_reports(models: Path, tmp_path: Path) -> None:
    """It also keeps its metrics where the flag says."""
    elsewhere = serving(models, tmp_path / "log", "--metrics-address=127.0.0.2")
    with elsewhere as server, grpc.insecure_channel(server.grpc) as channel:
        assert has_no_metrics(server)
        stream = channel.unary_stream(LOAD)(asked(3600), timeout=60)
        next(stream)
        server.process.terminate()
        assert list(stream) == []
        eventually(lambda: server.process.poll() is not None)


def test_envoy_takes_the_reports(server: Serving, tmp_path: Path) -> None:
    with weighted_envoy(tmp_path, [server.grpc]) as (port, statistics):

        def counted(name: str) -> int:
            lines = dict(line.split(": ", 1) for line in statistics().splitlines() if ".lb_orca_oob." in line)
            return int(lines.get(f"cluster.grpc.lb_orca_oob.{name}", -1))

        def weighed() -> bool:
            """Without requests there is nothing to weigh by, and Envoy counts a report as an error."""
            server.infer("m", [1.0])
            return counted("reports_received") - counted("report_errors") >= 2

        eventually(weighed)
        assert (counted("active_sessions"), counted("stream_failures")) == (1, 0)
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            assert client.is_server_ready()
