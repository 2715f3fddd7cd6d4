"""``nerite serve``: it starts, answers, says what it does, and ends in good order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from serving import (
    HELD,
    IDENTITY,
    NERITE,
    PATIENCE,
    accepts,
    binary_request,
    eventually,
    let_go,
    pbtxt,
    python_model,
    serving,
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    python_model(models, "identity", IDENTITY)
    return models


def test_answers_json_and_binary(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log") as server:
        assert server.ask("GET", "/v2/health/live")[0] == 200
        assert server.ready()
        assert server.ready("identity")
        assert server.infer("identity", [1.5, 2.5]) == [1.5, 2.5]
        array = np.arange(6, dtype=np.float32).reshape(1, 6)
        body, headers = binary_request(array)
        status, answered, answer = server.ask("POST", "/v2/models/identity/infer", body, **headers)
        size = int(answered["Inference-Header-Content-Length"])
        assert status == 200
        assert answered["Content-Type"] == "application/octet-stream"
        assert json.loads(answer[:size])["outputs"] == [
            {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 6], "parameters": {"binary_data_size": 24}}
        ]
        assert answer[size:] == array.tobytes()


def test_counts_are_exact(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log") as server:
        for _ in range(7):
            server.infer("identity", [1.0])
        with pytest.raises(RuntimeError, match="unexpected inference input"):
            server.infer("identity", [1.0], name="WRONG")
        stats = server.json("GET", "/v2/models/identity/stats")["model_stats"][0]
        assert stats["inference_count"] == 7
        assert stats["inference_stats"]["success"]["count"] == 7
        assert stats["inference_stats"]["fail"]["count"] == 0
        assert stats["batch_stats"][0]["batch_size"] == 1
        metrics = server.metrics()
        assert metrics['nv_inference_request_success{model="identity",version="1"}'] == 7
        assert metrics['nv_inference_count{model="identity",version="1"}'] == 7
        assert metrics['nv_inference_pending_request_count{model="identity",version="1"}'] == 0


def test_drains_before_it_ends(tmp_path: Path) -> None:
    model = python_model(tmp_path / "models", "slow", HELD)
    with serving(tmp_path / "models", tmp_path / "log") as server, ThreadPoolExecutor(1) as caller:
        asked = caller.submit(server.infer, "slow", [-1.0])
        eventually(lambda: "executes -1" in server.text)
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: "Model 'slow' (version 1) has 1 in-flight inferences" in server.text)
        assert "Waiting for in-flight requests to complete." in server.text
        let_go(model)
        assert asked.result() == [-1.0]
        assert server.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
def test_an_idle_connection_may_send_a_last_request(tmp_path: Path, used: bool) -> None:
    """Its answer ends the connection and the server, which would have waited for longer than this test may take."""
    python_model(tmp_path / "models", "identity", IDENTITY)
    keepalive = f"--exit-keepalive-secs={10 * PATIENCE if used else 1:.0f}"
    flags = (keepalive, f"--exit-timeout-secs={100 * PATIENCE:.0f}")
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
        connection = HTTPConnection(server.http, timeout=PATIENCE)
        with closing(connection):
            connection.request("GET", "/v2/health/ready")
            assert connection.getresponse().read() == b""
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: not accepts(server.http))
            if used:
                connection.request("GET", "/v2/health/live")
                last = connection.getresponse()
                assert (last.status, last.getheader("Connection")) == (200, "close")
            assert server.process.wait(PATIENCE) == 0


def test_gives_up_draining_after_the_exit_timeout(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "slow", HELD)
    with serving(tmp_path / "models", tmp_path / "log", "--exit-timeout-secs=1", clean=False) as server:
        body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [-1.0]}]}
        raw = json.dumps(body).encode()
        host, port = server.http.split(":")
        with socket.create_connection((host, int(port))) as caller:
            caller.sendall(
                b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                % (len(raw), raw)
            )
            eventually(lambda: "executes -1" in server.text)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 1  # without the flag it would wait for 30 s
        assert "Exit timeout expired. Exiting immediately." in server.text


@pytest.mark.parametrize("method", ["initialize(self, args)", "auto_complete_config(config)"])
def test_a_load_that_is_under_way_does_not_keep_it(tmp_path: Path, method: str) -> None:
    kind = "@staticmethod\n" if "config" in method else ""
    python_model(
        tmp_path / "models", "slow", f"{kind}def {method}:\n    print('begun', flush=True)\n    time.sleep(30)"
    )
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit") as server:
        body = b"{}"
        host, port = server.http.split(":")
        with socket.create_connection((host, int(port))) as caller:
            head = b"POST /v2/repository/models/slow/load HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            caller.sendall(head % len(body) + body)
            eventually(lambda: "begun" in server.text)
        # Nobody waits for it any more.
        assert server.stop() == 0
        assert "Traceback" not in server.text


@pytest.mark.parametrize("flag", ["--log-format=default", "--log-format=json", "--log-error=false", "--log-file={}"])
def test_a_model_that_fails_ends_the_start(repository: Path, tmp_path: Path, flag: str) -> None:
    """What ended the start is printed last and plain on standard error, as by Triton, with the remedy."""
    python_model(repository, "broken", "def initialize(self, args):\n    raise ValueError('no weights')\n")
    file = tmp_path / "nerite.log"
    done = subprocess.run(
        [NERITE, "serve", repository, "--http-port=0", "--grpc-port=0", "--metrics-port=0", flag.format(file)],
        capture_output=True,
        timeout=PATIENCE,
        check=False,
        text=True,
    )
    assert done.returncode == 1
    *before, last, remedy = done.stderr.splitlines()
    assert last == "error: creating server: Internal - failed to load all models"
    assert remedy.endswith("start without them: --exit-on-error=false")
    logged = "\n".join(before) + done.stdout + (file.read_text() if file.exists() else "")
    assert "no weights" in logged or "error=false" in flag
    if "json" in flag:
        texts = [json.loads(line)["message"] for line in before]
        assert texts[-1].startswith("creating server: Internal - failed to load all models")


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_that_fails_may_be_left_out(repository: Path, tmp_path: Path, strict: bool) -> None:
    python_model(repository, "broken", "def initialize(self, args):\n    raise ValueError('no weights')\n")
    flags = ("--exit-on-error=false", *(() if strict else ("--strict-readiness=false",)))
    with serving(repository, tmp_path / "log", *flags) as server:
        assert server.infer("identity", [3.0]) == [3.0]
        assert server.ready() != strict
        (broken,) = [entry for entry in server.json("POST", "/v2/repository/index") if entry["name"] == "broken"]
        assert broken["state"] == "UNAVAILABLE"
        assert "no weights" in broken["reason"]


def test_a_repository_that_is_missing_may_come_later(repository: Path, tmp_path: Path) -> None:
    """As with Triton the server stays, neither live nor ready; when it looks for models it finds those that come."""
    late = tmp_path / "late"
    said = _said_without_a_start(late, "--http-port=0")
    assert f"failed to stat file {late}" in said
    flags = ("--exit-on-error=false", "--model-control-mode=poll", "--repository-poll-secs=1")
    with serving(late, tmp_path / "log", *flags) as server:
        assert f"failed to stat file {late}" in server.text
        assert server.ask("GET", "/v2/health/live")[0] == 400
        assert not server.ready()
        repository.rename(late)
        eventually(server.ready)
        assert server.ask("GET", "/v2/health/live")[0] == 200
        eventually(lambda: server.ready("identity"))


def test_a_port_that_is_taken(repository: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = _said_without_a_start(repository, "--http-address=127.0.0.1", f"--http-port={port}")
    refusal = f"failed to start HTTP service: Unavailable - Socket '127.0.0.1:{port}' already in use"
    assert f"{refusal} by {sys.executable}" in said and f"(pid {os.getpid()})" in said
    assert "loading: " not in said, "models may take long, and would be for nothing"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("192.0.2.1", "the address must be one of this machine, or 0.0.0.0 for all addresses"),
        ("nowhere.invalid", "the address must be one of this machine"),
    ],
)
def test_a_port_of_another_machine(repository: Path, address: str, reason: str) -> None:
    said = _said_without_a_start(repository, "--http-port=0", f"--grpc-address={address}")
    assert f"failed to start GRPC service: Unavailable - Socket '{address}:0' cannot be opened: {reason}" in said


def _said_without_a_start(repository: Path, *flags: str) -> str:
    command = [NERITE, "serve", repository, "--grpc-port=0", *flags]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    return (done.stderr + done.stdout).decode()


def test_in_process_and_worker_answer_alike(tmp_path: Path) -> None:
    models = tmp_path / "models"
    mode = 'parameters { key: "EXECUTION_MODE" value: { string_value: "in_process" } }'
    python_model(models, "apart", IDENTITY)
    python_model(models, "within", IDENTITY, pbtxt(parameters=mode))
    with serving(models, tmp_path / "log") as server:
        assert server.infer("apart", [1.0, 2.0]) == server.infer("within", [1.0, 2.0]) == [1.0, 2.0]
        assert list(server.workers()) == ["apart_0_0"]
