import logging
from collections.abc import Callable, Sequence

import pytest

from doubles import request
from nerite.core.errors import Internal, InvalidArgument, Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.instances import instance

OK = InferenceResponse(ResponseHeader("model", "1", ()))


class Model:
    """An instance whose ``execute`` is given."""

    def __init__(
        self, execute: Callable[[Sequence[InferenceRequest], ExecutionTimes], Sequence[InferenceResponse]]
    ) -> None:
        self.execute = execute

    def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        pass


def raising(error: BaseException) -> Model:
    def execute(requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        raise error

    return Model(execute)


def run(model: Model, count: int = 3) -> list[InferenceResponse]:
    timings = ExecutionTimes()
    answers = instance.run_model(model, "model_0", [request() for _ in range(count)], timings)
    assert timings.ended_ns >= timings.computed_ns >= timings.started_ns > 0
    return answers


def test_answers_pass() -> None:
    failed = InferenceResponse.failed(InvalidArgument("this one"))
    assert run(Model(lambda requests, timings: (OK, failed, OK))) == [OK, failed, OK]


def test_the_model_sees_requests_and_timings() -> None:
    seen = []

    def execute(requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        timings.computed()
        seen.append((requests, timings.computed_ns))
        return [OK]

    asked, timings = [request()], ExecutionTimes()
    instance.run_model(Model(execute), "model_0", asked, timings)
    assert seen == [(asked, timings.computed_ns)]


@pytest.mark.parametrize("count", [0, 2, 4])
def test_as_many_answers_as_requests_or_none(count: int) -> None:
    answers = run(Model(lambda requests, timings: [OK] * count))
    assert [type(answer.error) for answer in answers] == [Internal] * 3
    assert answers[0].error is not None
    assert answers[0].error.message == f"instance 'model_0' returned {count} responses for 3 requests"


def test_a_refusal_fails_the_batch_with_its_own_text(caplog: pytest.LogCaptureFixture) -> None:
    error = Unavailable("not now")
    assert [answer.error for answer in run(raising(error))] == [error] * 3
    assert not caplog.records


def test_an_answer_holds_nothing_of_the_frames_of_the_model() -> None:
    def execute(requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> Sequence[InferenceResponse]:
        try:
            raise ValueError("first")
        except ValueError as error:
            raise Internal("second") from error

    error = run(Model(execute))[0].error
    assert error is not None
    assert (error.message, error.__traceback__, error.__cause__, error.__context__) == ("second", None, None, None)


class Mute(Exception):
    def __str__(self) -> str:
        raise OSError


def test_an_exception_that_cannot_be_printed_is_an_answer() -> None:
    assert [str(answer.error) for answer in run(raising(Mute()))] == ["Mute: <MESSAGE UNAVAILABLE>"] * 3


@pytest.mark.parametrize("error", [ValueError("wrong"), RecursionError("wrong")])
def test_anything_else_is_internal_and_its_traceback_stays_here(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    answers = run(raising(error))
    kind = type(error).__name__
    assert [(type(answer.error), str(answer.error)) for answer in answers] == [(Internal, f"{kind}: wrong")] * 3
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("instance 'model_0' failed\nTraceback (most recent call last):\n")
    assert record.getMessage().endswith(f"{kind}: wrong")


def test_an_answer_that_is_no_list_fails_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    answers = run(Model(lambda requests, timings: None))  # type: ignore[arg-type, return-value]
    assert [type(answer.error) for answer in answers] == [Internal] * 3
    assert len(caplog.records) == 1
