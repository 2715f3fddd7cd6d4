"""Pages of other sites command nothing on any port that speaks HTTP, nor do pages that rename the server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import IDENTITY, Serving, python_model, serving

APP = "https://app.example"
EVIL = {"Content-Type": "text/plain", "Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
"""What a browser sends of a page that calls ``fetch(url, {method: "POST", mode: "no-cors", body: text})``."""
ROW = {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
FLAGS = (
    "--model-control-mode=explicit",
    "--load-model=identity",
    f"--http-cors-origin={APP}",
    "--allow-sagemaker=true",
    "--sagemaker-port=0",
    "--model-load-files=any",  # the port of SageMaker is open to all
    "--allow-vertex-ai=true",
    "--vertex-ai-port=0",
)
VERTEX = {"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    python_model(folder / "models", "identity", IDENTITY)
    with serving(folder / "models", folder / "log", *FLAGS, environment=VERTEX) as running:
        yield running


def program(mark: Path) -> bytes:
    """A load with a model that leaves a mark where it is loaded."""
    text = f"open({str(mark)!r}, 'w')\nclass TritonPythonModel:\n    def execute(self, requests): return []\n"
    files = {"file:1/model.py": base64.b64encode(text.encode()).decode()}
    config = json.dumps({"backend": "python", "input": [], "output": [], "max_batch_size": 0})
    return json.dumps({"parameters": {"config": config, **files}}).encode()


def test_a_page_cannot_have_the_server_run_its_program(server: Serving, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    status, _, body = server.ask("POST", "/v2/repository/models/evil/load", program(mark), **EVIL)
    assert status == 403
    assert b"--http-cors-origin=https://evil.example" in body
    assert not mark.exists()
    # The same from a client that is no browser.
    server.ask("POST", "/v2/repository/models/evil/load", program(mark))
    assert mark.exists()


CHANGES: dict[str, tuple[str, str, str, Any]] = {
    "inference": ("HTTPService", "POST", "/v2/models/identity/infer", ROW),
    "generate": ("HTTPService", "POST", "/v2/models/identity/generate", {"INPUT0": [1, 2]}),
    "unload": ("HTTPService", "POST", "/v2/repository/models/identity/unload", b""),
    "logging": ("HTTPService", "POST", "/v2/logging", {"log_verbose_level": 1}),
    "trace": ("HTTPService", "POST", "/v2/trace/setting", {"trace_rate": "1"}),
    "shared memory": ("HTTPService", "POST", "/v2/systemsharedmemory/region/r/register", {"key": "r", "byte_size": 1}),
    "OpenAI": ("HTTPService", "POST", "/v1/completions", {"model": "identity", "prompt": "x"}),
    "OpenAI's load": ("HTTPService", "POST", "/v1/models/identity/unload", b""),
    "no path": ("HTTPService", "POST", "/nothing", b""),
    "the page's own paths": ("HTTPService", "POST", "/ui", b""),
    "SageMaker": ("Sagemaker HTTPService", "POST", "/invocations", ROW),
    "SageMaker's load": ("Sagemaker HTTPService", "POST", "/models", {"model_name": "m", "url": "/"}),
    "SageMaker's unload": ("Sagemaker HTTPService", "DELETE", "/models/m", b""),
    "Vertex AI": ("Vertex AI HTTPService", "POST", "/predict", ROW),
    "metrics": ("Metrics", "POST", "/metrics", b""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_page_of_another_site_changes_nothing(server: Serving, name: str) -> None:
    service, method, path, body = CHANGES[name]
    for headers in (EVIL, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:1"}):
        for _ in range(2):  # heads are remembered
            assert server.ask(method, path, body, service=service, **headers)[0] == 403
    own = {"Sec-Fetch-Site": "same-origin", "Origin": f"http://127.0.0.1:{server.ports[service]}"}
    assert server.ask(method, path, body, service=service, **own)[0] != 403
    assert server.ask(method, path, body, service=service, Origin=APP)[0] != 403
    server.ask("POST", "/v2/repository/models/identity/load")  # some of these unload it


@pytest.mark.parametrize(
    ("service", "path"),
    [("HTTPService", "/v2"), ("HTTPService", "/ui"), ("HTTPService", "/v1/models"), ("Metrics", "/metrics")],
)
def test_a_page_that_renames_the_server_reads_nothing(server: Serving, service: str, path: str) -> None:
    for host in ("rebind.evil.example", f"rebind.evil.example:{server.ports[service]}"):
        status, _, body = server.ask("GET", path, service=service, Host=host, Sec_Fetch_Site="same-origin")
        assert status == 403
        assert b"--http-allowed-host=rebind.evil.example" in body
    for host in ("localhost", "127.0.0.1", "[::1]:80", "a.localhost"):
        assert server.ask("GET", path, service=service, Host=host)[0] == 200


def test_names_that_are_allowed(folder: Path, server: Serving, tmp_path: Path) -> None:
    flags = ["--http-address=0.0.0.0", "--http-allowed-host=models.example", "--allow-grpc=false"]
    with serving(folder / "models", tmp_path / "log", *flags, "--load-model=identity", FLAGS[0]) as other:
        for host, status in {"models.example:80": 200, "127.0.0.1": 200, "nerite.example": 403}.items():
            assert other.ask("GET", "/v2", Host=host)[0] == status
            assert other.ask("GET", "/metrics", service="Metrics", Host=host)[0] == status
