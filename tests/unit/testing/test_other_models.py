"""Functions that stand for the models that a model under test calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from nerite.core import model_calls
from nerite.core.errors import NeriteError, Unavailable, Unsupported
from nerite.testing import Answer, ModelUnderTest, load_model

CONFIG = {
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
}


class Caller:
    """Calls the model and in the way that its test says."""

    way = "one"

    def execute(self, requests: list[Any]) -> Any:
        call = pb_utils.InferenceRequest(
            model_name="other", requested_output_names=["OUTPUT0"], inputs=requests[0].inputs()
        )
        if self.way == "async":
            return self.answer_async(call)
        if self.way == "several":
            answers = call.exec(decoupled=True)
            assert isinstance(answers, Iterator)
            numbers = [float(each.output_tensors()[0].as_numpy()[0]) for each in answers if each.output_tensors()]
            return [self.answer(np.array(numbers, np.float32))]
        return [self.passed_on(call.exec())]

    async def answer_async(self, call: pb_utils.InferenceRequest) -> list[pb_utils.InferenceResponse]:
        return [self.passed_on(await call.async_exec())]

    def passed_on(self, response: Any) -> pb_utils.InferenceResponse:
        return pb_utils.InferenceResponse(response.output_tensors(), response.error())

    def answer(self, value: Any) -> pb_utils.InferenceResponse:
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)])


def caller(way: str, other: Any) -> ModelUnderTest:
    model = load_model(Caller, CONFIG, calls={"other": other})
    model.model.way = way
    return model


def doubled(inputs: Answer) -> Answer:
    return {"OUTPUT0": inputs["INPUT0"] * 2, "MORE": inputs["INPUT0"]}


@pytest.mark.parametrize("way", ["one", "async", "several"])
def test_a_function_answers(way: str) -> None:
    with caller(way, doubled) as model:
        assert model.infer({"INPUT0": [3.0]})["OUTPUT0"].tolist() == [6.0]


def test_several_answers() -> None:
    with caller("several", lambda inputs: [{"OUTPUT0": inputs["INPUT0"] + number} for number in range(3)]) as model:
        assert model.infer({"INPUT0": [1.0]})["OUTPUT0"].tolist() == [1.0, 2.0, 3.0]


def test_several_answers_need_an_iterator() -> None:
    with caller("one", lambda inputs: [inputs]) as model, pytest.raises(Unsupported, match="Use 'decoupled=True'"):
        model.infer({"INPUT0": [1.0]})


def test_an_error_is_an_answer() -> None:
    with caller("one", lambda _: Unavailable("not now")) as model, pytest.raises(Unavailable, match="not now"):
        model.infer({"INPUT0": [1.0]})


def test_a_model_that_nothing_stands_for() -> None:
    with load_model(Caller, CONFIG) as model, pytest.raises(NeriteError, match="'other': function"):
        model.infer({"INPUT0": [1.0]})


class Loader(Caller):
    """Looks, unloads and loads."""

    def execute(self, requests: list[Any]) -> Any:
        ready = [pb_utils.is_model_ready("other")]
        pb_utils.unload_model("other")
        ready.append(pb_utils.is_model_ready("other"))
        pb_utils.load_model("other")
        ready.append(pb_utils.is_model_ready("other"))
        with pytest.raises(pb_utils.TritonModelException, match="Failed to load model: failed to load 'nobody'"):
            pb_utils.load_model("nobody")
        return [self.answer(np.array(ready, np.float32))]


def test_loading_and_unloading() -> None:
    with load_model(Loader, CONFIG, calls={"other": doubled}) as model:
        assert model.infer({"INPUT0": [1.0]})["OUTPUT0"].tolist() == [1, 0, 1]


class Early(Caller):
    """Calls too early."""

    def initialize(self, args: dict[str, str]) -> None:
        pb_utils.InferenceRequest(model_name="other", requested_output_names=[], inputs=[]).exec()


def test_calls_are_for_execute_and_nothing_is_left_behind() -> None:
    before = model_calls.current
    with pytest.raises(pb_utils.TritonModelException, match="only supported during the 'execute' function"):
        load_model(Early, CONFIG, calls={"other": doubled})
    assert model_calls.current is before
    with caller("one", doubled):
        assert model_calls.current is not before
    assert model_calls.current is before
