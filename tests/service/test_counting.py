"""What is counted of decoupled models, and of the memory that models take."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from serving import IDENTITY, IN_PROCESS, Serving, eventually, let_go, pbtxt, python_model, serving

SENT = """
def execute(self, requests):
    import threading
    for request in requests:
        threading.Thread(target=self.work, args=(request.get_response_sender(), request)).start()

def work(self, sender, request):
    rest = int(request.inputs()[0].as_numpy().reshape(-1)[0])
    while rest and not sender.is_cancelled():
        time.sleep(0.05)
        while rest == 1 and not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
            time.sleep(0.001)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[rest]], np.float32))]))
        rest -= 1
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    models = tmp_path / "models"
    decoupled = "dynamic_batching {} model_transaction_policy { decoupled: true }"
    python_model(models, "sent", SENT, pbtxt(batch=4, more=decoupled))
    python_model(models, "inside", IDENTITY, pbtxt(parameters=IN_PROCESS))
    with serving(models, tmp_path / "log") as running:
        yield running


def statistics(server: Serving, model: str) -> dict[str, Any]:
    found: dict[str, Any] = server.json("GET", f"/v2/models/{model}/stats")["model_stats"][0]
    return found


def counted(server: Serving, outcome: str) -> int:
    number: int = statistics(server, "sent")["inference_stats"][outcome]["count"]
    return number


def failures(server: Serving, reason: str) -> float:
    return server.metrics()[f'nv_inference_request_failure{{model="sent",reason="{reason}",version="1"}}']


def ask(server: Serving, count: int) -> tuple[grpcclient.InferenceServerClient, list[Any]]:
    """Ask for so many responses; return the client and the list they come in."""
    came: list[Any] = []
    client = grpcclient.InferenceServerClient(server.grpc)
    client.start_stream(lambda result, error: came.append(error or result))
    tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[count]], np.float32))
    client.async_stream_infer("sent", [tensor])
    return client, came


def test_a_request_counts_at_its_last_response(server: Serving, tmp_path: Path) -> None:
    client, came = ask(server, 3)
    eventually(lambda: len(came) == 2)
    assert counted(server, "success") == 0
    let_go(tmp_path / "models" / "sent")
    eventually(lambda: counted(server, "success") == 1)
    client.stop_stream()
    found = statistics(server, "sent")
    assert (found["inference_count"], found["execution_count"]) == (1, 1)
    durations = found["inference_stats"]
    assert durations["compute_infer"]["ns"] > 140_000_000, "three responses, 50 ms each"
    assert durations["success"]["ns"] >= durations["compute_infer"]["ns"] + durations["queue"]["ns"]
    (batch,) = found["batch_stats"]
    assert batch["compute_infer"]["ns"] < durations["compute_infer"]["ns"], "execute itself returned at once"
    by_response = found["response_stats"]
    assert {place: each["success"]["count"] for place, each in by_response.items()} == {"0": 1, "1": 1, "2": 1, "3": 0}
    assert all(by_response[place]["compute_infer"]["ns"] > 45_000_000 for place in "012")
    assert by_response["3"]["empty_response"]["count"] == 1
    with grpcclient.InferenceServerClient(server.grpc) as other:
        told = other.get_inference_statistics("sent", as_json=True)
    assert told["model_stats"][0]["response_stats"]["2"]["success"]["count"] == "1"


def test_a_request_that_its_client_gave_up(server: Serving) -> None:
    client, came = ask(server, 1000)
    eventually(lambda: len(came) >= 2)
    client.stop_stream(cancel_requests=True)
    eventually(lambda: counted(server, "fail") == 1)
    assert (counted(server, "success"), failures(server, "CANCELED")) == (0, 1)
    assert statistics(server, "sent")["inference_count"] == 0
    assert sum(each["cancel"]["count"] for each in statistics(server, "sent")["response_stats"].values()) == 1


def test_a_request_whose_worker_died(server: Serving) -> None:
    client, came = ask(server, 1000)
    eventually(lambda: len(came) >= 2)
    os.kill(server.workers()["sent_0_0"], signal.SIGKILL)
    eventually(lambda: counted(server, "fail") == 1)
    assert failures(server, "BACKEND") == 1
    client.stop_stream()


def test_memory(server: Serving) -> None:
    (used,) = statistics(server, "sent")["memory_usage"]
    assert (used["type"], used["id"]) == ("CPU", 0)
    status = Path(f"/proc/{server.workers()['sent_0_0']}/status").read_text()
    anonymous = int(status.partition("RssAnon:")[2].split()[0]) * 1024
    assert abs(used["byte_size"] - anonymous) < 8 << 20
    assert statistics(server, "inside")["memory_usage"] == [], "it has no process of its own"
