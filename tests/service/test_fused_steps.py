"""Ensembles whose steps live in one worker: what one answers the next is asked there, and nobody can tell."""

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

from serving import Serving, adds, binary_request, ensemble, eventually, pbtxt, python_model, serving, step

WORKER = 'parameters { key: "WORKER" value: { string_value: "steps" } }'
PICKY = """
def execute(self, requests):
    answers = []
    for request in requests:
        value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        if value[0, 0] < 0:
            answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("too small")))
        elif value[0, 0] > 1000:
            raise ValueError("too large")
        else:
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
    return answers
"""
SENDS = """
def execute(self, requests):
    import threading

    def send(request):
        value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value * 2)])
        request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    threads = [threading.Thread(target=send, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    return [None] * len(requests)
"""
DOUBLES_WIDTH = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.tile(request.inputs()[0].as_numpy(), 2))])
        for request in requests
    ]
"""
TWO = """
def execute(self, requests):
    answers = []
    for request in requests:
        left, right = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("LEFT", "RIGHT"))
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", left * 100 + right)]))
    return answers
"""
WHERE = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy() * 0 + os.getpid())]
        )
        for request in requests
    ]
"""
CALLS = """
def execute(self, requests):
    answers = []
    for request in requests:
        call = pb_utils.InferenceRequest(
            model_name="alone", requested_output_names=["OUTPUT0"], inputs=request.inputs()
        )
        answers.append(pb_utils.InferenceResponse(call.exec().output_tensors()))
    return answers
"""
SLOW = """
def execute(self, requests):
    print("begun", flush=True)
    time.sleep(20)
"""


def together(models: Path, name: str, source: str, more: str = "dynamic_batching {}", dims: str = "-1") -> Path:
    return python_model(models, name, source, pbtxt(8, more, dims=dims, parameters=WORKER))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("steps")
    models = folder / "models"
    for name, source in (("one", adds(1)), ("ten", adds(10)), ("picky", PICKY), ("sends", SENDS), ("calls", CALLS)):
        together(models, name, source)
    together(models, "one_by_one", adds(1000), more="")
    together(models, "wide", DOUBLES_WIDTH)
    together(models, "two_wide", adds(5), dims="2")
    two = pbtxt(8, "dynamic_batching {}", parameters=WORKER).replace(
        'name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }',
        'name: "LEFT" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "RIGHT" data_type: TYPE_FP32 dims: [ -1 ] }',
    )
    python_model(models, "two", TWO, two)
    python_model(models, "alone", adds(7), pbtxt())
    ensemble(models, "row", step("one", "INPUT0", "a"), step("ten", "a", "b"), step("one_by_one", "b", "OUTPUT0"))
    ensemble(models, "choosy", step("one", "INPUT0", "a"), step("picky", "a", "b"), step("ten", "b", "OUTPUT0"))
    ensemble(models, "sending", step("one", "INPUT0", "a"), step("sends", "a", "b"), step("ten", "b", "OUTPUT0"))
    ensemble(models, "unfit", step("wide", "INPUT0", "a"), step("two_wide", "a", "OUTPUT0"))
    ensemble(models, "through", step("one", "INPUT0", "a"), step("alone", "a", "b"), step("ten", "b", "OUTPUT0"))
    ensemble(models, "thrice", step("ten", "INPUT0", "a"), step("ten", "a", "b"), step("ten", "b", "OUTPUT0"))
    ensemble(models, "calling", step("one", "INPUT0", "a"), step("calls", "a", "OUTPUT0"))
    both = (
        '{ model_name: "two" model_version: -1 input_map [{ key: "LEFT" value: "a" }, { key: "RIGHT" value: "INPUT0" }]'
        ' output_map { key: "OUTPUT0" value: "OUTPUT0" } }'
    )
    ensemble(models, "again", step("one", "INPUT0", "a"), both)
    with serving(models, folder / "log", "--model-control-mode=explicit", "--load-model=*") as running:
        yield running


def asked(server: Serving, model: str, *values: float) -> tuple[int, Any]:
    status, _, body = server.ask(
        "POST",
        f"/v2/models/{model}/infer",
        {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, len(values)], "data": values}]},
    )
    return status, json.loads(body)


def counted(server: Serving, model: str) -> tuple[int, int, int, int]:
    """What a model has counted: inferences, executions, successes, failures."""
    stats = server.json("GET", f"/v2/models/{model}/stats")["model_stats"][0]
    of = stats["inference_stats"]
    return stats["inference_count"], stats["execution_count"], of["success"]["count"], of["fail"]["count"]


def grown(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(before, after, strict=True))


def test_each_model_counts_its_own(server: Serving) -> None:
    models = ("one", "ten", "one_by_one", "row")
    before = {model: counted(server, model) for model in models}
    for number in range(5):
        assert server.infer("row", [float(number)]) == [number + 1011.0]
    for model in models:
        assert grown(before[model], counted(server, model)) == (5, 5, 5, 0), model


def test_many_at_once(server: Serving) -> None:
    before = {model: counted(server, model) for model in ("one", "ten", "one_by_one", "row")}
    wrong: list[object] = []

    def ask(first: int) -> None:
        for number in range(first, first + 50):
            answer = server.infer("row", [float(number), 2.0])
            if answer != [number + 1011.0, 1013.0]:
                wrong.append((number, answer))

    callers = [threading.Thread(target=ask, args=(1000 * each,)) for each in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(50)
    assert wrong == []
    for model, then in before.items():
        inferences, executions, successes, failures = grown(then, counted(server, model))
        assert (inferences, successes, failures) == (400, 400, 0), model
        if model == "one_by_one":
            assert executions == 400


def test_an_error_says_which_step_it_was(server: Serving) -> None:
    before = {model: counted(server, model) for model in ("one", "picky", "ten")}
    assert asked(server, "choosy", -5.0) == (
        500,
        {
            "error": "in ensemble 'choosy', too small\n"
            "    at step 2 of 'choosy': model 'picky', version 1, given INPUT0 FP32 [1,1]"
        },
    )
    status, body = asked(server, "choosy", 5000.0, 1.0)
    assert status == 500
    assert body["error"].startswith("in ensemble 'choosy', Failed to process the request(s) for model 'picky_0_0'")
    assert "ValueError: too large" in body["error"]
    assert body["error"].endswith("at step 2 of 'choosy': model 'picky', version 1, given INPUT0 FP32 [1,2]")
    assert grown(before["one"], counted(server, "one")) == (2, 2, 2, 0)
    assert grown(before["picky"], counted(server, "picky")) == (1, 2, 1, 1)
    assert grown(before["ten"], counted(server, "ten")) == (0, 0, 0, 0)
    assert server.infer("choosy", [4.0]) == [15.0]


def test_what_does_not_fit_the_next_model_is_refused_as_ever(server: Serving) -> None:
    assert server.infer("unfit", [4.0]) == [9.0, 9.0]
    status, body = asked(server, "unfit", 1.0, 2.0)
    assert status == 400
    assert "in ensemble 'unfit', [request id: <id_unknown>] unexpected shape for input 'INPUT0'" in body["error"]
    assert "at step 2 of 'unfit': model 'two_wide', version 1, given INPUT0 FP32 [1,4]" in body["error"]


def test_a_step_that_sends_its_answer_and_one_that_lives_elsewhere(server: Serving) -> None:
    assert server.infer("sending", [4.0]) == [20.0]
    assert server.infer("through", [4.0]) == [22.0]


def test_a_step_that_takes_what_the_first_was_given(server: Serving) -> None:
    assert server.infer("again", [4.0]) == [504.0]


def test_a_model_that_follows_itself(server: Serving) -> None:
    before = counted(server, "ten")
    assert server.infer("thrice", [4.0]) == [34.0]
    assert grown(before, counted(server, "ten")) == (3, 3, 3, 0)


def test_a_step_that_calls_another_model(server: Serving) -> None:
    assert server.infer("calling", [4.0]) == [12.0]


def test_large_tensors(server: Serving) -> None:
    value = np.arange(150_000, dtype=np.float32).reshape(1, -1)
    body, headers = binary_request(value)
    for _ in range(3):
        status, told, answer = server.ask("POST", "/v2/models/row/infer", body, **headers)
        assert status == 200
        raw = answer[int(told["Inference-Header-Content-Length"]) :]
        assert np.array_equal(np.frombuffer(raw, np.float32), value[0] + 1011)


def test_what_is_traced_is_seen_step_by_step(tmp_path: Path) -> None:
    models = tmp_path / "models"
    together(models, "one", adds(1))
    together(models, "ten", adds(10))
    ensemble(models, "row", step("one", "INPUT0", "a"), step("ten", "a", "OUTPUT0"))
    file = tmp_path / "trace"
    flags = [f"--trace-config=triton,file={file}", "--trace-config=rate=1"]
    with serving(models, tmp_path / "log", *flags) as server:
        assert server.infer("row", [0.0]) == [11.0]
        server.ask("POST", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]})
        assert server.infer("row", [1.0]) == [12.0]
    traced = [record["model_name"] for record in json.loads(file.read_text()) if "model_name" in record]
    assert sorted(traced) == ["one", "row", "ten"]


def test_they_are_where_they_should_be(tmp_path: Path) -> None:
    models = tmp_path / "models"
    together(models, "one", WHERE)
    changing = together(models, "two", adds(0))
    ensemble(models, "row", step("one", "INPUT0", "a"), step("two", "a", "OUTPUT0"))
    with serving(models, tmp_path / "log", "--model-control-mode=explicit", "--load-model=*") as server:
        home = float(np.float32(server.workers()["steps_0"]))
        assert server.infer("row", [1.0]) == [home]
        source = changing / "1" / "model.py"
        source.write_text(source.read_text().replace("+ 0", "* 0 + 3"))
        server.ask("POST", "/v2/repository/models/two/load")
        assert server.infer("row", [1.0]) == [3.0]
        config = changing / "config.pbtxt"
        config.write_text(config.read_text().replace(WORKER, ""))
        server.ask("POST", "/v2/repository/models/two/load")
        assert server.infer("row", [1.0]) == [3.0]
        assert set(server.workers()) == {"steps_0", "two_0_0"}


def test_a_death_on_the_way(tmp_path: Path) -> None:
    models = tmp_path / "models"
    together(models, "one", adds(1))
    together(models, "slow", SLOW)
    ensemble(models, "row", step("one", "INPUT0", "a"), step("slow", "a", "OUTPUT0"))
    ensemble(models, "short", step("one", "INPUT0", "a"), step("one", "a", "OUTPUT0"))
    with serving(models, tmp_path / "log") as server:
        answers: list[tuple[int, Any]] = []
        caller = threading.Thread(target=lambda: answers.append(asked(server, "row", 1.0)))
        caller.start()
        eventually(lambda: "begun" in server.text)
        os.kill(server.workers()["steps_0"], signal.SIGKILL)
        caller.join(20)
        assert answers[0][0] == 500
        assert "in ensemble 'row', Stub process 'one_0_0' is not healthy." in answers[0][1]["error"]
        eventually(lambda: server.ready("short"))
        assert server.infer("short", [1.0]) == [3.0]
        assert {key: value for key, value in server.metrics().items() if "pending" in key and value} == {}


def test_not_in_the_server_and_in_a_worker(tmp_path: Path) -> None:
    inside = 'parameters { key: "EXECUTION_MODE" value: { string_value: "in_process" } }'
    python_model(tmp_path / "models", "torn", adds(1), pbtxt(parameters=WORKER + inside))
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit") as server:
        status, _, body = server.ask("POST", "/v2/repository/models/torn/load")
        assert status == 400
        assert b"(EXECUTION_MODE in_process) and in the worker 'steps' (WORKER): remove one" in body
