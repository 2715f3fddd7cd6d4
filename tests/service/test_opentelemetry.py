"""Spans of a real server, as a collector gets them: who is under whom, and what clients have begun goes on."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from collector import Collector, collecting
from serving import (
    HELD,
    IDENTITY,
    IN_PROCESS,
    Serving,
    binary_request,
    ensemble,
    eventually,
    let_go,
    pbtxt,
    python_model,
    serving,
    step,
)

CALLER = """
def execute(self, requests):
    answers = []
    for request in requests:
        asked = pb_utils.InferenceRequest(
            model_name="one", requested_output_names=["OUTPUT0"], inputs=request.inputs(), trace=request.trace()
        )
        answers.append(pb_utils.InferenceResponse(asked.exec().output_tensors()))
    return answers
"""
TELLS = """
def execute(self, requests):
    contexts = [request.trace().get_context() or "none" for request in requests]
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[context]], object))]) for context in contexts
    ]
"""
NOTES = """
def initialize(self, args):
    from opentelemetry.sdk.trace import TracerProvider
    self.tracer = TracerProvider().get_tracer("model")

{0}def execute(self, requests):
    answers = []
    with self.tracer.start_as_current_span("mine") as span:
        for request in requests:
            parent = f"{{span.parent.trace_id:032x}} {{span.parent.span_id:016x}}" if span.parent else "none"
            text = np.array([[parent]], object)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", text)]))
    return answers
"""
WORDS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for number in range(3):
            tensors = {
                "text_output": np.array([b"word "], object),
                "num_input_tokens": np.array([2], np.uint32),
                "num_output_tokens": np.array([1], np.uint32),
            }
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in tensors.items()]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENGINE = """
backend: "python"
model_transaction_policy { decoupled: true }
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] },
  { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ -1 ] }
]
"""
FLAGS = (
    "--trace-config=mode=opentelemetry",
    "--trace-config=level=TIMESTAMPS",
    "--trace-config=opentelemetry,bsp_schedule_delay=10",
    "--trace-config=opentelemetry,resource=deployment.environment=test",
)
PENDING = 'nv_inference_pending_request_count{model="held",version="1"}'
ROOTS = TracerProvider()
"""OpenTelemetry as a client has it: it makes the spans that ours belong under."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("opentelemetry")
    models = folder / "models"
    for name in ("one", "two"):
        python_model(models, name, IDENTITY)
    python_model(models, "caller", CALLER)
    python_model(models, "tells", TELLS, pbtxt(datatype="TYPE_STRING"))
    python_model(models, "notes", NOTES.format(""), pbtxt(datatype="TYPE_STRING"))
    python_model(models, "notes_async", NOTES.format("async "), pbtxt(datatype="TYPE_STRING"))
    python_model(models, "notes_inside", NOTES.format(""), pbtxt(datatype="TYPE_STRING", parameters=IN_PROCESS))
    python_model(models, "bad", "def execute(self, requests):\n    raise ValueError('my fault')")
    python_model(models, "words", WORDS, ENGINE)
    ensemble(models, "pipe", step("one", "INPUT0", "MIDDLE"), step("two", "MIDDLE", "OUTPUT0"))
    flags = (*FLAGS, "--trace-config=rate=0", f"--trace-config=opentelemetry,url={collector.url}")
    with serving(models, folder / "log", *flags) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(collector: Collector) -> None:
    collector.posts.clear()


def headers() -> tuple[dict[str, str], str, str]:
    """The headers that OpenTelemetry's own propagator makes of a span, and the ids of trace and span."""
    with ROOTS.get_tracer("test").start_as_current_span("client") as span:
        carrier: dict[str, str] = {}
        inject(carrier)
        context = span.get_span_context()
        return carrier, f"{context.trace_id:032x}", f"{context.span_id:016x}"


def ask(server: Serving, model: str, **more: str) -> int:
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
    return server.ask("POST", f"/v2/models/{model}/infer", body, **more)[0]


def test_under_the_clients_span_over_http(server: Serving, collector: Collector) -> None:
    carrier, trace, span = headers()
    assert ask(server, "one", **carrier) == 200
    collector.wait(3)
    (root,) = collector.named("InferRequest")
    assert (root.trace, root.parent) == (trace, span)
    assert collector.tree(root) == ("InferRequest", [("one", [("compute", [])])])
    assert root.resource["service.name"] == "triton-inference-server"
    assert root.resource["deployment.environment"] == "test"


def test_a_histogram_names_the_trace(server: Serving, collector: Collector) -> None:
    carrier, trace, _ = headers()
    assert ask(server, "one", **carrier) == 200
    wanted = "application/openmetrics-text; version=1.0.0; q=0.9, text/plain; q=0.1"

    def named() -> set[str]:
        status, told, page = server.ask("GET", "/metrics", service="Metrics", Accept=wanted)
        assert (status, told["Content-Type"].partition(";")[0]) == (200, "application/openmetrics-text")
        samples = [sample for family in openmetrics(page.decode()) for sample in family.samples]
        return {sample.exemplar.labels["trace_id"] for sample in samples if sample.exemplar is not None}

    eventually(lambda: trace in named())
    assert b"trace_id" not in server.ask("GET", "/metrics", service="Metrics")[2]
    collector.wait(3)  # or the next test would find them


def test_under_the_clients_span_over_grpc(server: Serving, collector: Collector) -> None:
    carrier, trace, span = headers()
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    client.infer("one", [tensor], headers=carrier)
    collector.wait(3)
    (root,) = collector.named("InferRequest")
    assert (root.trace, root.parent) == (trace, span)
    assert root.moments[0] == "GRPC_WAITREAD_START"
    client.close()


def test_under_the_clients_span_on_a_stream(server: Serving, collector: Collector) -> None:
    carrier, trace, span = headers()
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    client.start_stream(lambda result, error: None, headers=carrier)
    for _ in range(2):
        client.async_stream_infer("one", [tensor])
    client.stop_stream()
    collector.wait(6)
    assert {(root.trace, root.parent) for root in collector.named("InferRequest")} == {(trace, span)}
    client.close()


def test_under_the_clients_span_when_it_generates(server: Serving, collector: Collector) -> None:
    carrier, trace, span = headers()
    server.ask("POST", "/v2/models/one/generate", {"INPUT0": 1.0}, **carrier)
    collector.wait(3)
    (root,) = collector.named("InferRequest")
    assert (root.trace, root.parent) == (trace, span)


def test_a_completion(server: Serving, collector: Collector) -> None:
    carrier, trace, span = headers()
    asked = {"model": "words", "prompt": "a b", "stream": True}
    assert server.ask("POST", "/v1/completions", asked, **carrier)[0] == 200
    collector.wait(3)
    (root,) = collector.named("InferRequest")
    (compute,) = collector.named("compute")
    assert (root.trace, root.parent) == (trace, span)
    assert root.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "words",
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
    }
    assert root.moments.count("HTTP_SEND_START") == 3
    first = dict(root.events)["INFER_RESPONSE_COMPLETE"]
    assert root.start < compute.start < first < root.end


def test_many_on_one_connection_each_with_its_own(server: Serving, collector: Collector) -> None:
    connection = http.client.HTTPConnection(server.http)
    body, binary = binary_request(np.ones((1, 1), np.float32))
    expected = set()
    for number in range(6):
        carrier, trace, span = headers()
        if number % 3 == 2:  # neither is it under the last one's
            carrier = {}
        else:
            expected.add((trace, span))
        connection.request("POST", "/v2/models/one/infer", body, {**binary, **carrier})
        assert connection.getresponse().read()
    connection.close()
    collector.wait(12)
    assert {(root.trace, root.parent) for root in collector.named("InferRequest")} == expected
    assert len(collector.spans) == 12


def test_steps_of_an_ensemble(server: Serving, collector: Collector) -> None:
    carrier, trace, _ = headers()
    ask(server, "pipe", **carrier)
    collector.wait(6)
    (root,) = collector.named("InferRequest")
    ran = [("compute", [])]
    assert collector.tree(root) == ("InferRequest", [("pipe", [("one", ran), ("two", ran)])])
    assert {span.trace for span in collector.spans} == {trace}


def test_a_call_is_under_the_execution_that_makes_it(server: Serving, collector: Collector) -> None:
    ask(server, "caller", **headers()[0])
    collector.wait(5)
    (root,) = collector.named("InferRequest")
    inner = ("one", [("compute", [])])
    assert collector.tree(root) == ("InferRequest", [("caller", [("compute", [inner])])])


def test_an_error(server: Serving, collector: Collector) -> None:
    assert ask(server, "bad", **headers()[0]) == 500
    collector.wait(3)
    failed = {span.name for span in collector.spans if span.status[0] == 2 and "my fault" in span.status[1]}
    assert failed == {"InferRequest", "bad", "compute"}


@pytest.mark.parametrize("told", ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", "nonsense", ""])
def test_who_is_not_sampled_is_not_traced(server: Serving, collector: Collector, told: str) -> None:
    ask(server, "one", **({"traceparent": told} if told else {}))
    ask(server, "two", **headers()[0])
    collector.wait(3)
    assert collector.named("one") == []


def told(server: Serving, model: str, **more: str) -> str:
    body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "BYTES", "data": ["x"]}]}
    answer = server.ask("POST", f"/v2/models/{model}/infer", body, **more)[2]
    text: str = json.loads(answer)["outputs"][0]["data"][0]
    return text


def test_what_a_model_is_told(server: Serving, collector: Collector) -> None:
    carrier, trace, _ = headers()
    context = json.loads(told(server, "tells", **carrier, tracestate="x=y"))
    collector.wait(3)
    (compute,) = collector.named("compute")
    assert context == {"traceparent": f"00-{trace}-{compute.id}-01", "tracestate": "x=y"}
    assert told(server, "tells") == "none"


@pytest.mark.parametrize("model", ["notes", "notes_async", "notes_inside"])
def test_what_a_model_notes_itself_is_under_its_execution(server: Serving, collector: Collector, model: str) -> None:
    carrier, trace, _ = headers()
    parent = told(server, model, **carrier)
    collector.wait(3)
    (compute,) = collector.named("compute")
    assert parent == f"{trace} {compute.id}"
    assert told(server, model) == "none"


def test_requests_of_one_batch(tmp_path: Path) -> None:
    """The model's own spans are under the first that is traced; the others say so."""
    model = python_model(tmp_path / "models", "held", HELD)
    with collecting() as collector:
        flags = (*FLAGS, "--trace-config=rate=0", f"--trace-config=opentelemetry,url={collector.url}")
        with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
            client = tritonclient.grpc.InferenceServerClient(server.grpc)

            def ask_for(value: float, carrier: dict[str, str]) -> None:
                tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
                tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
                client.async_infer("held", [tensor], lambda result, error: None, headers=carrier)

            ask_for(-1.0, {})
            eventually(lambda: "executes -1.0" in server.text)
            for number, carrier in enumerate(({}, headers()[0], headers()[0]), 1):
                ask_for(1.0, carrier)
                eventually(lambda number=number: server.metrics()[PENDING] == number)  # type: ignore[misc]
            let_go(model)
            collector.wait(6)
            client.close()
        first, second = sorted(collector.named("compute"), key=lambda span: len(span.links))
    assert first.attributes == second.attributes == {"nerite.batch.requests": 3}
    assert (first.links, second.links) == ([], [(first.trace, first.id)])


def test_what_is_left_is_sent_at_the_end(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "one", IDENTITY)
    with collecting() as collector:
        flags = (*FLAGS[:2], "--trace-config=rate=2", f"--trace-config=opentelemetry,url={collector.url}")
        with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
            for _ in range(5):
                ask(server, "one")
        assert len(collector.named("InferRequest")) == 2


def test_openTelemetrys_own_variables(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "one", IDENTITY)
    with collecting() as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}/",
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20key",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_SERVICE_NAME": "mine",
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=not this,team=blue",
        }
        with serving(
            tmp_path / "models", tmp_path / "log", *FLAGS[:2], "--trace-config=rate=1", environment=environment
        ) as server:
            ask(server, "one")
        (post,) = collector.posts
        assert (post.path, post.headers["api-key"]) == ("/v1/traces", "a key")
        assert post.headers["Content-Encoding"] == "gzip"
        resource = post.spans[0].resource
        assert (resource["service.name"], resource["team"]) == ("mine", "blue")
