from collections.abc import Sequence
from typing import Any

from doubles import request
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.instances.in_process import LoopInstance

OK = InferenceResponse(ResponseHeader("model", "1", ()))


class Model:
    def __init__(self) -> None:
        self.ready = True
        self.closed = 0
        self.fails = False

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        if self.fails:
            raise ValueError("no")
        return [OK] * len(requests)

    def is_ready(self) -> bool:
        return self.ready

    def close(self) -> None:
        self.closed += 1


def test_done_is_called_before_run_returns() -> None:
    model = Model()
    instance = LoopInstance("model_0", model)
    done: list[tuple[Any, ...]] = []
    instance.done = lambda *arguments: done.append(arguments)
    batch = [request(), request()]
    instance.run(batch)
    ((by, what, answers, timings),) = done
    assert (by, what, list(answers)) == (instance, batch, [OK, OK])
    assert timings.ended_ns >= timings.started_ns > 0


def test_a_model_that_raises_is_answered_for() -> None:
    model = Model()
    model.fails = True
    instance = LoopInstance("model_0", model)
    done: list[tuple[Any, ...]] = []
    instance.done = lambda *arguments: done.append(arguments)
    instance.run([request()])
    assert str(done[0][2][0].error) == "ValueError: no"
    assert instance.usable


def test_ready_and_close_ask_the_model() -> None:
    model = Model()
    instance = LoopInstance("model_0", model)
    answers: list[bool] = []
    instance.is_ready(answers.append, 1.0)
    model.ready = False
    instance.is_ready(answers.append, 1.0)
    assert answers == [True, False]
    closed: list[int] = []
    instance.close(lambda: closed.append(model.closed))
    assert closed == [1]
