"""The ports of SageMaker and Vertex AI, as those start a server. That they answer as Triton's is for the exam."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_streams import DECOUPLED, THREADED

from nerite.cli import command_line
from nerite.cli.command_line import parse_command_line
from pages import ROOT
from ports import free_ports
from serving import IDENTITY, NERITE, Serving, binary_request, eventually, pbtxt, python_model, serving

SAGEMAKER = ("--allow-sagemaker=true", "--sagemaker-port=0", "--allow-http=false", "--allow-grpc=false")
VERTEX = {"AIP_MODE": "PREDICTION", "AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health"}
ROW = {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.5]}]}
LOCK = "--http-restricted-api=inference,model-repository:x-key=open"
Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    python_model(models, "identity", IDENTITY)
    return models


def sagemaker(server: Serving, method: str, path: str, body: Any = b"", **headers: str) -> Answer:
    return server.ask(method, path, body, service="Sagemaker HTTPService", **headers)


def vertex(server: Serving, path: str, body: Any = b"", **headers: str) -> Answer:
    return server.ask("POST" if body else "GET", path, body, service="Vertex AI HTTPService", **headers)


def data_of(answer: Answer) -> Any:
    assert answer[0] == 200, answer
    return json.loads(answer[2])["outputs"][0]["data"]


def test_sagemaker_alone(repository: Path, tmp_path: Path) -> None:
    environment = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "identity"}
    with serving(repository, tmp_path / "log", *SAGEMAKER, environment=environment) as server:
        assert sorted(server.ports) == ["Metrics", "Sagemaker HTTPService"]
        assert "Listening: SageMaker " in server.text
        assert sagemaker(server, "GET", "/ping")[0] == 200
        assert data_of(sagemaker(server, "POST", "/invocations", ROW)) == [1.5, 2.5]


def test_a_large_binary_invocation(repository: Path, tmp_path: Path) -> None:
    environment = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "identity"}
    kind = "application/vnd.sagemaker-triton.binary+json;json-header-size="
    array = np.arange(100_000, dtype=np.float32).reshape(1, -1)
    body, headers = binary_request(array)
    with serving(repository, tmp_path / "log", *SAGEMAKER, environment=environment) as server:
        for _ in range(2):
            content_type = kind + headers["Inference-Header-Content-Length"]
            _, told, answer = sagemaker(server, "POST", "/invocations", body, Content_Type=content_type)
            size = int(told["Content-Type"].removeprefix(kind))
            assert answer[size:] == array.tobytes()


@pytest.mark.parametrize(("mode", "status"), [("live", 200), ("ready", 400)])
def test_ping(repository: Path, tmp_path: Path, mode: str, status: int) -> None:
    python_model(repository, "broken", "def initialize(self, args):\n    raise ValueError('no weights')")
    environment = {"SAGEMAKER_TRITON_PING_MODE": mode}
    flags = (*SAGEMAKER, "--exit-on-error=false")
    with serving(repository, tmp_path / "log", *flags, environment=environment) as server:
        assert sagemaker(server, "GET", "/ping")[0] == status


@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
def test_invocations_that_generate(tmp_path: Path, kind: str) -> None:
    models = tmp_path / "models"
    python_model(models, "threaded", THREADED, pbtxt(batch=1, more=DECOUPLED))
    environment = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "threaded", "SAGEMAKER_TRITON_INFERENCE_TYPE": kind}
    with serving(models, tmp_path / "log", *SAGEMAKER, environment=environment) as server:
        status, headers, body = sagemaker(server, "POST", "/invocations", {"INPUT0": 1})
        assert status == 200
        assert headers["Content-Type"].startswith("application/json" if kind == "generate" else "text/event-stream")
        assert json.loads(body.removeprefix(b"data: "))["OUTPUT0"] == 0
        assert sagemaker(server, "GET", "/invocations")[0] == 405


def test_keys_hold_on_the_port_of_sagemaker(repository: Path, tmp_path: Path) -> None:
    environment = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "identity"}
    with serving(repository, tmp_path / "log", *SAGEMAKER, LOCK, environment=environment) as server:
        for method, path in (
            ("POST", "/invocations"),
            ("POST", "/models/x/invoke"),
            ("GET", "/models"),
            ("GET", "/models/x"),
            ("POST", "/models"),
            ("DELETE", "/models/x"),
        ):
            assert sagemaker(server, method, path)[0] == 403, (method, path)
        assert data_of(sagemaker(server, "POST", "/invocations", ROW, x_key="open")) == [1.5, 2.5]
        assert sagemaker(server, "GET", "/models", x_key="open")[0] == 200


def test_vertex_alone(repository: Path, tmp_path: Path) -> None:
    """The only model there is, is the one that is asked."""
    flags = ("--vertex-ai-port=0",)
    with serving(repository, tmp_path / "log", *flags, environment=VERTEX) as server:
        assert sorted(server.ports) == ["Metrics", "Vertex AI HTTPService"]
        assert vertex(server, "/health")[0] == 200
        assert data_of(vertex(server, "/predict", ROW)) == [1.5, 2.5]
        status, headers, page = vertex(server, "/predict", b"-", X_Vertex_Ai_Triton_Redirect="metrics")
        assert (status, headers["Content-Type"]) == (200, "text/plain")
        assert b'nv_inference_request_success{model="identity",version="1"} 1' in page


def test_keys_hold_on_the_port_of_vertex(repository: Path, tmp_path: Path) -> None:
    flags = ("--vertex-ai-port=0", LOCK)
    with serving(repository, tmp_path / "log", *flags, environment=VERTEX) as server:
        assert vertex(server, "/predict", ROW)[0] == 403
        assert vertex(server, "/predict", ROW, X_Vertex_Ai_Triton_Redirect="v2/repository/index")[0] == 403
        assert data_of(vertex(server, "/predict", ROW, x_key="open")) == [1.5, 2.5]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "Expect the model repository contains only a single model if default model is not specified"),
        (("--vertex-ai-default-model=other",), "Expect the default model 'other' is loaded"),
    ],
)
def test_vertex_needs_to_know_the_model(repository: Path, tmp_path: Path, flags: tuple[str, ...], reason: str) -> None:
    python_model(repository, "second", IDENTITY)
    said = pytest.raises(RuntimeError, match=f"failed to start Vertex AI service: Invalid argument - {reason}")
    with said, serving(repository, tmp_path / "log", "--vertex-ai-port=0", *flags, environment=VERTEX):
        pass


def archive(root: Path, source: str = IDENTITY, config: str = "") -> Path:
    """An archive with one model, in a folder whose name says nothing, and with a name of its own in the file."""
    python_model(root, "model", source, f'name: "trained"\n{config or pbtxt()}')
    return root


def load(server: Serving, name: str, root: Path, **headers: str) -> int:
    return sagemaker(server, "POST", "/models", {"model_name": name, "url": str(root)}, **headers)[0]


def loaded(server: Serving) -> list[str]:
    return [each["modelName"] for each in json.loads(sagemaker(server, "GET", "/models")[2])["models"]]


@pytest.fixture(params=["true", "false"])
def several(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Serving]:
    """A server as SageMaker's script starts it for several models, with and without namespaces."""
    (tmp_path / "empty").mkdir()
    flags = (*SAGEMAKER, "--model-control-mode=explicit", f"--model-namespacing={request.param}")
    environment = {"SAGEMAKER_TRITON_PING_MODE": "live"}
    with serving(tmp_path / "empty", tmp_path / "log", *flags, environment=environment) as server:
        yield server


def test_models_come_and_go(several: Serving, tmp_path: Path) -> None:
    assert load(several, "one", archive(tmp_path / "1")) == 200
    assert load(several, "two", archive(tmp_path / "2"), X_Amzn_SageMaker_Target_Model="team/two.tar.gz") == 200
    assert loaded(several) == ["one", "two"]
    workers = several.workers()
    assert len(workers) == 2
    assert data_of(sagemaker(several, "POST", "/models/one/invoke", ROW)) == [1.5, 2.5]
    target = {"X_Amzn_SageMaker_Target_Model": "team/two.tar.gz"}
    assert data_of(sagemaker(several, "POST", "/models/two/invoke", ROW, **target)) == [1.5, 2.5]
    assert sagemaker(several, "DELETE", "/models/one")[0] == 200
    assert loaded(several) == ["two"]
    assert len(several.workers()) == 1
    # SageMaker does not always say again what it said when it loaded.
    assert sagemaker(several, "DELETE", "/models/two")[0] == 200
    assert several.workers() == {}
    assert sagemaker(several, "GET", "/ping")[0] == 200


def test_a_model_that_failed_leaves_nothing(several: Serving, tmp_path: Path) -> None:
    hungry = archive(tmp_path / "1", "def initialize(self, args):\n    raise MemoryError('CUDA out of memory')")
    broken = archive(tmp_path / "2", "def initialize(self, args):\n    raise ValueError('no weights')")
    assert load(several, "one", hungry) == 507
    assert load(several, "one", broken) == 400
    assert loaded(several) == []
    python_model(broken, "model", IDENTITY, 'name: "repaired"\n' + pbtxt())
    assert load(several, "one", broken) == 200
    assert data_of(sagemaker(several, "POST", "/models/one/invoke", ROW)) == [1.5, 2.5]


def test_an_unloading_waits_for_what_runs(several: Serving, tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    held = f"    open({str(begun)!r}, 'w').close()\n    while not os.path.exists({str(go)!r}): time.sleep(0.001)\n"
    assert load(several, "held", archive(tmp_path / "1", IDENTITY.replace("    return", f"{held}    return", 1))) == 200
    with ThreadPoolExecutor(2) as threads:
        try:
            asked = threads.submit(sagemaker, several, "POST", "/models/held/invoke", ROW)
            eventually(begun.exists)
            gone = threads.submit(sagemaker, several, "DELETE", "/models/held")
            eventually(lambda: loaded(several) == [])
            assert not gone.done()
        finally:
            go.touch()
        assert gone.result()[0] == 200
        assert several.workers() == {}
        assert data_of(asked.result()) == [1.5, 2.5]


def test_a_model_that_is_gone_is_not_found_again(several: Serving, tmp_path: Path) -> None:
    """Also by a connection that has asked it the same before."""
    assert load(several, "one", archive(tmp_path / "1")) == 200
    body, headers = binary_request(np.ones((1, 2), np.float32))
    kind = "application/vnd.sagemaker-triton.binary+json;json-header-size="
    connection = http.client.HTTPConnection("127.0.0.1", several.ports["Sagemaker HTTPService"], timeout=30)

    def invoke() -> tuple[int, bytes]:
        content_type = kind + headers["Inference-Header-Content-Length"]
        connection.request("POST", "/models/one/invoke", body, {"Content-Type": content_type})
        answer = connection.getresponse()
        return answer.status, answer.read()

    assert [invoke()[0] for _ in range(3)] == [200, 200, 200]
    assert sagemaker(several, "DELETE", "/models/one")[0] == 200
    assert invoke() == (404, b"")
    assert load(several, "one", tmp_path / "1") == 200
    assert invoke()[0] == 200
    connection.close()


def test_models_are_loaded_in_explicit_mode_only(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", *SAGEMAKER) as server:
        body = {"model_name": "one", "url": str(archive(tmp_path / "1"))}
        status, _, answer = sagemaker(server, "POST", "/models", body)
        assert status == 400
        assert b"repository registration is not allowed if model control mode is not EXPLICIT" in answer


@contextmanager
def started(block: str, folder: Path, **environment: str) -> Iterator[Serving]:
    """Run the one block of the page about the clouds that has this in it, with its folders below another one."""
    page = Path(__file__).resolve().parents[2] / "docs" / "clouds.md"
    (script,) = (each for each in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S) if block in each)
    for place in ("/opt/ml/model", "/tmp/sagemaker"):
        script = script.replace(place, f"{folder}{place}")
    path = f"{NERITE.parent}:{os.environ['PATH']}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", "-c", script.replace("AIP_MODE", "exec env AIP_MODE")],
            cwd=folder,
            env={**os.environ, "PATH": path, "NERITE_METRICS_PORT": "0", **environment},
            stdout=log,
            stderr=log,
        )
    server = Serving(process, folder / "log")
    try:
        server.wait()
        yield server
    finally:
        status = server.stop()
    assert status == 0, server.text


def test_the_script_for_one_model(tmp_path: Path) -> None:
    python_model(tmp_path / "opt" / "ml" / "model", "only", IDENTITY)
    with started("bin/serve", tmp_path, SAGEMAKER_BIND_TO_PORT="0") as server:
        assert sagemaker(server, "GET", "/ping")[0] == 200
        assert data_of(sagemaker(server, "POST", "/invocations", ROW)) == [1.5, 2.5]


def test_the_script_for_several_models(tmp_path: Path) -> None:
    with started("bin/serve", tmp_path, SAGEMAKER_BIND_TO_PORT="0", SAGEMAKER_MULTI_MODEL="true") as server:
        assert sagemaker(server, "GET", "/ping")[0] == 200
        assert load(server, "one", archive(tmp_path / "opt" / "ml" / "models" / "one" / "model")) == 200
        assert data_of(sagemaker(server, "POST", "/models/one/invoke", ROW)) == [1.5, 2.5]


def test_the_command_of_vertex(repository: Path, tmp_path: Path) -> None:
    with started("AIP_MODE", tmp_path, NERITE_VERTEX_AI_PORT="0") as server:
        assert vertex(server, "/health")[0] == 200
        assert data_of(vertex(server, "/predict", ROW)) == [1.5, 2.5]


def test_the_service_of_knative(repository: Path, tmp_path: Path) -> None:
    service = yaml.safe_load((ROOT / "deploy" / "knative" / "service.yaml").read_text())
    (container,) = service["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    words = [*container["command"], *container["args"]]
    assert words[:3] == ["nerite", "serve", "/models"]
    environment = {"K_SERVICE": "nerite", "PORT": str(port["containerPort"])}
    assert parse_command_line(words[2:], environment, command_line.NERITE).options.http.port == 8080
    free = free_ports(1)[0]
    command = [str(NERITE), "serve", str(repository), *container["args"]]
    command += ["--allow-grpc=false", "--metrics-port=0"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "K_SERVICE": "nerite", "PORT": str(free)}
        )
    try:
        for probe in ("readinessProbe", "livenessProbe"):
            path = container[probe]["httpGet"]["path"]
            eventually(lambda: answers(free, path))  # noqa: B023
    finally:
        process.terminate()
        assert process.wait(60) == 0


def answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
