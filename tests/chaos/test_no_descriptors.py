"""A server without a descriptor left: who is connected is answered, what needs one says so, and all comes back."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from serving import IDENTITY, IN_PROCESS, PATIENCE, Serving, binary_request, eventually, pbtxt, python_model, serving

LIMIT = 150
"""Descriptors that the server may have, and each of its workers."""
LARGE = np.arange(2_000_000, dtype=np.float32).reshape(1, -1)
REMEDY = "raise the open file limit (ulimit -n), or use fewer connections"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    models = tmp_path / "models"
    python_model(models, "other", IDENTITY)
    python_model(models, "inside", IDENTITY, pbtxt(parameters=IN_PROCESS))
    python_model(models, "mortal", IDENTITY)
    python_model(models, "new", IDENTITY)
    python_model(models, "newinside", IDENTITY, pbtxt(parameters=IN_PROCESS))
    # Else idle connections make room for others before that.
    unbounded = "--max-connections=0"
    flags = (
        unbounded,
        # Front processes would have the connections, and leave descriptors to others.
        "--front-processes=1",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in ("other", "inside", "mortal")),
    )
    within = ("sh", "-c", f'ulimit -n {LIMIT} && exec "$0" "$@"')
    with serving(models, tmp_path / "log", *flags, within=within) as running:
        yield running


class Client:
    """One connection, which was made while there was room for it."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=PATIENCE)

    def close(self) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: Any = b"", **headers: str) -> tuple[int, bytes]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.request(method, path, raw, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def large(self, model: str) -> bool:
        """Ask with a large tensor; return whether it comes back."""
        body, headers = binary_request(LARGE)
        status, answer = self.ask("POST", f"/v2/models/{model}/infer", body, **headers)
        return status == 200 and answer.endswith(LARGE.tobytes())


def open_files(server: Serving) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@contextlib.contextmanager
def filled(server: Serving, left: int = 0) -> Iterator[None]:
    """Have idle connections take all descriptors but so many, in the block."""
    host, port = server.http.split(":")
    with contextlib.ExitStack() as idle:
        while open_files(server) < LIMIT - left:
            idle.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
            # One more that is not accepted, and closed at once, is none.
            time.sleep(0.001)
        yield


def test_without_descriptors(server: Serving) -> None:
    with (
        contextlib.closing(Client(server.http)) as client,
        contextlib.closing(Client(f"127.0.0.1:{server.ports['Metrics']}")) as metrics,
        grpcclient.InferenceServerClient(server.grpc) as caller,
    ):
        assert client.ask("GET", "/v2/health/ready")[0] == metrics.ask("GET", "/metrics")[0] == 200
        before = open_files(server)
        assert caller.is_server_live()
        with filled(server):
            # A large tensor of each model for the first time: there is no memory for them yet that workers map.
            for model in ("other", "inside"):
                for _ in range(3):
                    assert client.large(model)
            tensor = grpcclient.InferInput("INPUT0", LARGE.shape, "FP32")
            tensor.set_data_from_numpy(LARGE)
            answer = caller.infer("other", [tensor], client_timeout=PATIENCE)
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), LARGE)
            assert metrics.ask("GET", "/metrics")[0] == 200
            assert client.ask("POST", "/v2/repository/index")[0] in (200, 500)
            status, error = client.ask("POST", "/v2/repository/models/new/load")
            assert status == 400 or status == 500
            assert REMEDY in error.decode(), error
            status, error = client.ask("POST", "/v2/repository/models/newinside/load")
            assert status == 200 or REMEDY in error.decode() or "Too many open files" in error.decode(), error
            os.kill(server.workers()["mortal_0_0"], signal.SIGKILL)
            eventually(lambda: "no new worker for" in server.text)
            body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
            status, error = client.ask("POST", "/v2/models/mortal/infer", body)
            assert status == 503
            assert REMEDY in error.decode()
            assert client.large("other")
        eventually(lambda: server.ready("mortal"))
        assert server.infer("mortal", [1.0]) == [1.0]
        for name in ("new", "newinside"):
            assert server.ask("POST", f"/v2/repository/models/{name}/load")[0] == 200
            assert server.infer(name, [1.0]) == [1.0]
            assert server.ask("POST", f"/v2/repository/models/{name}/unload")[0] == 200
        assert client.large("other")
    # Memory of large tensors has some, and is used again.
    eventually(lambda: open_files(server) < before + 40)


def test_loads_with_few_descriptors(server: Serving) -> None:
    """Whatever a load lacks one for, it says so or does without."""
    outcomes = set()
    with contextlib.closing(Client(server.http)) as client:
        assert client.large("other")
        for left in (*range(0, 16, 2), 20, 26):
            for name in ("new", "newinside"):
                with filled(server, left):
                    status, error = client.ask("POST", f"/v2/repository/models/{name}/load")
                    outcomes.add(status)
                    assert status == 200 or "Too many open files" in error.decode(), (left, error)
                    assert client.large("other")
                assert client.ask("POST", f"/v2/repository/models/{name}/unload")[0] == 200
                eventually(lambda name=name: server.state(name) in ("", "UNAVAILABLE"))  # type: ignore[misc]  # bound now
    assert {200} < outcomes
    assert server.ready()
    assert server.infer("mortal", [1.0]) == [1.0]
