"""Queue policies on a running server: limits are exact, and deadlines fire when they are due."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from serving import eventually, pbtxt, python_model, serving

SLEEPY = """
def execute(self, requests):
    for request in requests:
        time.sleep(float(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().reshape(-1)[0]))
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""


def batching(policy: str) -> str:
    return f"dynamic_batching {{ default_queue_policy {{ {policy} }} }}"


def ask(server: Any, model: str, value: float, answers: dict[int, tuple[int, bytes, float]], key: int) -> None:
    began = time.monotonic()
    body = {
        "id": str(key),
        "inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}],
    }
    status, _, answer = server.ask("POST", f"/v2/models/{model}/infer", body)
    answers[key] = (status, answer, time.monotonic() - began)


def test_deadlines_fire_while_the_instance_is_busy(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "sleepy", SLEEPY, pbtxt(batch=1, more=batching("default_timeout_microseconds: 300000")))
    answers: dict[int, tuple[int, bytes, float]] = {}
    with serving(models, tmp_path / "log") as server:
        callers = [threading.Thread(target=ask, args=(server, "sleepy", 3.0, answers, 0))]
        callers[0].start()
        time.sleep(0.3)
        callers += [threading.Thread(target=ask, args=(server, "sleepy", 0.0, answers, key)) for key in (1, 2)]
        for caller in callers[1:]:
            caller.start()
        for caller in callers:
            caller.join()
    assert answers[0][0] == 200
    for key in (1, 2):
        status, body, seconds = answers[key]
        assert (status, json.loads(body)) == (503, {"error": "Request timeout expired"})
        assert seconds < 2.0, "the deadline fired when the batch ahead was over, not when it was due"


def test_a_queue_of_three_admits_three(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "sleepy", SLEEPY, pbtxt(batch=1, more=batching("max_queue_size: 3")))
    answers: dict[int, tuple[int, bytes, float]] = {}
    with serving(models, tmp_path / "log") as server:
        callers = [threading.Thread(target=ask, args=(server, "sleepy", 2.0, answers, 0))]
        callers[0].start()
        pending = 'nv_inference_pending_request_count{model="sleepy",version="1"}'
        time.sleep(0.3)
        for key in range(1, 7):
            callers.append(threading.Thread(target=ask, args=(server, "sleepy", 0.0, answers, key)))
            callers[-1].start()
            if key <= 3:
                eventually(lambda key=key: server.metrics()[pending] == key)
        for caller in callers:
            caller.join()
        rejected = 'nv_inference_request_failure{model="sleepy",version="1",reason="REJECTED"}'
        assert server.metrics()[rejected] == 3
    assert [answers[key][0] for key in range(7)] == [200, 200, 200, 200, 503, 503, 503]
    assert json.loads(answers[5][1]) == {"error": "[request id: 5] Exceeds maximum queue size"}


def test_requests_that_wait_together_run_together(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "sleepy", SLEEPY, pbtxt(batch=8))
    answers: dict[int, tuple[int, bytes, float]] = {}
    with serving(models, tmp_path / "log") as server:
        callers = [threading.Thread(target=ask, args=(server, "sleepy", 1.0, answers, 0))]
        callers[0].start()
        time.sleep(0.3)
        callers += [threading.Thread(target=ask, args=(server, "sleepy", 0.0, answers, key)) for key in range(1, 7)]
        for caller in callers[1:]:
            caller.start()
        for caller in callers:
            caller.join()
        stats = server.json("GET", "/v2/models/sleepy/stats")["model_stats"][0]
        assert {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats["batch_stats"]} == {1: 1, 6: 1}
        assert (stats["inference_count"], stats["execution_count"]) == (7, 2)


def test_the_hook_that_holds_the_scheduler(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "sleepy", SLEEPY, pbtxt(batch=8))
    answers: dict[int, tuple[int, bytes, float]] = {}
    with serving(models, tmp_path / "log", environment={"TRITONSERVER_DELAY_SCHEDULER": "4"}) as server:
        callers = [threading.Thread(target=ask, args=(server, "sleepy", 0.0, answers, key)) for key in range(4)]
        pending = 'nv_inference_pending_request_count{model="sleepy",version="1"}'
        for key, caller in enumerate(callers):
            eventually(lambda key=key: server.metrics()[pending] == key)
            assert answers == {}
            caller.start()
        for caller in callers:
            caller.join()
        (batch,) = server.json("GET", "/v2/models/sleepy/stats")["model_stats"][0]["batch_stats"]
        assert batch["batch_size"] == 4
