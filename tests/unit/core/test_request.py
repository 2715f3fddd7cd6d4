from typing import Any

import pytest

from doubles import Caller, request
from nerite.core import tensor as dtypes
from nerite.core.errors import Unavailable
from nerite.core.request import InferenceRequest, RequestedOutput, RequestHeader, with_request_id
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import TensorSpec

OK = InferenceResponse(ResponseHeader("model", "1", ()))


def test_one_final_answer_leaves_and_no_other() -> None:
    caller = Caller()
    asked = request(sink=caller)
    asked.respond(OK, final=False)
    asked.respond(OK)
    asked.respond(OK)
    asked.respond(OK, final=False)
    assert caller.answers == [(asked, OK, False), (asked, OK, True)]
    assert asked.finished


def test_cancel_tells_the_holder_once() -> None:
    asked = request()
    told: list[InferenceRequest] = []
    asked.on_cancel = told.append
    asked.cancel()
    asked.cancel()
    assert told == [asked]
    assert asked.cancelled
    assert not asked.finished


def test_cancel_without_a_holder_timings_only() -> None:
    asked = request()
    asked.cancel()
    assert asked.cancelled


def test_cancel_does_nothing_to_a_finished_request() -> None:
    asked = request()
    told: list[InferenceRequest] = []
    asked.on_cancel = told.append
    asked.respond(OK)
    asked.cancel()
    assert told == []
    assert not asked.cancelled


def test_a_cancelled_request_is_still_answered_once() -> None:
    caller = Caller()
    asked = request(sink=caller)
    asked.on_cancel = lambda cancelled: cancelled.respond(InferenceResponse.failed(Unavailable("gone")))
    asked.cancel()
    asked.respond(OK)
    assert [response.error is not None for response in caller.of(asked)] == [True]


def test_label() -> None:
    assert request(id="seven").label == "[request id: seven] "
    assert request().label == "[request id: <id_unknown>] "
    error = with_request_id(Unavailable("Exceeds maximum queue size"), "")
    assert type(error) is Unavailable
    assert error.message == "[request id: <id_unknown>] Exceeds maximum queue size"
    assert with_request_id(Unavailable("x"), "seven").message == "[request id: seven] x"


def test_a_failed_response_has_nothing_but_the_error() -> None:
    error = Unavailable("no")
    response = InferenceResponse.failed(error)
    assert (response.header, tuple(response.data), response.error) == (None, (), error)


def header(**changes: Any) -> RequestHeader:
    fields: dict[str, Any] = {
        "model_name": "m",
        "model_version": "1",
        "inputs": [TensorSpec("A", dtypes.FP32, (1, 2))],
        "outputs": [RequestedOutput("B")],
    }
    return RequestHeader(**{**fields, **changes})


def test_headers_that_say_the_same_have_the_same_identity() -> None:
    one, other = (header(parameters={"b": 2, "a": "x"}), header(parameters={"a": "x", "b": 2}))
    assert one.identity() == other.identity()
    assert hash(one.identity()) == hash(other.identity())


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "n"},
        {"model_version": ""},
        {"inputs": [TensorSpec("A", dtypes.FP32, (2, 1))]},
        {"inputs": [TensorSpec("A", dtypes.INT32, (1, 2))]},
        {"outputs": []},
        {"outputs": [RequestedOutput("B", binary=True)]},
        {"outputs": [RequestedOutput("B", classification=1)]},
        {"parameters": {"a": 1}},
        {"priority": 1},
        {"timeout_us": 1},
        {"sequence_id": 1},
        {"sequence_start": True},
        {"sequence_end": True},
        {"binary_by_default": True},
    ],
)
def test_headers_that_say_otherwise_differ(changes: dict[str, Any]) -> None:
    assert header().identity() != header(**changes).identity()


@pytest.mark.parametrize("values", [(1, True, 1.0, "1"), (0, False, 0.0, -0.0)])
def test_values_that_python_calls_equal_differ(values: tuple[Any, ...]) -> None:
    """A model may be given ``true`` where another caller gave 1: it must see which."""
    assert len({header(parameters={"a": value}).identity() for value in values}) == len(values)
    assert header(sequence_id=1).identity() != header(sequence_id="1").identity()


def test_parameters_that_are_not_numbers_at_all_have_an_identity() -> None:
    nan = float("nan")
    assert header(parameters={"a": nan}).identity() == header(parameters={"a": float("nan")}).identity()
