"""``pb_utils.InferenceRequest``, ``InferenceResponse``, ``TritonError`` and their parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils

T = pb_utils.Tensor("T", np.zeros(2, np.float32))


def request(**fields: Any) -> pb_utils.InferenceRequest:
    return pb_utils.InferenceRequest(
        **{"model_name": "m", "inputs": [T], "requested_output_names": ["b", "a", "b"], **fields}
    )


def test_request_by_position_and_defaults() -> None:
    memory = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU)
    made = pb_utils.InferenceRequest("r", 1, [T], ["o"], "m", 2, 3, 10, memory, pb_utils.InferenceTrace(), {"a": 1})
    assert (made.request_id(), made.correlation_id(), made.flags(), made.timeout()) == ("r", 1, 3, 10)
    assert (made.inputs(), made.requested_output_names(), made.parameters()) == ([T], {"o"}, '{"a": 1}')
    plain = request()
    assert (plain.request_id(), plain.correlation_id(), plain.flags(), plain.timeout()) == ("", 0, 0, 0)
    assert (plain.requested_output_names(), plain.parameters()) == ({"a", "b"}, "{}")
    assert isinstance(plain.trace(), pb_utils.InferenceTrace)
    assert plain.trace().get_context() is None
    assert not plain.is_cancelled()


def test_request_flags_and_correlation_id() -> None:
    made = request(correlation_id="abc")
    made.set_flags(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START | pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    assert (made.flags(), made.correlation_id()) == (3, "abc")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
        ({"inputs": [None]}, "Input tensor for request with id '' and model name 'm' should not be empty."),
        (
            {"requested_output_names": [""]},
            "Requested output name for request with id '' and model name 'm' should not be empty.",
        ),
        ({"parameters": {"a": 1.5}}, "Expect parameters values to have type bool/int/str, found type <class 'float'>"),
        ({"parameters": {1: "x"}}, "Expect parameters keys to have type str, found type <class 'int'>"),
        ({"parameters": "x"}, "Expect N8pybind114dictE, got <class 'str'>"),
    ],
)
def test_request_refusals(fields: dict[str, object], text: str) -> None:
    with pytest.raises(pb_utils.TritonModelException) as refused:
        request(**fields)
    assert str(refused.value) == text


@pytest.mark.parametrize("missing", ["inputs", "requested_output_names", "model_name"])
def test_request_needs(missing: str) -> None:
    with pytest.raises(TypeError, match=r"^__init__\(\): incompatible constructor arguments\.") as refused:
        request(**{missing: None})
    assert "Invoked with: kwargs: " in str(refused.value)
    assert f"{missing}=" not in str(refused.value).partition("Invoked with")[2]


def test_response() -> None:
    response = pb_utils.InferenceResponse([T])
    assert response.output_tensors() == [T]
    assert response.output_tensors()[0] is T
    assert pb_utils.get_output_tensor_by_name(response, "T") is T
    assert pb_utils.get_output_tensor_by_name(response, "X") is None
    assert (response.has_error(), response.error(), response.parameters()) == (False, None, "{}")


def test_response_with_error() -> None:
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError("bad"))
    error = response.error()
    assert response.has_error()
    assert error is not None
    assert (error.message(), error.code()) == ("bad", pb_utils.TritonError.INTERNAL)


def test_response_is_a_list_of_its_own() -> None:
    tensors = (T, T)
    response = pb_utils.InferenceResponse(tensors)
    response.output_tensors().clear()
    assert len(response.output_tensors()) == 2


def test_response_parameters() -> None:
    given: dict[str, bool | int | str] = {"a": 1, "b": True}
    response = pb_utils.InferenceResponse([], parameters=given)
    given["a"] = 2
    assert response.parameters() == '{"a": 1, "b": true}'
    with pytest.raises(pb_utils.TritonModelException, match="found type <class 'list'>"):
        pb_utils.InferenceResponse([], parameters={"a": []})  # type: ignore[dict-item]  # that is the point


def test_codes_have_tritons_numbers() -> None:
    names = [
        "UNKNOWN",
        "INTERNAL",
        "NOT_FOUND",
        "INVALID_ARG",
        "UNAVAILABLE",
        "UNSUPPORTED",
        "ALREADY_EXISTS",
        "CANCELLED",
    ]
    assert [getattr(pb_utils.TritonError, name) for name in names] == list(range(8))
    assert [getattr(pb_utils.TritonError, name).name for name in names] == names


def test_an_error_is_not_an_exception() -> None:
    assert not isinstance(pb_utils.TritonError("x"), BaseException)
    assert issubclass(pb_utils.TritonModelException, Exception)


def test_memory_types() -> None:
    assert (pb_utils.TRITONSERVER_MEMORY_GPU, pb_utils.TRITONSERVER_MEMORY_CPU) == (0, 1)
    named = pb_utils.MemoryType.TRITONSERVER_MEMORY_GPU, pb_utils.MemoryType.TRITONSERVER_MEMORY_CPU
    assert named == (pb_utils.TRITONSERVER_MEMORY_GPU, pb_utils.TRITONSERVER_MEMORY_CPU)
    made = pb_utils.PreferredMemory(preferred_memory_type=pb_utils.TRITONSERVER_MEMORY_GPU, preferred_device_id=1)
    assert (made.memory_type.name, made.device_id) == ("TRITONSERVER_MEMORY_GPU", 1)
    with pytest.raises(TypeError, match=r"Invoked with: 1$"):
        pb_utils.PreferredMemory(1)  # type: ignore[arg-type]  # that is the point


def test_release_flags_that_change_nothing() -> None:
    request().set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
    request().set_release_flags(flags=pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)


def test_only_requests_of_execute_have_a_sender() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="only available for requests passed to execute"):
        request().get_response_sender()


OF_THE_SERVER: dict[str, Callable[[], object]] = {
    "exec": lambda: request().exec(),
    "exec decoupled": lambda: request().exec(decoupled=True),
    "load": lambda: pb_utils.load_model(model_name="m", config="", files=None),
    "unload": lambda: pb_utils.unload_model(model_name="m", unload_dependents=True),
    "is ready": lambda: pb_utils.is_model_ready(model_name="m", model_version="1"),
}


@pytest.mark.parametrize("what", OF_THE_SERVER)
def test_without_a_server_there_is_nobody_to_ask(what: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="only from a worker: leave EXECUTION_MODE in_process out"):
        OF_THE_SERVER[what]()


def test_await_async_exec_says_so_too() -> None:
    async def call() -> None:
        await request().async_exec()

    with pytest.raises(pb_utils.TritonModelException, match="only from a worker"):
        asyncio.run(call())


def test_async_exec_needs_a_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        request().async_exec()


@pytest.mark.parametrize("method", ["exec", "async_exec"])
def test_decoupled_is_a_boolean(method: str) -> None:
    with pytest.raises(
        TypeError, match=rf"{method}\(\): incompatible function arguments[\s\S]*decoupled='yes'"
    ) as raised:
        getattr(request(), method)(decoupled="yes")
    assert "decoupled: bool = False" in str(raised.value)


def test_arguments_of_load_model_are_checked() -> None:
    with pytest.raises(TypeError, match=r"load_model\(\): incompatible function arguments"):
        pb_utils.load_model(5)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(TypeError, match="Object of type 'str' is not an instance of 'bytes'"):
        pb_utils.load_model("m", files={"file:1/model.py": "text"})  # type: ignore[dict-item]  # that is the point
