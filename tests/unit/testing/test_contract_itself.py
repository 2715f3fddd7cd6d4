"""The tests that every backend has to pass fail for backends that do not keep the contract."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
from numpy.typing import ArrayLike

from nerite.backends.interface import ExecutionTimes, Instance, InstanceContext, ModelContext
from nerite.core.errors import InvalidArgument
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import from_array, to_array
from nerite.testing import Answer, BackendContract

TENSORS = {
    "max_batch_size": 4,
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [
        {"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "Z", "data_type": "TYPE_FP32", "dims": [-1]},
    ],
}


class Right:
    """Y is X, and Z twice that. It is all that a backend is made of; a wrong one is this, but for one method."""

    name = "right"
    isolated = False

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        return {**context.config, **TENSORS}

    def open(self, context: ModelContext) -> Right:
        if not (context.version_directory / "x").read_text():
            raise InvalidArgument("the file is empty")
        return self

    def instance(self, context: InstanceContext) -> Instance:
        return self

    def execute(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Sequence[InferenceResponse | None]:
        return [self.answer(request) for request in requests]

    def answer(self, request: InferenceRequest) -> InferenceResponse:
        x = to_array(request.header.inputs[0], request.data[0])
        if x.size and x.flat[0] < 0:
            return InferenceResponse.failed(InvalidArgument("no negative numbers"))
        outputs = [from_array(name, value) for name, value in self.outputs(x).items() if self.wants(request, name)]
        return InferenceResponse(ResponseHeader("m", "1", [spec for spec, _ in outputs]), [data for _, data in outputs])

    def outputs(self, x: Any) -> dict[str, Any]:
        return {"Y": x, "Z": x * 2}

    def wants(self, request: InferenceRequest, name: str) -> bool:
        return not request.header.wanted or name in request.header.wanted

    def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Contract(BackendContract):
    loads = 10
    most_growth = 64 << 20

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def write_model(self, directory: Path) -> None:
        (directory / "1").mkdir(parents=True)
        (directory / "1" / "x").write_text("x")
        (directory / "config.pbtxt").write_text('backend: "right"')

    def requests(self) -> Sequence[Mapping[str, ArrayLike]]:
        return [{"X": np.full((1, 3), number, np.float32)} for number in (1, 2, 3)]

    def answer(self, inputs: Answer) -> Mapping[str, ArrayLike]:
        return {"Y": inputs["X"], "Z": inputs["X"] * 2}

    def bad_request(self) -> Mapping[str, ArrayLike]:
        return {"X": np.full((1, 3), -1, np.float32)}

    def break_model(self, directory: Path) -> None:
        (directory / "1" / "x").write_text("")


TESTS = [name for name in dir(BackendContract) if name.startswith("test_")]


def run(contract: BackendContract, test: str, folder: Path) -> None:
    method: Callable[..., None] = getattr(contract, test)
    if test == "test_it_says_what_it_is":
        method()
    else:
        method(folder)


@pytest.mark.parametrize("test", TESTS)
def test_a_right_one_passes(test: str, tmp_path: Path) -> None:
    try:
        run(Contract(Right()), test, tmp_path)
    except SkipTest as reason:
        assert test == "test_strings_of_any_bytes", reason


class Nameless(Right):
    name = ""


class ChangesWhatItIsGiven(Right):
    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        context.config["max_batch_size"] = 4  # type: ignore[index]
        context.config["input"][:] = []
        return super().complete(context)


class NeverDone(Right):
    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        return {**super().complete(context), "max_batch_size": context.config["max_batch_size"] + 4}


class OutOfOrder(Right):
    def execute(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Sequence[InferenceResponse | None]:
        return [*reversed(super().execute(requests, timings))]


class ForgetsTheLast(Right):
    def execute(
        self, requests: Sequence[InferenceRequest], timings: ExecutionTimes
    ) -> Sequence[InferenceResponse | None]:
        return [*super().execute(requests, timings)][: max(len(requests) - 1, 1)]


class SendsEverything(Right):
    def wants(self, request: InferenceRequest, name: str) -> bool:
        return True


class OtherType(Right):
    def outputs(self, x: Any) -> dict[str, Any]:
        return {"Y": x.astype(np.float64), "Z": x * 2}


class Wrong(Right):
    def outputs(self, x: Any) -> dict[str, Any]:
        return {"Y": x, "Z": x * 3}


class WritesIntoInputs(Right):
    def outputs(self, x: Any) -> dict[str, Any]:
        y = x.copy()
        x *= 2
        return {"Y": y, "Z": x}


class UsesMemoryAgain(Right):
    def __init__(self) -> None:
        self.buffer = np.zeros((4, 3), np.float32)

    def outputs(self, x: Any) -> dict[str, Any]:
        doubled = self.buffer[: len(x), : x.shape[1]]
        np.multiply(x, 2, out=doubled)
        return {"Y": x, "Z": doubled if doubled.flags.c_contiguous else x * 2}


class OneAtATime(Right):
    """Two instances are in each other's way."""

    def __init__(self) -> None:
        self.free = threading.Lock()
        self.met = threading.Event()

    def answer(self, request: InferenceRequest) -> InferenceResponse:
        if not self.free.acquire(blocking=False):
            self.met.set()
            raise InvalidArgument("I am busy")
        try:
            if threading.current_thread() is not threading.main_thread():
                self.met.wait(20)  # until another thread has come
            return super().answer(request)
        finally:
            self.free.release()


class Loads(Right):
    """Loading two models at a time is too much for it."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2)

    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        self.both.wait(20)
        raise InvalidArgument("one at a time")


class NeverReady(Right):
    def is_ready(self) -> bool:
        return False


class Sulks(Right):
    """After one bad request it has no more right answers."""

    sulking = False

    def answer(self, request: InferenceRequest) -> InferenceResponse:
        answer = super().answer(request)
        self.sulking = self.sulking or answer.error is not None
        return InferenceResponse.failed(InvalidArgument("")) if self.sulking else answer


class NothingIsTooMuch(Right):
    """A tensor without elements makes it drop the answer."""

    def outputs(self, x: Any) -> dict[str, Any]:
        return {"Y": x, "Z": np.ones((1, 1), np.float32) if not x.size else x * 2}


class TakesAnything(Right):
    def open(self, context: ModelContext) -> Right:
        return self


class RaisesWhatTheFrameworkRaises(Right):
    def open(self, context: ModelContext) -> Right:
        assert (context.version_directory / "x").read_text()
        return self


class NeedsItsMemo(Right):
    def complete(self, context: ModelContext) -> Mapping[str, Any]:
        context.memo["x"] = 1
        return super().complete(context)

    def open(self, context: ModelContext) -> Right:
        if "x" not in context.memo:
            raise InvalidArgument("complete() was not called")
        return super().open(context)


class KeepsFiles(Right):
    def __init__(self) -> None:
        self.kept: list[int] = []

    def open(self, context: ModelContext) -> Right:
        self.kept.append(os.open(context.version_directory / "x", os.O_RDONLY))
        return super().open(context)


class KeepsMemory(Right):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def open(self, context: ModelContext) -> Right:
        self.kept.append(np.ones(4_000_000, np.float32))
        return super().open(context)


@pytest.mark.parametrize(
    ("backend", "test"),
    [
        (Nameless, "says_what_it_is"),
        (ChangesWhatItIsGiven, "completing_what_is_complete_changes_nothing"),
        (NeverDone, "completing_what_is_complete_changes_nothing"),
        (NeedsItsMemo, "another_process_may_have_completed_the_configuration"),
        (Wrong, "it_answers"),
        (OutOfOrder, "a_batch_is_answered_in_order"),
        (ForgetsTheLast, "a_batch_is_answered_in_order"),
        (SendsEverything, "what_is_not_wanted_is_left_out"),
        (OtherType, "outputs_are_as_declared"),
        (WritesIntoInputs, "inputs_may_be_read_only"),
        (UsesMemoryAgain, "answers_stay_what_they_are"),
        (OneAtATime, "instances_work_side_by_side"),
        (Loads, "models_are_loaded_side_by_side"),
        (NeverReady, "an_instance_is_ready"),
        (Sulks, "it_goes_on_after_a_bad_request"),
        (NothingIsTooMuch, "tensors_without_elements"),
        (TakesAnything, "a_broken_model_is_refused"),
        (RaisesWhatTheFrameworkRaises, "a_broken_model_is_refused"),
        (KeepsFiles, "nothing_is_left_of_models_that_came_and_went"),
        (KeepsMemory, "nothing_is_left_of_models_that_came_and_went"),
    ],
)
def test_a_wrong_one_fails(backend: type[Right], test: str, tmp_path: Path) -> None:
    (name,) = [name for name in TESTS if name.endswith(test)]
    wrong = backend()
    with pytest.raises((AssertionError, InvalidArgument)):
        run(Contract(wrong), name, tmp_path)
    for descriptor in wrong.kept if isinstance(wrong, KeepsFiles) else ():
        os.close(descriptor)
