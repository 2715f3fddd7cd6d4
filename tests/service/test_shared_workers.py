"""Models that live in one worker process: who lives with whom, what they do to each other, and what they do not."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import Serving, adds, eventually, pbtxt, python_model, serving

WHERE = """
def initialize(self, args):
    import helper
    self.told = helper.NUMBER

def execute(self, requests):
    where = np.array([[os.getpid(), self.told]], np.float32)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", where)]) for request in requests]
"""
CALLS = """
def execute(self, requests):
    answers = []
    for request in requests:
        value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        call = pb_utils.InferenceRequest(
            model_name={target!r}, requested_output_names=["OUTPUT0"], inputs=[pb_utils.Tensor("INPUT0", value)]
        )
        response = call.exec()
        if response.has_error():
            answers.append(pb_utils.InferenceResponse(error=response.error()))
            continue
        value = response.output_tensors()[0].as_numpy() * 10
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
    return answers
"""
CALLS_LATER = """
async def execute(self, requests):
    answers = []
    for request in requests:
        value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        call = pb_utils.InferenceRequest(
            model_name="adds", requested_output_names=["OUTPUT0"], inputs=[pb_utils.Tensor("INPUT0", value)]
        )
        response = await call.async_exec()
        value = response.output_tensors()[0].as_numpy() * 100
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
    return answers
"""
WAITS = """
def execute(self, requests):
    print("begun", flush=True)
    while not os.path.exists({go!r}):
        time.sleep(0.01)
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())]) for request in requests
    ]
"""
LOADS = """
def execute(self, requests):
    pb_utils.load_model("late")
    call = pb_utils.InferenceRequest(
        model_name="late", requested_output_names=["OUTPUT0"], inputs=requests[0].inputs()
    )
    return [pb_utils.InferenceResponse(call.exec().output_tensors())] * len(requests)
"""


def shared(name: str, count: int = 1, batch: int = 8, more: str = "") -> str:
    """Return the configuration of a model in a shared worker."""
    parameter = f'parameters {{ key: "WORKER" value: {{ string_value: "{name}" }} }}'
    return pbtxt(batch, more, parameters=parameter).replace("KIND_CPU }", f"KIND_CPU count: {count} }}")


def lives(models: Path, name: str, number: int, worker: str = "duo", count: int = 2) -> Path:
    """Write a model that tells where it is, and what a helper module says that others have under the same name."""
    directory = python_model(models, name, WHERE, shared(worker, count))
    (directory / "1" / "helper.py").write_text(f"NUMBER = {number}\n")
    return directory


def homes(server: Serving, model: str, count: int) -> set[int]:
    """Ask until so many instances have told where they are."""
    found: set[int] = set()
    eventually(lambda: (found.add(int(server.infer(model, [0.0])[0])), len(found) == count)[1])
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shared")
    models = folder / "models"
    python_model(models, "adds", adds(1), shared("callers"))
    python_model(models, "calls", CALLS.format(target="adds"), shared("callers"))
    python_model(models, "calls_twice", CALLS.format(target="calls"), shared("callers"))
    python_model(models, "calls_later", CALLS_LATER, shared("callers"))
    python_model(models, "to_and", CALLS.format(target="fro"), shared("callers"))
    python_model(models, "fro", CALLS.format(target="to_and"), shared("callers"))
    python_model(models, "loads", LOADS, shared("callers"))
    python_model(models, "late", adds(5), shared("callers"))
    flags = ["--model-control-mode=explicit"]
    for name in ("adds", "calls", "calls_twice", "calls_later", "to_and", "fro", "loads"):
        flags += ["--load-model", name]
    with serving(models, folder / "log", *flags) as running:
        yield running


def test_each_instance_lives_with_one_of_the_others(tmp_path: Path) -> None:
    models = tmp_path / "models"
    lives(models, "one", 1)
    lives(models, "two", 2)
    lives(models, "other", 3, worker="else", count=1)
    with serving(models, tmp_path / "log") as server:
        assert set(server.workers()) == {"duo_0", "duo_1", "else_0"}
        assert homes(server, "one", 2) == homes(server, "two", 2)
        assert homes(server, "other", 1) == {server.workers()["else_0"]}
        assert server.infer("one", [0.0])[1] == 1
        assert server.infer("two", [0.0])[1] == 2
        memory = [value for key, value in server.metrics().items() if "memory" in key and 'model="one"' in key]
        assert all(value > 0 for value in memory)


def test_one_is_changed_and_goes_and_the_other_stays(tmp_path: Path) -> None:
    models = tmp_path / "models"
    one = lives(models, "one", 1, count=1)
    lives(models, "two", 2, count=1)
    with serving(models, tmp_path / "log", "--model-control-mode=explicit", "--load-model=*") as server:
        (before,) = homes(server, "two", 1)
        (one / "1" / "helper.py").write_text("NUMBER = 11\n")
        server.ask("POST", "/v2/repository/models/one/load")
        assert server.infer("one", [0.0]) == [before, 11]
        assert server.infer("two", [0.0]) == [before, 2]
        server.ask("POST", "/v2/repository/models/one/unload")
        eventually(lambda: server.state("one") == "UNAVAILABLE")
        assert server.infer("two", [0.0]) == [before, 2]
        server.ask("POST", "/v2/repository/models/one/load")
        assert server.infer("one", [0.0]) == [before, 11]
        for name in ("one", "two"):
            server.ask("POST", f"/v2/repository/models/{name}/unload")
        eventually(lambda: not server.workers())


def test_one_that_cannot_be_loaded_leaves_the_other_alone(tmp_path: Path) -> None:
    models = tmp_path / "models"
    lives(models, "one", 1, count=1)
    python_model(models, "broken", "def initialize(self, args):\n    raise RuntimeError('no luck')", shared("duo"))
    with serving(models, tmp_path / "log", "--model-control-mode=explicit", "--load-model=one") as server:
        (before,) = homes(server, "one", 1)
        status, _, body = server.ask("POST", "/v2/repository/models/broken/load")
        assert status == 400
        assert b"no luck" in body
        assert server.infer("one", [0.0]) == [before, 1]


def test_a_death_is_the_death_of_all_and_all_come_back(tmp_path: Path) -> None:
    models = tmp_path / "models"
    go = tmp_path / "go"
    python_model(models, "waits", WAITS.format(go=str(go)), shared("duo"))
    lives(models, "one", 1, count=1)
    with serving(models, tmp_path / "log") as server:
        (before,) = homes(server, "one", 1)
        answers: list[str] = []

        def ask() -> None:
            status, _, body = server.ask(
                "POST",
                "/v2/models/waits/infer",
                {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]},
            )
            answers.append(f"{status} {json.loads(body).get('error', '')}")

        caller = threading.Thread(target=ask)
        caller.start()
        eventually(lambda: "begun" in server.text)
        os.kill(before, signal.SIGKILL)
        caller.join(20)
        assert answers[0].startswith("500 Stub process 'waits_0_0' is not healthy."), answers
        eventually(lambda: server.ready("one") and server.ready("waits"))
        (after,) = homes(server, "one", 1)
        assert after != before
        go.touch()
        assert server.infer("waits", [2.0]) == [2.0]
        assert set(server.workers()) == {"duo_0"}
        assert "worker 'one_0_0' runs again" in server.text


def test_calls_between_those_who_live_together(server: Serving) -> None:
    assert set(server.workers()) == {"callers_0"}
    assert server.infer("calls", [1.0]) == [20.0]
    assert server.infer("calls_twice", [1.0]) == [200.0]
    assert server.infer("calls_later", [1.0]) == [200.0]


def test_many_calls_at_once(server: Serving) -> None:
    wrong: list[str] = []

    def ask(model: str, factor: float) -> None:
        for number in range(40):
            answer = server.infer(model, [float(number)])
            if answer != [(number + 1) * factor]:
                wrong.append(f"{model} {number}: {answer}")

    callers = [
        threading.Thread(target=ask, args=each)
        for each in (("adds", 1), ("calls", 10), ("calls_twice", 100), ("calls_later", 100)) * 2
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(40)
    assert wrong == []


def test_a_ring_of_calls_is_refused(server: Serving) -> None:
    status, _, body = server.ask(
        "POST",
        "/v2/models/to_and/infer",
        {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]},
    )
    assert status == 503
    assert b"can never answer this call: each model waits for the next in" in body


def test_one_has_another_loaded_into_its_own_worker(server: Serving) -> None:
    assert server.infer("loads", [1.0]) == [6.0]
    # The process that completed its configuration may be about to end.
    eventually(lambda: set(server.workers()) == {"callers_0"})
    assert "'late_0_0' shares the worker 'callers_0' with" in server.text
