"""How a fleet command finds replicas, and what it makes of Prometheus's answers."""

from __future__ import annotations

import argparse
import json
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from nerite.cli.command import UsageError
from nerite.config.rollout_spec import RolloutSpec
from nerite.tools.rollout.command import run as rollout
from nerite.tools.rollout.fleet import run_fleet
from nerite.tools.rollout.gateway import gateway_route
from nerite.tools.rollout.prometheus import Prometheus, PrometheusError
from nerite.tools.rollout.replicas import Replicas, ReplicaSource


def test_replicas_are_fixed_ones_and_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "replicas.txt"
    file.write_text("gpu-1:8000  # the first\n\ngpu-2:8000\n")
    source = ReplicaSource(["gpu-2:8000", "gpu-3:8000"], str(file))
    assert source.look() == ["gpu-2:8000", "gpu-3:8000", "gpu-1:8000"]
    file.write_text("gpu-4:8000\n")
    assert source.look() == ["gpu-2:8000", "gpu-3:8000", "gpu-4:8000"]
    file.unlink()
    assert source.look() == ["gpu-2:8000", "gpu-3:8000", "gpu-4:8000"]
    assert "replicas.txt" in source.problem


def test_replicas_are_the_addresses_of_a_name() -> None:
    source = ReplicaSource([], "dns:localhost:8000")
    assert "127.0.0.1:8000" in source.look()
    assert source.problem == ""


@pytest.mark.parametrize("where", ["pool:127.0.0.1:1/main", "pool:[::1]:1/main"])
def test_a_router_that_does_not_answer(where: str) -> None:
    source = ReplicaSource(["gpu-1:8000"], where)
    assert source.look() == ["gpu-1:8000"]
    assert source.problem == f"--replicas {where}: the router does not answer on its metrics port"


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("", "dns:NAME:PORT"),
        *((wrong, "dns:NAME:PORT") for wrong in ("dns:name", "dns::8000", "dns:name:http")),
        *((wrong, "pool:ROUTER:PORT/POOL") for wrong in ("pool:router:8002", "pool:router/main", "pool:router:8002/")),
    ],
)
def test_no_way_to_find_replicas(where: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        ReplicaSource([], where)


def test_a_replica_that_does_not_answer_is_told_by_its_problem() -> None:
    with ThreadPoolExecutor(2) as executor:
        replicas = Replicas("m", {}, 1.0, executor)
        found = replicas.look(["127.0.0.1:1", "127.0.0.1:2"])
        replicas.close()
    assert all(replica.problem for replica in found.values())


class Answers(BaseHTTPRequestHandler):
    """Answers queries with what the test has set."""

    asked: list[str]
    answer: bytes
    status: int

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.asked.append(urllib.parse.parse_qs(body)["query"][0])
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *told: object) -> None:
        """Say nothing."""


@pytest.fixture
def answers() -> Iterator[tuple[type[Answers], str]]:
    made = type("Made", (Answers,), {"asked": [], "status": 200, "answer": b""})
    server = HTTPServer(("127.0.0.1", 0), made)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def vector(*samples: tuple[dict[str, str], str]) -> bytes:
    result = [{"metric": metric, "value": [1.0, value]} for metric, value in samples]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


def test_the_first_look_goes_back_to_the_start_and_later_ones_to_the_last(answers: tuple[type[Answers], str]) -> None:
    made, url = answers
    made.answer = vector(({"boot": "young"}, "5"), ({"boot": "old"}, "91"))
    prometheus = Prometheus(url, {}, 'a"b', "0123456789ab")
    found = prometheus.read(now=10_000.0, since=2_000.0)
    assert found.boots == ["young"]
    assert found.samples == [({"boot": "young"}, 5.0), ({"boot": "old"}, 91.0)]
    counters, ages = made.asked
    assert counters.startswith("last_over_time(") and counters.endswith("[8060s])")
    assert 'model="a\\"b",rollout="0123456789ab"' in counters
    assert "timestamp(nerite_rollout_fleet_info" in ages
    prometheus.read(now=10_001.0, since=2_000.0)
    assert made.asked[2].endswith("[300s])")
    prometheus.read(now=11_001.0, since=2_000.0)
    assert made.asked[4].endswith("[1060s])")


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [(422, b"too many samples", "422: too many samples"), (200, b"<html>", "does not answer as Prometheus does")],
)
def test_what_is_no_answer(answers: tuple[type[Answers], str], status: int, answer: bytes, told: str) -> None:
    made, url = answers
    made.status, made.answer = status, answer
    with pytest.raises(PrometheusError, match=told):
        Prometheus(url, {}, "m", "id").read(1.0, 0.0)


def test_a_prometheus_that_is_down() -> None:
    with pytest.raises(PrometheusError, match="cannot be asked"):
        Prometheus("http://127.0.0.1:1", {}, "m", "id").read(1.0, 0.0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prometheus": ""}, "--fleet needs --prometheus URL"),
        ({"replica": []}, "which replicas are there"),
        ({"lease": "soon"}, "--lease: must be a duration"),
        ({"lease": "2s"}, "five times the --interval"),
    ],
)
def test_command_lines_that_are_refused(change: dict[str, object], told: str) -> None:
    options = argparse.Namespace(
        **{"prometheus": "http://p:9090", "lease": "1m", "interval": 1.0, "replica": ["a:1"], "replicas": "", **change}
    )
    with pytest.raises(UsageError, match=told):
        run_fleet(options, RolloutSpec("2", "1"))


def test_a_fleet_needs_a_baseline_and_its_options_need_a_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    assert rollout(["start", "m", "--to", "2", "--fleet", "--replica", "a:1", "--prometheus", "http://p"]) == 2
    assert "--fleet needs --from VERSION" in capsys.readouterr().err
    shadowed = ["start", "m", "--from", "1", "--to", "2", "--shadow", "10%", "--fleet", "--replica", "a:1"]
    assert rollout([*shadowed, "--prometheus", "http://p"]) == 2
    assert "--fleet cannot begin with --shadow" in capsys.readouterr().err
    assert rollout(["start", "m", "--to", "2", "--replica", "a:1"]) == 2
    assert "--replica needs --fleet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gateway_route": "A route"}, "--gateway-route 'A route' is no name"),
        ({"gateway": ""}, "--gateway '' is no name"),
        ({"namespace": "x_y"}, "--namespace 'x_y' is no name"),
        ({"candidate_service": "two"}, "--candidate-service 'two': write NAME:PORT"),
        ({"baseline_service": "one:70000"}, "--baseline-service 'one:70000': write NAME:PORT"),
    ],
)
def test_routes_that_are_refused(change: dict[str, str], told: str) -> None:
    good = {
        "gateway_route": "r",
        "gateway": "g",
        "namespace": "n",
        "baseline_service": "a:1",
        "candidate_service": "b:2",
    }
    status = {"id": "x", "state": "running", "arms": {arm: {"weight": 50.0} for arm in ("baseline", "candidate")}}
    assert "weight: 50000" in gateway_route(status, argparse.Namespace(**good))
    with pytest.raises(UsageError, match=told):
        gateway_route(status, argparse.Namespace(**{**good, **change}))
