"""Queue policies on a running server: limits are exact, and deadlines fire while others run."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from serving import HELD, Serving, eventually, let_go, pbtxt, python_model, serving

PENDING = 'nv_inference_pending_request_count{model="patient",version="1"}'


def batching(policy: str) -> str:
    return f"dynamic_batching {{ default_queue_policy {{ {policy} }} }}"


def ask(server: Serving, value: float, key: int = 0) -> tuple[int, bytes]:
    """Return status and body of the answer to one request."""
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}
    status, _, body = server.ask("POST", "/v2/models/patient/infer", {"id": str(key), "inputs": [tensor]})
    return status, body


def occupy(server: Serving, callers: ThreadPoolExecutor) -> Future[tuple[int, bytes]]:
    """Have the model run a request that ends when it is let go."""
    asked = callers.submit(ask, server, -1.0)
    eventually(lambda: "executes -1" in server.text)
    return asked


def test_deadlines_fire_while_the_instance_is_busy(tmp_path: Path) -> None:
    config = pbtxt(batch=1, more=batching("default_timeout_microseconds: 300000"))
    model = python_model(tmp_path / "models", "patient", HELD, config)
    with serving(tmp_path / "models", tmp_path / "log") as server, ThreadPoolExecutor(3) as callers:
        ahead = occupy(server, callers)
        for status, body in callers.map(lambda key: ask(server, 0.0, key), (1, 2)):
            assert (status, json.loads(body)["error"]) == (503, "Request timeout expired")
        let_go(model)
        assert ahead.result()[0] == 200


def test_a_queue_of_three_admits_three(tmp_path: Path) -> None:
    model = python_model(tmp_path / "models", "patient", HELD, pbtxt(batch=1, more=batching("max_queue_size: 3")))
    with serving(tmp_path / "models", tmp_path / "log") as server, ThreadPoolExecutor(4) as callers:
        admitted = [occupy(server, callers)]
        for key in range(1, 4):
            admitted.append(callers.submit(ask, server, 0.0, key))
            eventually(lambda key=key: server.metrics()[PENDING] == key)
        for key in range(4, 7):
            status, body = ask(server, 0.0, key)
            assert (status, json.loads(body)) == (503, {"error": f"[request id: {key}] Exceeds maximum queue size"})
        rejected = 'nv_inference_request_failure{model="patient",reason="REJECTED",version="1"}'
        assert server.metrics()[rejected] == 3
        let_go(model)
        assert [asked.result()[0] for asked in admitted] == [200, 200, 200, 200]


def test_requests_that_wait_together_run_together(tmp_path: Path) -> None:
    model = python_model(tmp_path / "models", "patient", HELD, pbtxt(batch=8))
    with serving(tmp_path / "models", tmp_path / "log") as server, ThreadPoolExecutor(7) as callers:
        asked = [occupy(server, callers)]
        asked += [callers.submit(ask, server, 0.0, key) for key in range(1, 7)]
        eventually(lambda: server.metrics()[PENDING] == 6)
        let_go(model)
        assert [each.result()[0] for each in asked] == [200] * 7
        stats = server.json("GET", "/v2/models/patient/stats")["model_stats"][0]
        assert {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats["batch_stats"]} == {1: 1, 6: 1}
        assert (stats["inference_count"], stats["execution_count"]) == (7, 2)


def test_the_hook_that_holds_the_scheduler(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "patient", HELD, pbtxt(batch=8))
    environment = {"TRITONSERVER_DELAY_SCHEDULER": "4"}
    with (
        serving(tmp_path / "models", tmp_path / "log", environment=environment) as server,
        ThreadPoolExecutor(4) as callers,
    ):
        asked = []
        for key in range(4):
            eventually(lambda key=key: server.metrics()[PENDING] == key)
            assert not any(each.done() for each in asked)
            asked.append(callers.submit(ask, server, 0.0, key))
        assert [each.result()[0] for each in asked] == [200] * 4
        (batch,) = server.json("GET", "/v2/models/patient/stats")["model_stats"][0]["batch_stats"]
        assert batch["batch_size"] == 4
