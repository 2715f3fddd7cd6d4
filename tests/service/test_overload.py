"""A model of which more is asked than it can do: who is refused, and how that looks on each protocol."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from pages import Page
from serving import IDENTITY, Serving, eventually, pbtxt, python_model, serving

WAITS = "    print('runs', flush=True)\n    while os.path.exists(os.environ['HOLD']):\n        time.sleep(0.005)\n"
PATIENT = IDENTITY.replace("requests):\n", "requests):\n" + WAITS)
BODY: dict[str, Any] = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
TWO = 'parameters { key: "MAX_QUEUED_REQUESTS" value: { string_value: "2" } }'
TEXT = "[request id: <id_unknown>] Exceeds maximum queue size: 2 requests wait for model 'patient'. Try again in "


class Held:
    """A server whose model, once it was called, goes on only after ``let_go``."""

    def __init__(self, server: Serving, hold: Path) -> None:
        self.server = server
        self.hold = hold
        self._statuses: dict[str, int] = {}
        self._callers: list[Thread] = []

    def ask(self, name: str, priority: int = 0) -> None:
        """Send a request whose answer takes its time."""
        body = {**BODY, "id": name, "parameters": {"priority": priority}}

        def ask() -> None:
            self._statuses[name] = self.server.ask("POST", "/v2/models/patient/infer", body)[0]

        self._callers.append(Thread(target=ask))
        self._callers[-1].start()

    def fill(self, priority: int = 0) -> None:
        """Have one request run, and two wait."""
        self.ask("runs", priority)
        eventually(lambda: "runs" in self.server.text)
        for waiting, name in enumerate(("first", "second"), 1):
            self.ask(name, priority)
            eventually(lambda waiting=waiting: self.metric("nv_inference_pending_request_count") == waiting)

    def metric(self, name: str, more: str = "") -> float:
        return self.server.metrics()[f'{name}{{model="patient",{more}version="1"}}']

    def rejected(self) -> float:
        return self.metric("nv_inference_request_failure", 'reason="REJECTED",')

    def let_go(self) -> dict[str, int]:
        """Let the model run; return the status of each answer to ``ask``."""
        self.hold.unlink()
        for caller in self._callers:
            caller.join()
        return self._statuses


@contextmanager
def held(folder: Path, config: str, *flags: str) -> Iterator[Held]:
    folder.mkdir(exist_ok=True)
    hold = folder / "hold"
    hold.touch()
    python_model(folder / "models", "patient", PATIENT, config)
    with serving(folder / "models", folder / "log", *flags, environment={"HOLD": str(hold)}) as server:
        try:
            yield Held(server, hold)
        finally:
            hold.unlink(missing_ok=True)


def grpc_request() -> Any:
    return service_pb2.ModelInferRequest(
        model_name="patient",
        inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1]}],
        raw_input_contents=[np.ones(1, np.float32).tobytes()],
    )


def test_who_is_refused_learns_it_on_each_protocol(tmp_path: Path) -> None:
    with held(tmp_path, pbtxt(batch=1, more="", parameters=TWO)) as of:
        of.fill()
        status, headers, body = of.server.ask("POST", "/v2/models/patient/infer", BODY)
        assert (status, headers["Content-Type"]) == (503, "application/json")
        assert 1 <= int(headers["Retry-After"]) <= 60
        error = json.loads(body)["error"]
        assert error.startswith(f"{TEXT}{headers['Retry-After']} s. ")
        with grpc.insecure_channel(of.server.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                stub.ModelInfer(grpc_request())
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert refused.value.details().startswith(TEXT)
            trailing = dict(refused.value.trailing_metadata())
            assert 1000 <= int(trailing["grpc-retry-pushback-ms"]) <= 60_000
            (answer,) = stub.ModelStreamInfer(iter([grpc_request()]))
            assert answer.error_message.startswith(TEXT)
            strict = stub.ModelStreamInfer(iter([grpc_request()]), metadata=[("triton_grpc_error", "true")])
            with pytest.raises(grpc.RpcError) as ended:
                list(strict)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "grpc-retry-pushback-ms" in dict(ended.value.trailing_metadata())
        assert of.rejected() == 4
        assert of.let_go() == {"runs": 200, "first": 200, "second": 200}
        assert of.server.infer("patient", [1.0]) == [1.0]


def test_tritons_clients_see_the_status(tmp_path: Path) -> None:
    with held(tmp_path, pbtxt(batch=1, parameters=TWO)) as of:
        of.fill()
        for module, url, expected in (
            (httpclient, of.server.http, "503"),
            (grpcclient, of.server.grpc, "StatusCode.UNAVAILABLE"),
        ):
            client = module.InferenceServerClient(url)
            tensor = module.InferInput("INPUT0", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
            with pytest.raises(InferenceServerException) as caught:
                client.infer("patient", [tensor])
            assert caught.value.status() == expected
            assert caught.value.message().startswith(TEXT)
            client.close()
        answers: queue.Queue[Any] = queue.Queue()
        with grpcclient.InferenceServerClient(of.server.grpc) as client:
            client.start_stream(lambda result, error: answers.put(error))
            tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
            client.async_stream_infer("patient", [tensor])
            assert answers.get(timeout=20).message().startswith(TEXT)
            client.stop_stream()
        of.let_go()


def test_who_matters_more_is_let_in_and_who_matters_less_must_go(tmp_path: Path) -> None:
    levels = "dynamic_batching { priority_levels: 2 default_priority_level: 2 }"
    with held(tmp_path, pbtxt(batch=1, more=levels, parameters=TWO)) as of:
        of.fill()
        of.ask("urgent", priority=1)
        eventually(lambda: of.rejected() == 1)
        of.ask("as urgent", priority=1)
        eventually(lambda: of.rejected() == 2)
        assert of.server.ask("POST", "/v2/models/patient/infer", {**BODY, "parameters": {"priority": 1}})[0] == 503
        assert of.let_go() == {"runs": 200, "second": 503, "first": 503, "urgent": 200, "as urgent": 200}


def test_flags_bound_every_queue_and_a_models_own_size_rules_alone(tmp_path: Path) -> None:
    with held(tmp_path / "bounded", pbtxt(batch=1, more=""), "--max-queued-requests=2") as of:
        of.fill()
        assert of.server.ask("POST", "/v2/models/patient/infer", BODY)[0] == 503
        assert set(of.let_go().values()) == {200}
    own = "dynamic_batching { default_queue_policy { max_queue_size: 3 } }"
    with held(tmp_path, pbtxt(batch=1, more=own), "--max-queued-requests=1") as of:
        of.fill()
        of.ask("third")
        eventually(lambda: of.metric("nv_inference_pending_request_count") == 3)
        status, headers, body = of.server.ask("POST", "/v2/models/patient/infer", BODY)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(body) == {"error": "[request id: <id_unknown>] Exceeds maximum queue size"}
        assert set(of.let_go().values()) == {200}


def test_what_is_not_there_does_not_come_back_by_waiting(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "wide", IDENTITY, pbtxt())
    with serving(tmp_path / "models", tmp_path / "log") as server:
        status, headers, _ = server.ask("POST", "/v2/models/none/infer", BODY)
        assert (status, headers.get("Retry-After")) == (404, None)
        status, headers, _ = server.ask("POST", "/v2/repository/models/wide/unload", {})
        assert (status, headers.get("Retry-After")) == (503, None)


def test_a_client_with_the_retry_policy_that_the_page_shows(tmp_path: Path) -> None:
    with held(tmp_path, pbtxt(batch=1, more="", parameters=TWO)) as of:
        of.fill()
        names: dict[str, Any] = {}
        exec(Page("docs/overload.md").block("retryPolicy").replace("localhost:8001", of.server.grpc), names)
        with names["channel"] as channel:
            pending = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(grpc_request())
            eventually(lambda: of.rejected() == 1)
            assert set(of.let_go().values()) == {200}
            assert pending.result(timeout=20).raw_output_contents == [np.ones(1, np.float32).tobytes()]
        assert of.rejected() == 1
