"""Iterative sequences: a request runs until the model is done with it, and others join the batches meanwhile."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from grpc_streams import Stream
from serving import IN_PROCESS, Serving, eventually, pbtxt, python_model, serving

DECOUPLED = "model_transaction_policy { decoupled: true }"
CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
STATE = 'state { input_name: "BEFORE" output_name: "AFTER" data_type: TYPE_FP32 dims: [ 1 ] }'
ITERATIVE = f"sequence_batching {{ iterative_sequence: true {CONTROLS} {STATE} }}"
OLDEST = ITERATIVE.replace("{ iterative", "{ oldest { max_candidate_sequences: 3 } iterative")

COUNT = """
def execute(self, requests):
    answers = []
    for request in requests:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        turn = inputs["BEFORE"] + 1
        assert inputs["ID"][0, 0] == request.correlation_id()
        if inputs["ID"][0, 0]:  # else it stands in the batch for an empty slot
            assert inputs["START"][0, 0] == (turn[0, 0] == 1) == request.flags()
        tensors = [pb_utils.Tensor("AFTER", turn)]
        if turn < inputs["INPUT0"]:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        else:
            tensors.append(pb_utils.Tensor("OUTPUT0", turn))
        answers.append(pb_utils.InferenceResponse(tensors))
    time.sleep(0.003)
    return answers
"""
STREAM = """
def execute(self, requests):
    for request in requests:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if request.is_cancelled():
            print("cancelled after", inputs["BEFORE"], flush=True)
        turn = inputs["BEFORE"] + 1
        sender = request.get_response_sender()
        output = np.tile(turn, (1, WIDTH))
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", output), pb_utils.Tensor("AFTER", turn)]))
        if turn < inputs["INPUT0"]:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        else:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    with open("TURNS", "a") as file:
        file.write(".")
"""
LATE = """
def execute(self, requests):
    import threading

    for request in requests:
        print("late began", flush=True)
        value = request.inputs()[0].as_numpy().copy()
        threading.Thread(target=self.answer, args=(request.get_response_sender(), value)).start()

def answer(self, sender, value):
    while not os.path.exists("GO"):
        time.sleep(0.01)
    for _ in range(int(value.item())):
        tensors = [pb_utils.Tensor("OUTPUT0", value), pb_utils.Tensor("AFTER", value)]
        sender.send(pb_utils.InferenceResponse(tensors))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DIES = """
def execute(self, requests):
    request = requests[0]
    if not request.flags() and request.inputs()[0].as_numpy()[0, 0] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if not request.flags():
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.ones((1, 1), np.float32))])]
    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    return [None]
"""


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models write a dot for each turn."""
    return tmp_path_factory.mktemp("turns")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, turns: Path) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server")
    models = folder / "models"
    for name in ("count", "named"):
        python_model(models, name, COUNT, pbtxt(batch=4, more=ITERATIVE))
    python_model(models, "oldest", COUNT, pbtxt(batch=4, more=OLDEST))
    python_model(models, "here", COUNT, pbtxt(batch=4, more=ITERATIVE, parameters=IN_PROCESS))
    python_model(models, "misled", COUNT, pbtxt(batch=4, more=ITERATIVE.replace("iterative_sequence: true", "")))
    python_model(models, "dies", DIES, pbtxt(batch=1, more="sequence_batching { iterative_sequence: true }"))
    for name, width in (("stream", 1), ("wide", 10_000)):
        source = STREAM.replace("WIDTH", str(width)).replace("TURNS", str(turns / name))
        python_model(models, name, source, pbtxt(batch=2, more=ITERATIVE + DECOUPLED))
    python_model(
        models,
        "late",
        LATE.replace("GO", str(turns / "go")),
        pbtxt(batch=1, more=ITERATIVE.replace("iterative_sequence: true", "") + DECOUPLED),
    )
    with serving(models, folder / "log") as running:
        yield running


def body(value: float, **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}
    return {"inputs": [tensor], "parameters": parameters}


def answer(server: Serving, model: str, value: float, **parameters: Any) -> Any:
    status, _, reply = server.ask("POST", f"/v2/models/{model}/infer", body(value, **parameters))
    told = json.loads(reply)
    return told["outputs"][0]["data"][0] if status == 200 else (status, told["error"])


@pytest.mark.parametrize("model", ["count", "oldest", "here"])
def test_each_runs_as_often_as_it_needs(server: Serving, model: str) -> None:
    wanted = [1, 5, 20, 3, 9, 2, 14, 30]
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        answers[number] = answer(server, model, wanted[number])

    callers = [threading.Thread(target=ask, args=(number,)) for number in range(len(wanted))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert answers == dict(enumerate(wanted))
    (statistics,) = server.json("GET", f"/v2/models/{model}/stats")["model_stats"]
    assert statistics["inference_count"] == statistics["inference_stats"]["success"]["count"] == len(wanted)
    assert max(wanted) <= statistics["execution_count"] <= sum(wanted)
    ran = {of["batch_size"]: of["compute_infer"]["count"] for of in statistics["batch_stats"]}
    assert sum(ran.values()) == statistics["execution_count"]
    assert max(ran) > 1
    assert answer(server, model, 4) == 4


def test_ids_of_the_caller(server: Serving) -> None:
    assert answer(server, "named", 3, sequence_id=7, sequence_start=True) == 3
    status, error = answer(server, "named", 3, sequence_id=7)
    assert status == 400
    assert "must specify the START flag" in error
    assert answer(server, "named", 2, sequence_id=7, sequence_start=True) == 2


def test_sequences_that_are_not_iterative(server: Serving) -> None:
    status, error = answer(server, "misled", 3, sequence_id=7, sequence_start=True)
    assert status == 500
    assert error.startswith("Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not")
    assert answer(server, "misled", 1, sequence_id=8, sequence_start=True) == 1


def test_a_worker_that_dies_between_two_turns(server: Serving) -> None:
    status, error = answer(server, "dies", 2)
    assert status == 500
    assert "The worker died" in error
    eventually(lambda: answer(server, "dies", 1) == 1)


def test_a_response_each_turn(server: Serving) -> None:
    stream = Stream(server)
    for value, name in ((3, "a"), (5, "b"), (1, "c")):
        stream.ask("stream", value, name, enable_empty_final_response=True)
    came = [stream.next() for _ in range(3 + 5 + 1 + 3)]
    for value, name in ((3, "a"), (5, "b"), (1, "c")):
        assert [each[1:] for each in came if each[0] == name] == [
            *((float(turn), False) for turn in range(1, value + 1)),
            (None, True),
        ]
    stream.close()


def test_responses_after_the_end_of_a_sequence(server: Serving, turns: Path) -> None:
    stream = Stream(server)
    for number in (1, 2):
        whole = {"sequence_id": number, "sequence_start": True, "sequence_end": True}
        stream.ask("late", 2, str(number), enable_empty_final_response=True, **whole)
        # The second begins when the first execution is over, and with it the first sequence.
        eventually(lambda number=number: server.text.count("late began") == number)  # type: ignore[misc]
    (turns / "go").touch()
    came = [stream.next() for _ in range(6)]
    assert [each[1] for each in came if each[0] == "1"] == [2.0, 2.0, None]
    stream.close()


def test_a_client_that_goes_ends_the_turns(server: Serving, turns: Path) -> None:
    stream = Stream(server)
    stream.ask("stream", 1e9)
    stream.next()
    stream.client.stop_stream(cancel_requests=True)
    seen: list[int] = []

    def rests() -> bool:
        seen.append((turns / "stream").stat().st_size)
        return len(seen) > 50 and seen[-1] == seen[-50]

    eventually(rests)
    stream.client.close()
    stream = Stream(server)
    stream.ask("stream", 1, "next")
    assert stream.next() == ("next", 1.0, False)
    stream.close()


def test_a_slow_reader_makes_the_model_wait(server: Serving, turns: Path) -> None:
    """The client takes one response and stops. Another, who reads, goes on beside it."""
    gate = threading.Event()
    slow = grpcclient.InferenceServerClient(server.grpc)
    slow.start_stream(lambda result, error: gate.wait(20))
    tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[100_000]], np.float32))
    slow.async_stream_infer("wide", [tensor])
    wide = turns / "wide"
    seen: list[int] = []

    def rests() -> bool:
        seen.append(wide.stat().st_size if wide.exists() else 0)
        return len(seen) > 100 and seen[-1] == seen[-100] > 0

    eventually(rests)
    assert seen[-1] * 40_000 < 40_000_000
    quick = Stream(server)
    quick.ask("wide", 3, "quick")
    assert [quick.next() for _ in range(3)] == [("quick", 1, False), ("quick", 2, False), ("quick", 3, False)]
    quick.close()
    gate.set()
    eventually(lambda: wide.stat().st_size > seen[-1] + 10)
    slow.stop_stream(cancel_requests=True)
    slow.close()


def test_a_worker_that_is_killed_ends_what_it_had(server: Serving) -> None:
    stream = Stream(server)
    stream.ask("stream", 1e9, "x")
    stream.next()
    os.kill(server.workers()["stream_0_0"], signal.SIGKILL)
    while isinstance(came := stream.next(), tuple):
        assert not came[2]
    assert "died" in came
    eventually(lambda: server.ready("stream"))
    stream.ask("stream", 1, "y")
    assert stream.next() == ("y", 1, False)
    stream.close()
