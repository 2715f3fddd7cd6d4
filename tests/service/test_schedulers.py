"""What the fields of a scheduler's configuration change for the requests that a served model gets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from serving import HELD, Serving, eventually, let_go, pbtxt, python_model, serving

LONG = "max_queue_delay_microseconds: 600000000"
CONTROLS = (
    'control_input [{ name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }] }, '
    '{ name: "READY" control [{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }] }]'
)
MODELS = {
    "levels": pbtxt(batch=1, more="dynamic_batching { priority_levels: 3 default_priority_level: 2 }"),
    "policies": pbtxt(
        batch=1,
        more="dynamic_batching { priority_levels: 2 default_priority_level: 2 "
        "priority_queue_policy { key: 1 value { max_queue_size: 1 } } }",
    ),
    "late": pbtxt(
        batch=1,
        more="dynamic_batching { default_queue_policy { timeout_action: DELAY "
        "default_timeout_microseconds: 60000000 allow_timeout_override: true } }",
    ),
    "preferred": pbtxt(batch=8, more=f"dynamic_batching {{ preferred_batch_size: [ 2 ] {LONG} }}"),
    "ordered": pbtxt(batch=1, more="dynamic_batching { preserve_ordering: true }").replace("CPU", "CPU count: 2"),
    "direct": pbtxt(
        batch=2, more=f"sequence_batching {{ direct {{ {LONG} minimum_slot_utilization: 1.0 }} {CONTROLS} }}"
    ),
    "oldest": pbtxt(
        batch=8,
        more=f"sequence_batching {{ oldest {{ max_candidate_sequences: 8 preferred_batch_size: [ 2 ] {LONG} }} }}",
    ),
    "ordered_sequences": pbtxt(
        batch=1, more="sequence_batching { oldest { max_candidate_sequences: 1 preserve_ordering: true } }"
    ).replace("CPU", "CPU count: 2"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        python_model(models, name, HELD.replace('print("executes"', f'print("{name} executes"'), config)
    return models


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Serving]:
    with serving(models, models.with_suffix(".log")) as server:
        yield server


@pytest.fixture
def caller_of(server: Serving, models: Path) -> Iterator[CallerOf]:
    with ThreadPoolExecutor(8) as threads:
        yield lambda model: Caller(server, models / model, threads)


class Caller:
    """Asks a model, and keeps in which order it was executed and answered."""

    def __init__(self, server: Serving, directory: Path, threads: ThreadPoolExecutor) -> None:
        self.server = server
        self.model = directory.name
        self.answered: list[float] = []
        self._directory = directory
        self._threads = threads

    def ask(self, value: float, **parameters: object) -> Future[int]:
        """Ask in a thread; the result is the status."""

        def ask() -> int:
            tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}
            body = {"inputs": [tensor], "parameters": parameters}
            status, _, _ = self.server.ask("POST", f"/v2/models/{self.model}/infer", body)
            self.answered.append(value)
            return status

        return self._threads.submit(ask)

    def wait(self, *values: float, **parameters: object) -> list[Future[int]]:
        """Ask one after the other, each when the one before waits."""
        asked = []
        for count, value in enumerate(values, self.pending + 1):
            asked.append(self.ask(value, **parameters))
            eventually(lambda count=count: self.pending == count)
        return asked

    def occupy(self) -> Future[int]:
        """Have an instance execute until ``release``."""
        asked = self.ask(-1.0)
        eventually(lambda: -1.0 in self.executed)
        return asked

    def release(self) -> None:
        let_go(self._directory)

    @property
    def executed(self) -> list[float]:
        return [float(value) for value in re.findall(rf"\b{self.model} executes ([-\d.]+)", self.server.text)]

    @property
    def pending(self) -> int:
        name = f'nv_inference_pending_request_count{{model="{self.model}",version="1"}}'
        return int(self.server.metrics()[name])

    @property
    def batches(self) -> dict[int, int]:
        """How many batches of each size there were."""
        stats = self.server.json("GET", f"/v2/models/{self.model}/stats")["model_stats"][0]
        return {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats["batch_stats"]}


CallerOf = Callable[[str], Caller]


def test_the_urgent_first(caller_of: CallerOf) -> None:
    caller = caller_of("levels")
    asked = [caller.occupy()]
    asked += caller.wait(3.0, priority=3)
    asked += caller.wait(2.0)  # the default level
    asked += caller.wait(1.0, priority=1)
    caller.release()
    assert [each.result() for each in asked] == [200] * 4
    eventually(lambda: caller.executed == [-1.0, 1.0, 2.0, 3.0])


def test_a_level_has_a_policy_of_its_own(caller_of: CallerOf) -> None:
    caller = caller_of("policies")
    asked = [caller.occupy()]
    asked += caller.wait(1.0, priority=1)
    assert caller.ask(2.0, priority=1).result() == 503
    asked += caller.wait(3.0, 4.0)
    caller.release()
    assert [each.result() for each in asked] == [200] * 4


def test_the_late_are_put_behind_the_others(caller_of: CallerOf) -> None:
    caller = caller_of("late")
    asked = [caller.occupy()]
    asked += caller.wait(1.0, timeout=1)
    asked += caller.wait(2.0)
    caller.release()
    assert [each.result() for each in asked] == [200] * 3
    eventually(lambda: caller.executed == [-1.0, 2.0, 1.0])


@pytest.mark.parametrize("model", ["preferred", "oldest", "direct"])
def test_a_batch_waits_for_others_up_to_a_preferred_size(caller_of: CallerOf, model: str) -> None:
    """For ten minutes: a request alone would wait longer than this test may take."""
    caller = caller_of(model)
    sequences = [{} if model == "preferred" else {"sequence_id": of, "sequence_start": True} for of in (1, 2)]
    first = caller.wait(1.0, **sequences[0])
    assert caller.executed == []
    second = caller.ask(2.0, **sequences[1])
    assert [first[0].result(), second.result()] == [200, 200]
    assert caller.batches == {2: 1}


@pytest.mark.parametrize("model", ["ordered", "ordered_sequences"])
def test_answers_leave_in_the_order_of_the_requests(caller_of: CallerOf, model: str) -> None:
    caller = caller_of(model)
    sequences = [{} if model == "ordered" else {"sequence_id": of, "sequence_start": True} for of in (1, 2)]
    asked = [caller.ask(-1.0, **sequences[0])]
    eventually(lambda: caller.executed == [-1.0])
    for value in (5.0, 6.0):  # on the other instance, which has answered the first when it executes the second
        asked.append(caller.ask(value, **sequences[1]))
        eventually(lambda value=value: caller.executed[-1] == value)
    caller.server.json("GET", f"/v2/models/{model}/stats")
    assert caller.answered == []
    caller.release()
    assert [each.result() for each in asked] == [200] * 3
