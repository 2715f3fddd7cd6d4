"""Text that is not valid, or of any length, wherever clients and models write it: its field is named, all goes on."""

from __future__ import annotations

import gzip
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import IDENTITY, IN_PROCESS, Serving, ensemble, pbtxt, python_model, serving, step

ROUNDS = 400
SEQUENCES = """sequence_batching { control_input [ {
  name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } ] } ] }"""
CALLS = """
def execute(self, requests):
    tensor = pb_utils.Tensor("INPUT0", np.ones((1, 1), np.float32))
    which = int(pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy().flat[0])
    wrong = [dict(correlation_id="\\udcff"), dict(request_id="\\udcff"), dict(correlation_id=1 << 70)][which]
    pb_utils.InferenceRequest(
        model_name="sequences", inputs=[tensor], requested_output_names=["OUTPUT0"], flags=1, **wrong
    ).exec()
"""
SAYS = """
def initialize(self, args):
    self.family = pb_utils.MetricFamily("said", "what\\n", pb_utils.MetricFamily.COUNTER)

def execute(self, requests):
    which = int(pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy().flat[0])
    if which == 0:
        raise ValueError("é" * 30_000_000)
    if which == 1:
        raise pb_utils.TritonModelException("half \\ud800")
    if which == 2:
        error = pb_utils.TritonError("x " * 30_000_000)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
    self.metric = self.family.Metric({"label": "plain"})
    self.metric.increment(1)
    parameters = [{"wrong": "\\ud800"}, {"wrong": 1 << 64}, {"wrong\\ud800": 1}][which - 3]
    return [pb_utils.InferenceResponse([], parameters=parameters) for _ in requests]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("hostile")
    models = folder / "models"
    python_model(models, "worker", IDENTITY)
    python_model(models, "in_process", IDENTITY, pbtxt(parameters=IN_PROCESS))
    python_model(models, "sequences", IDENTITY, pbtxt(batch=4, more=SEQUENCES))
    python_model(models, "calls", CALLS, pbtxt(batch=0, more=""))
    python_model(models, "says", SAYS, pbtxt(batch=0, more=""))
    ensemble(models, "pipeline", step("worker", "INPUT0", "OUTPUT0"))
    (models / "gr\udcfcn" / "1").mkdir(parents=True)
    flags = ("--model-control-mode=explicit", "--load-model=*", "--http-header-forward-pattern=x-.*")
    with serving(models, folder / "log", *flags) as running:
        yield running
        assert "Traceback" not in running.text.replace("Traceback (most recent call last):\\nValueError", "")


def alive(server: Serving) -> None:
    for model in ("worker", "in_process", "pipeline"):
        assert server.infer(model, [1.0]) == [1.0]


def body(**more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}], **more}


def broken(document: Any) -> bytes:
    """Return a document as JSON in which ``?`` is a byte that is not UTF-8."""
    return json.dumps(document).encode().replace(b"?", b"\xff")


def refused(answer: tuple[int, dict[str, str], bytes], where: str) -> None:
    status, _, said = answer
    assert status == 400, (status, said)
    assert where in json.loads(said)["error"]


@pytest.mark.parametrize("model", ["worker", "in_process", "pipeline"])
def test_an_id_that_is_not_utf8_costs_a_refusal(server: Serving, model: str) -> None:
    raw = broken(body(id="?"))
    for _ in range(20):  # more than the model has instances, or its queue has places for
        refused(server.ask("POST", f"/v2/models/{model}/infer", raw), "'id' is not valid UTF-8")
    packed = server.ask("POST", f"/v2/models/{model}/infer", gzip.compress(raw), Content_Encoding="gzip")
    refused(packed, "'id' is not valid UTF-8")
    for kind in ("generate", "generate_stream"):
        answer = server.ask("POST", f"/v2/models/{model}/{kind}", broken({"id": "?", "INPUT0": 1}))
        refused(answer, "'id' is not valid UTF-8")
    alive(server)


def test_a_sequence_id_that_is_not_utf8_takes_no_slot(server: Serving) -> None:
    for number in range(40):
        asked = body(parameters={"sequence_id": f"{number}?", "sequence_start": True})
        refused(
            server.ask("POST", "/v2/models/sequences/infer", broken(asked)), "'parameters.sequence_id' is not valid"
        )
    good = body(parameters={"sequence_id": "good", "sequence_start": True, "sequence_end": True})
    assert server.ask("POST", "/v2/models/sequences/infer", good)[0] == 200


def test_a_model_that_calls_with_ids_that_cannot_be_goes_on(server: Serving) -> None:
    for _ in range(5):
        for which, told in enumerate(("The ID is not valid", "request_id is not valid", "must be an integer from 0")):
            with pytest.raises(RuntimeError, match=f"500: .*{told}"):
                called(server, "calls", which)


def called(server: Serving, model: str, which: int) -> None:
    tensor = {"name": "INPUT0", "shape": [1], "datatype": "FP32", "data": [which]}
    status, _, said = server.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
    if status != 200:
        raise RuntimeError(f"{status}: {said.decode()}")


def memory(server: Serving) -> int:
    """Return the most memory that the server ever had, in MB."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def test_what_a_model_raises_costs_the_server_no_memory(server: Serving) -> None:
    alive(server)
    before = memory(server)
    for _ in range(3):
        for which, told in enumerate(("ééé", r"half \\\\ud800", "x x x")):
            with pytest.raises(RuntimeError, match=f"500: .*{told}") as refusal:
                called(server, "says", which)
            assert len(str(refusal.value)) < 40_000
    # Each of these was 60 MB or more, and several times that while it was read.
    assert memory(server) - before < 60
    assert server.log.stat().st_size < 4_000_000


def test_parameters_and_labels_of_models_that_are_no_text(server: Serving) -> None:
    for which, told in enumerate(
        ("Parameter 'wrong' is not valid", "Parameter 'wrong' is an", "The name of a parameter"), 3
    ):
        with pytest.raises(RuntimeError, match=f"500: .*{told}"):
            called(server, "says", which)
    # The worker reports its metrics after the answer.
    page = server.metrics()
    assert page['nv_inference_request_success{model="worker",version="1"}'] > 0


def test_settings_that_cannot_be_told_are_not_applied(server: Serving) -> None:
    before = server.json("GET", "/v2/logging"), server.json("GET", "/v2/trace/setting")
    level = b'{"nothing":NaN,"log_verbose_level":%b}'
    for digits in (b"18446744073709551616", b"4294967296", b"9" * 300, b"9" * 5_000):
        assert server.ask("POST", "/v2/logging", level % digits)[0] in (400, 500)
    refused(server.ask("POST", "/v2/logging", broken({"log_format": "?"})), "'log_format' is not valid UTF-8")
    for name in ("trace_rate", "trace_count", "log_frequency"):
        refused(server.ask("POST", "/v2/trace/setting", {name: "9" * 5_000}), f"'{name}' is 5000 characters long")
    assert (server.json("GET", "/v2/logging"), server.json("GET", "/v2/trace/setting")) == before


def test_names_of_directories_that_are_no_text_hide_nothing(server: Serving) -> None:
    names = {entry["name"] for entry in server.json("POST", "/v2/repository/index")}
    assert {"worker", "calls", "pipeline"} <= names


def fields(rng: random.Random, text: str) -> dict[str, Any]:
    """Return an inference in one of whose places stands ``text``."""
    made = body(id="x", parameters={"p": "x"}, outputs=[{"name": "OUTPUT0"}])
    tensor = made["inputs"][0]
    places: list[tuple[Any, Any]] = [
        *((made, key) for key in ("id", "inputs", "outputs", "parameters", "anything")),
        *((tensor, key) for key in ("name", "datatype", "shape", "data", "parameters", "anything")),
        *((made["parameters"], key) for key in ("p", text, "sequence_id", "priority", "binary_data_output")),
        *((made["outputs"][0], key) for key in ("name", "parameters")),
    ]
    place, key = rng.choice(places)
    place[key] = rng.choice([text, [text], {text: text}, {"shared_memory_region": text}])
    return made


def test_text_anywhere_is_answered(server: Serving) -> None:
    rng = random.Random(0)
    texts = ["?", "a?b", "\x00", "\x1b[31m", "x" * 1_025, "x" * 100_000, "9" * 5_000, "\U0010ffff", "../x", "'" * 300]
    calls = [
        *((f"/v2/models/{model}/infer", fields) for model in ("worker", "in_process", "sequences", "pipeline")),
        ("/v2/models/worker/generate", lambda rng, text: {rng.choice(["id", "INPUT0", text, "parameters"]): text}),
        ("/v2/logging", lambda rng, text: {rng.choice(["log_format", "log_verbose_level", text]): text}),
        ("/v2/trace/setting", lambda rng, text: {rng.choice(["trace_rate", "trace_level", text]): [text]}),
        ("/v2/repository/index", lambda rng, text: {"ready": text}),
        ("/v2/repository/models/none/load", lambda rng, text: {"parameters": {rng.choice(["config", text]): text}}),
        ("/v2/repository/models/none/load", lambda rng, text: {"parameters": {"config": "{}", f"file:{text}": "AAAA"}}),
        ("/v2/repository/models/none/unload", lambda rng, text: {"parameters": {text: text}}),
        ("/v2/systemsharedmemory/region/r/register", lambda rng, text: {"key": text, "byte_size": text}),
        ("/v1/completions", lambda rng, text: {"model": text, rng.choice(["prompt", "user", "stop", text]): text}),
        ("/v1/chat/completions", lambda rng, text: {"model": "worker", "messages": [{"role": "user", text: text}]}),
        ("/v1/embeddings", lambda rng, text: {"model": text, "input": text}),
    ]
    for _ in range(ROUNDS):
        path, document = rng.choice(calls)
        status, _, said = server.ask("POST", path, broken(document(rng, rng.choice(texts))))
        said.decode()
        assert (status, b"internal error" in said) != (500, True), (path, said)
        assert len(said) < 200_000, path
    alive(server)


ODD = [
    "*", "/", "//", "/..", "/%2e%2e/", "/%ff", "/%00", "/v2/models/%ff/ready", "/v2/models/../ready", "/v2/models/.",
    "http://x", "http://x/v2/health/live", "https://x:1/metrics", "HTTP://x/", "x:80", "/?a=%ff", "/#x", "/v2?",
    f"/{'a' * 5_000}", f"/{'a' * 60_000}", f"/{'a' * 70_000}", f"/v2/models/{'9' * 5_000}/versions/{'9' * 5_000}",
    f"/v1/models/{'%ff' * 500}", "/v1/models/%2e%2e", "/ui/%2e%2e/", "/ui/..", "/metrics/", "/ping",
    "/models/%ff", "/predict",
]  # fmt: skip
"""Targets of requests."""
CLOUDS = ("--sagemaker-port=0", "--allow-sagemaker=true", "--vertex-ai-port=0", "--allow-vertex-ai=true")


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_every_path_has_an_answer_on_every_port(tmp_path: Path, method: str) -> None:
    python_model(tmp_path / "models", "worker", IDENTITY)
    environment = {"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health", "AIP_HTTP_PORT": "8080"}
    with serving(tmp_path / "models", tmp_path / "log", *CLOUDS, environment=environment) as running:
        ports = [port for name, port in running.ports.items() if name != "GRPCInferenceService"]
        assert len(ports) == 4
        for port in ports:
            for target in ODD:
                with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                    connection.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                    answer = b"".join(iter(lambda c=connection: c.recv(65536), b""))  # type: ignore[misc]
                head, _, said = answer.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 "), (port, target[:80])
                # A request that cannot be read is refused with a body, whatever its method may be.
                assert method == "GET" or not said or b"Bad Request" in head, (port, target[:80])
