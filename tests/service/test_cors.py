"""CORS: every kind of answer says which pages may read it, where that is asked for, and none else does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from serving import IDENTITY, Serving, binary_request, pbtxt, python_model, serving

APP = "https://app.example"
BODY, HEADERS = binary_request(np.ones((1, 4), np.float32))
LARGE, LARGE_HEADERS = binary_request(np.ones((1, 100_000), np.float32))
JSON = {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
STREAM = """
def execute(self, requests):
    for request in requests:
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        sender = request.get_response_sender()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor.as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("cors") / "models"
    python_model(models, "identity", IDENTITY)
    python_model(models, "stream", STREAM, pbtxt(0, "model_transaction_policy { decoupled: true }"))
    python_model(models, "broken", "def execute(self, requests):\n    raise ValueError('no')", pbtxt())
    return models


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    flags = [
        f"--http-cors-origin={APP}",
        "--http-cors-origin=http://LOCALHOST:80",
        "--http-restricted-api=statistics:X-Key=secret",
        "--http-max-input-size=1000000",
    ]
    with serving(repository, tmp_path_factory.mktemp("cors_log") / "log", *flags) as running:
        yield running


ASKED = {
    "health": ("GET", "/v2/health/live", b"", {}, 200),
    "metadata": ("GET", "/v2/models/identity", b"", {}, 200),
    "JSON": ("POST", "/v2/models/identity/infer", JSON, {}, 200),
    "binary": ("POST", "/v2/models/identity/infer", BODY, HEADERS, 200),
    "large": ("POST", "/v2/models/identity/infer", LARGE, LARGE_HEADERS, 200),
    "packed": ("POST", "/v2/models/identity/infer", BODY, {**HEADERS, "Accept-Encoding": "gzip"}, 200),
    "one response": ("POST", "/v2/models/identity/generate", {"INPUT0": [1, 2]}, {}, 200),
    "a stream": ("POST", "/v2/models/stream/generate_stream", {"INPUT0": [1, 2]}, {}, 200),
    "a model's error": ("POST", "/v2/models/broken/infer", JSON, {}, 500),
    "a model that there is not": ("POST", "/v2/models/none/infer", JSON, {}, 404),
    "not found": ("GET", "/v2/nothing", b"", {}, 404),
    "not allowed": ("GET", "/v2/models/identity/infer", b"", {}, 405),
    "restricted": ("GET", "/v2/models/stats", b"", {}, 403),
    "not implemented": ("POST", "/v2/repository/other/models/identity/load", b"", {}, 501),
    "a body that is too large": ("POST", "/v2/models/identity/infer", b"x" * 1_000_001, {}, 400),
    "the last of a connection": ("GET", "/v2/health/live", b"", {"Connection": "close"}, 200),
}


@pytest.mark.parametrize("name", ASKED)
def test_every_answer_says_who_may_read_it(server: Serving, name: str) -> None:
    method, path, body, headers, expected = ASKED[name]
    for _ in range(3):  # heads and bodies are remembered
        for origin in (APP, "http://localhost"):
            status, told, _ = server.ask(method, path, body, **headers, Origin=origin)
            assert status == expected
            assert told["Access-Control-Allow-Origin"] == origin
            assert (
                told["Access-Control-Expose-Headers"]
                == "Inference-Header-Content-Length, Content-Encoding, Retry-After"
            )
            assert told["Vary"] == "Origin"
        for others in ({}, {"Origin": "https://else.example"}):
            status, told, _ = server.ask(method, path, body, **headers, **others)
            assert status == (403 if others and method == "POST" else expected)
            assert not [header for header in told if header.startswith("Access-Control")]


def test_a_preflight(server: Serving) -> None:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-key"}
    status, told, body = server.ask("OPTIONS", "/v2/models/identity/infer", Origin=APP, **wanted)
    assert (status, body, told["Access-Control-Allow-Origin"]) == (204, b"", APP)
    assert told["Access-Control-Allow-Methods"] == "POST"
    assert {"Inference-Header-Content-Length", "X-Key"} <= set(told["Access-Control-Allow-Headers"].split(", "))
    assert "Content-Length" not in told
    # Before the key: a browser does not send it along with the question.
    assert server.ask("OPTIONS", "/v2/models/stats", Origin=APP, **wanted)[0] == 204
    assert server.ask("OPTIONS", "/v2/nothing", Origin=APP, **wanted)[0] == 404
    assert server.ask("OPTIONS", "/v2/models/identity/infer", Origin=APP)[0] == 405
    status, told, _ = server.ask("OPTIONS", "/v2/models/identity/infer", Origin="https://else.example", **wanted)
    assert (status, [name for name in told if name.startswith("Access-Control")]) == (405, [])


def test_an_exchange_follows_a_preflight_on_the_same_connection(server: Serving) -> None:
    host, port = server.http.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(
            f"OPTIONS /v2 HTTP/1.1\r\nHost: localhost\r\nOrigin: {APP}\r\nAccess-Control-Request-Method: GET\r\n\r\n"
            f"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nOrigin: {APP}\r\nConnection: close\r\n\r\n".encode()
        )
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 204 No Content\r\n")
    assert received.count(b"HTTP/1.1 200 OK\r\n") == 1


def test_any_origin(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", "--http-cors-origin=*") as server:
        _, told, _ = server.ask("GET", "/v2/health/live", Origin="https://whoever.example")
        assert (told["Access-Control-Allow-Origin"], told.get("Vary")) == ("*", None)


def test_off(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log") as server:
        wanted = {"Origin": APP, "Access-Control-Request-Method": "GET"}
        for method in ("OPTIONS", "GET"):
            status, told, _ = server.ask(method, "/v2/health/live", **wanted)
            assert status == (200 if method == "GET" else 405)
            assert not {"Vary", "Access-Control-Allow-Origin", "Access-Control-Allow-Methods"} & told.keys()
