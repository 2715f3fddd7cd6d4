"""Decoupled models and gRPC streams: any number of responses, in an order, with an end; and nobody works for nobody."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from grpc_streams import Stream
from serving import IDENTITY, Serving, eventually, pbtxt, python_model, serving

DECOUPLED = "model_transaction_policy { decoupled: true }"
COUNTER = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        count = int(request.inputs()[0].as_numpy().reshape(-1)[0])
        for number in range(count):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[number]], np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
THREADED = """
def execute(self, requests):
    import threading
    for request in requests:
        threading.Thread(target=self.work, args=(request.get_response_sender(), request)).start()

def work(self, sender, request):
    count = int(request.inputs()[0].as_numpy().reshape(-1)[0])
    for number in range(count):
        if sender.is_cancelled():
            print("cancelled after", number, flush=True)
            break
        time.sleep(0.01)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[number]], np.float32))]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENDLESS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        sent = 0
        while not sender.is_cancelled():
            sender.send(
                pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros((1, 10000), np.float32))])
            )
            sent += 1
            with open("SENT", "w") as file:
                file.write(str(sent))
        print("cancelled after", sent, flush=True)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SLOW = """
def execute(self, requests):
    time.sleep(float(requests[0].inputs()[0].as_numpy().reshape(-1)[0]))
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())])
        for request in requests
    ]
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    models = tmp_path / "models"
    python_model(models, "counter", COUNTER, pbtxt(batch=1, more=DECOUPLED))
    python_model(models, "threaded", THREADED, pbtxt(batch=1, more=DECOUPLED))
    python_model(models, "endless", ENDLESS.replace("SENT", str(tmp_path / "sent")), pbtxt(batch=1, more=DECOUPLED))
    python_model(models, "slow", SLOW, pbtxt(batch=1, more="instance_group [{ count: 2 kind: KIND_CPU }]"))
    python_model(models, "echo", IDENTITY, pbtxt())
    with serving(models, tmp_path / "log") as running:
        yield running


def test_any_number_of_responses(server: Serving) -> None:
    stream = Stream(server)
    stream.ask("counter", 3, "a")
    assert [stream.next() for _ in range(3)] == [("a", 0, False), ("a", 1, False), ("a", 2, False)]
    stream.ask("counter", 0, "b")
    stream.ask("counter", 1, "c", enable_empty_final_response=True)
    assert [stream.next() for _ in range(2)] == [("c", 0, False), ("c", None, True)]
    stream.close()
    assert stream.came.empty()


def test_delays_that_the_environment_asks_for(tmp_path: Path) -> None:
    models, day = tmp_path / "models", str(86_400_000)
    python_model(models, "counter", COUNTER, pbtxt(batch=1, more=DECOUPLED))
    python_model(models, "echo", IDENTITY, pbtxt())
    environment = {
        "TRITONSERVER_SERVER_DELAY_GRPC_RESPONSE_SEC": "86400",
        "TRITONSERVER_DELAY_GRPC_PROCESS": day,
        "TRITONSERVER_DELAY_GRPC_COMPLETE": "50",
        "TRITONSERVER_DELAY_GRPC_RESPONSE": "50",
    }
    with serving(models, tmp_path / "log", environment=environment) as server:
        assert server.text.count("gRPC calls are delayed for tests of clients, as set in the environment: ") == 1
        client = grpcclient.InferenceServerClient(server.grpc)
        tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
        for call in (
            lambda: client.infer("echo", [tensor], client_timeout=0.5),
            lambda: client.is_server_live(client_timeout=0.5),
        ):
            with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
                call()
        stream = Stream(server)
        stream.ask("counter", 3, "a", enable_empty_final_response=True)
        assert [stream.next() for _ in range(4)] == [("a", n, False) for n in range(3)] + [("a", None, True)]
        stream.close()
        client.close()
        assert server.infer("echo", [1.0]) == [1.0], "over HTTP nothing waits"
        assert server.json("GET", "/v2/models/echo/stats")["model_stats"][0]["execution_count"] == 1


def test_responses_from_threads_interleave(server: Serving) -> None:
    stream = Stream(server)
    for name in "ab":
        stream.ask("threaded", 10, name, enable_empty_final_response=True)
    came = [stream.next() for _ in range(22)]
    for name in "ab":
        assert [value for id, value, _ in came if id == name] == [*range(10), None]
    assert [id for id, _, _ in came] != sorted(id for id, _, _ in came)
    stream.close()


def test_one_response_each_in_the_order_of_the_requests(server: Serving) -> None:
    stream = Stream(server)
    stream.ask("slow", 0.5, "first")
    stream.ask("nobody", 1, "second")
    stream.ask("echo", 0.0, "third")
    assert stream.next() == ("first", 0.5, True)
    assert stream.next() == "Request for unknown model: 'nobody' is not found"
    assert stream.next() == ("third", 0.0, True)
    stream.close()


def test_errors_do_not_end_a_stream_unless_that_is_wanted(server: Serving) -> None:
    stream = Stream(server)
    stream.ask("slow", -1)
    assert "sleep length must be non-negative" in stream.next()
    stream.ask("echo", 5, "x")
    assert stream.next() == ("x", 5, True)
    stream.close()
    strict = Stream(server, headers={"triton_grpc_error": "true"})
    strict.ask("slow", -1)
    assert "[StatusCode.INTERNAL]" in strict.next()
    strict.close()


def test_a_client_that_goes_ends_the_work(server: Serving) -> None:
    stream = Stream(server)
    stream.ask("threaded", 10_000)
    stream.next()
    stream.client.stop_stream(cancel_requests=True)
    eventually(lambda: "cancelled after" in server.text)
    stream.client.close()
    assert server.infer("echo", [1.0]) == [1.0]


def test_a_model_in_execute_learns_of_it_too(server: Serving) -> None:
    stream = Stream(server)
    stream.ask("endless", 1)
    stream.next()
    stream.client.stop_stream(cancel_requests=True)
    eventually(lambda: "cancelled after" in server.text)
    stream.client.close()


def test_a_slow_reader_makes_the_model_wait(server: Serving, tmp_path: Path) -> None:
    """The client takes one response and stops: what the model sends after that fits in a few buffers."""
    gate = threading.Event()
    client = grpcclient.InferenceServerClient(server.grpc)
    client.start_stream(lambda result, error: gate.wait(20))
    tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[1]], np.float32))
    client.async_stream_infer("endless", [tensor])
    counts: list[int] = []

    def settled() -> bool:
        counts.append(int((tmp_path / "sent").read_text() or 0) if (tmp_path / "sent").exists() else 0)
        return len(counts) > 100 and counts[-1] == counts[-100] > 0

    eventually(settled)
    assert counts[-1] * 40_000 < 40_000_000
    print("SENT", counts[-1])
    assert server.infer("echo", [1.0]) == [1.0]
    gate.set()
    client.stop_stream(cancel_requests=True)
    eventually(lambda: "cancelled after" in server.text)
    client.close()


def test_a_worker_that_dies_ends_what_is_open(server: Serving) -> None:
    stream = Stream(server)
    stream.ask("threaded", 10_000, "x")
    assert stream.next() == ("x", 0, False)
    os.kill(server.workers()["threaded_0_0"], signal.SIGKILL)
    while isinstance(came := stream.next(), tuple):
        assert not came[2]
    assert "The worker died" in came
    eventually(lambda: server.ready("threaded"))
    stream.ask("threaded", 1, "y")
    assert stream.next() == ("y", 0, False)
    stream.close()


def test_unary_calls_refuse_decoupled_models(server: Serving) -> None:
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    status, _, body = server.ask("POST", "/v2/models/counter/infer", {"inputs": [tensor]})
    assert (status, json.loads(body)["error"]) == (
        501,
        "HTTP end point doesn't support models with decoupled transaction policy",
    )
