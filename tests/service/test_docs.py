"""The documentation of a running server: valid, up to date, and each command in it works."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

from serving import IDENTITY, IN_PROCESS, Serving, pbtxt, python_model, serving
from tools import require

TYPES = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
OTHERS = ("FP16", "FP32", "FP64", "STRING")
STREAM = """
def execute(self, requests):
    for request in requests:
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        sender = request.get_response_sender()
        for _ in range(2):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", tensor.as_numpy())]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("docs")
    models = folder / "models"

    def model(name: str, *, version: int = 1, **config: Any) -> None:
        python_model(models, name, IDENTITY, pbtxt(**config, parameters=IN_PROCESS), version)

    for datatype in (*TYPES, *OTHERS):
        model(f"{datatype.lower()}-type", datatype=f"TYPE_{datatype}", dims="-1, 2")
    model("no_batch", batch=0, more="", dims="1")
    model("large", dims="3, 100, 100")
    model("texts", datatype="TYPE_STRING", dims="50")
    python_model(models, "stream", STREAM, pbtxt(more="model_transaction_policy { decoupled: true }"))
    model("quo'te", batch=0, more="", dims="1")
    model("two", version=2, more="version_policy { all {} }")
    model("two", version=5, more="version_policy { all {} }")
    model("later")
    flags = ["--model-control-mode=explicit", "--http-allowed-host=*"]
    flags += [f"--load-model={path.name}" for path in models.iterdir() if path.name != "later"]
    with serving(models, folder / "log", *flags) as running:
        yield running


def document(server: Serving) -> dict[str, Any]:
    found: dict[str, Any] = server.json("GET", "/v2/docs/openapi.json")
    return found


def commands(server: Serving) -> dict[str, str]:
    """Return the command of each path that has one."""
    return {
        path: methods["post"]["x-codeSamples"][0]["source"]
        for path, methods in document(server)["paths"].items()
        if "x-codeSamples" in methods.get("post", {})
    }


def run(command: str, folder: Path) -> tuple[str, str]:
    """Run a command in a shell; return the status and the body of the answer."""
    done = subprocess.run(
        f"{command} -sS -w '\\n%{{http_code}}'", shell=True, cwd=folder, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    body, _, status = done.stdout.rpartition("\n")
    return status, body


def test_the_document_is_valid(server: Serving) -> None:
    status, headers, body = server.ask("GET", "/v2/docs/openapi.json")
    assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, "application/json", "no-store")
    validate(json.loads(body))


def test_every_model_has_a_command_that_works(server: Serving, tmp_path: Path) -> None:
    require("curl")
    found = commands(server)
    models = {entry["name"] for entry in server.json("POST", "/v2/repository/index", {"ready": True})}
    assert {path.split("/")[3] for path in found} == models
    assert "/v2/models/two/versions/2/infer" in found and "/v2/models/two/versions/5/infer" in found
    answers = {path: run(command, tmp_path) for path, command in found.items()}
    assert {path: answer for path, answer in answers.items() if answer[0] != "200"} == {}
    assert answers["/v2/models/stream/generate_stream"][1].count("data: ") == 2
    assert json.loads(answers["/v2/models/string-type/infer"][1])["outputs"][0]["data"] == ["Hello", "Hello"]
    assert b'"FP16","shape":[1,128,2]' in (tmp_path / "answer.bin").read_bytes()


def test_models_come_and_go(server: Serving, tmp_path: Path) -> None:
    path = "/v2/models/later/infer"
    assert path not in document(server)["paths"]
    assert b"<td>later<td><td class=none>not loaded" in server.ask("GET", "/v2/docs")[2]
    server.ask("POST", "/v2/repository/models/later/load")
    assert path in document(server)["paths"]
    server.ask("POST", "/v2/repository/models/later/unload")
    assert path not in document(server)["paths"]


def test_the_page(server: Serving) -> None:
    status, headers, body = server.ask("GET", "/v2/docs")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    for path in commands(server):
        if "/versions/" not in path:
            assert path.replace("'", "&#x27;").encode() in body


@pytest.mark.parametrize(
    ("host", "proto", "url"),
    [
        ("models.example", "https", "https://models.example"),
        ("[::1]:8000", "http", "http://[::1]:8000"),
        ("models.example:", "", "http://localhost:8000"),
    ],
)
def test_where_the_client_finds_the_server(server: Serving, host: str, proto: str, url: str) -> None:
    body = server.ask("GET", "/v2/docs/openapi.json", Host=host, X_Forwarded_Proto=proto)[2]
    assert json.loads(body)["servers"] == [{"url": url}]
    assert server.ask("GET", "/v2/docs/openapi.json", Host="a'; rm -rf")[0] == 403


def test_keys(tmp_path: Path) -> None:
    require("curl")
    python_model(tmp_path / "models", "identity", IDENTITY)
    flags = ["--http-restricted-api=inference,model-repository:X-Key=$open `'\"", "--http-cors-origin=https://a"]
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
        command = commands(server)["/v2/models/identity/infer"]
        assert run(f"KEY=shut; {command}", tmp_path)[0] == "403"
        assert run(f"KEY='$open `'\\''\"'; {command}", tmp_path)[0] == "200"
        assert b"Not served" not in server.ask("GET", "/v2/docs")[2]
    with serving(tmp_path / "models", tmp_path / "log", "--http-restricted-api=metadata:X-Key=open") as server:
        for path in ("/v2/docs", "/v2/docs/openapi.json"):
            assert server.ask("GET", path)[0] == 403
            assert server.ask("GET", path, X_Key="open")[0] == 200
