"""Every parameter of every function: which types it takes, what it makes of them, and which it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from binding_arguments import OF_OUR_OWN, PROBES, UNASKED
from conformance.repositories import repository, write
from nerite.testing import ModelUnderTest, load_model

ALL = {**PROBES, **OF_OUR_OWN, **UNASKED}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelUnderTest]:
    directory = tmp_path_factory.mktemp("models") / "lab"
    write(repository("calls")["lab"], directory)

    def echo(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"OUT": inputs["IN"]}

    with load_model(directory, calls={"echo": echo, "late": echo}) as model:
        yield model


def said(lab: ModelUnderTest, program: str) -> list[str]:
    """Have the model do something; return what it said."""
    answer = lab.infer({"PROGRAM": np.array([program.encode()], object)})
    text: str = answer["SAID"][0].decode()
    return text.splitlines()


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", ALL)
def test_types(lab: ModelUnderTest, name: str) -> None:
    assert said(lab, ALL[name].program) == ALL[name].expected


REASONS = {
    "asking(model_name=b'a\\xff')": "model_name is not valid UTF-8 at byte 1.",
    "asking(request_id='a\\ud800')": "request_id is not valid UTF-8 at character 1.",
    "asking(flags=-1)": "flags must be an integer from 0 to 4294967295.",
    "pb_utils.Tensor(b'\\xff', np.zeros(1))": "The name of a tensor is not valid UTF-8 at byte 0.",
}


@pytest.mark.parametrize("call", REASONS)
def test_a_value_that_cannot_be_is_explained(call: str) -> None:
    """A type that cannot be shows in the signature, a value of the right type does not."""
    known = {"pb_utils": pb_utils, "np": np, "asking": asking}
    with pytest.raises(TypeError) as error:
        eval(call, known)
    assert "incompatible constructor arguments" in str(error.value)
    assert str(error.value).endswith(f"\n\n{REASONS[call]}")


def asking(**more: Any) -> pb_utils.InferenceRequest:
    tensor = pb_utils.Tensor("IN", np.zeros(1))
    return pb_utils.InferenceRequest(**{"model_name": "m", "requested_output_names": ["o"], "inputs": [tensor], **more})


def test_what_was_given_is_shown_without_defaults() -> None:
    with pytest.raises(
        TypeError, match=r"Invoked with: kwargs: inputs=\[\], requested_output_names=5, model_name='m'$"
    ):
        asking(inputs=[], requested_output_names=5)


UNSENDABLE = {
    "parameters={'a': 2**63}": "Unsupported value type on parameters\nParameter 'a' is an integer beyond 64 bits. Pa",
    "parameters={'a': -2**63 - 1}": "Unsupported value type on parameters\nParameter 'a' is an integer beyond 64 bits.",
    "parameters={'a': '\\ud800'}": "Unsupported value type on parameters\nParameter 'a' is not valid UTF-8 at charact",
    "parameters={'\\ud800': 1}": "Unsupported value type on parameters\nThe name of a parameter is not valid UTF-8 at",
    "correlation_id='x' * 129": "string correlation ID cannot be longer than 128 characters",
    "correlation_id='\\u00e9' * 65": "string correlation ID cannot be longer than 128 characters",
    "request_id='x' * 1025": "request_id is 1025 characters long, more than the 1024 that are allowed",
    "requested_output_names=['x' * 1025]": "the name of a requested output is 1025 characters long, more than the 10",
    "inputs=[pb_utils.Tensor('x' * 1025, np.zeros(1))]": "the name of an input is 1025 characters long, more than",
}


@pytest.mark.parametrize("way", ["{}.exec()", "next({}.exec(decoupled=True))", "asyncio.run(awaited({}))"])
@pytest.mark.parametrize("fields", UNSENDABLE)
def test_a_call_that_cannot_be_sent_is_answered_with_an_error(lab: ModelUnderTest, fields: str, way: str) -> None:
    program = f"""
import asyncio
async def awaited(request):
    return await request.async_exec()
T = pb_utils.Tensor("IN", np.zeros(1, np.float32))
def asking(**more):
    return pb_utils.InferenceRequest(
        **{{"model_name": "echo", "requested_output_names": ["OUT"], "inputs": [T], **more}}
    )
for _ in range(2):
    tell({way.format(f"asking({fields})")})
tell({way.format("asking()")})
"""
    lines = "\n".join(said(lab, program)).split("error: ")
    expected = f"Model echo - Error when running inference: {UNSENDABLE[fields]}"
    assert [line.startswith(expected) for line in lines] == [False, True, True]
    assert lines[-1].endswith("\n[('OUT', [0.0])]")
