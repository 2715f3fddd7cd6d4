"""Models that want a request once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nerite.backends.interface import ExecutionTimes
from nerite.backends.python.instance import PythonInstance
from nerite.core.errors import Internal
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from python_model_cases import executing
from python_model_files import execute, failure, instance_of, model_on_disk, request

STATE = {"input_name": "BEFORE", "output_name": "AFTER", "data_type": "TYPE_FP32", "dims": [1]}
ITERATIVE = {"iterative_sequence": True, "state": [STATE]}
RESCHEDULE = "pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"
AGAIN = f"request.set_release_flags({RESCHEDULE})"


def iterating(folder: Path, *lines: str, batching: Any = ITERATIVE, **config: Any) -> PythonInstance:
    """A model that does ``lines`` with each request, and returns ``responses``."""
    source = executing(
        "def answer(*names):",
        "    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.ones(1, np.float32)) for name in names])",
        "responses = []",
        "for request in requests:",
        *(f"    {line}" for line in lines),
        "return responses",
    )
    return instance_of(model_on_disk(folder, source, sequence_batching=batching, **config))


def outputs(response: InferenceResponse | None) -> list[str]:
    assert response is not None
    return [] if response.header is None else [spec.name for spec in response.header.outputs]


def test_some_of_a_batch_run_again(tmp_path: Path) -> None:
    instance = iterating(
        tmp_path,
        "if request.request_id() == 'more':",
        f"    {AGAIN}",
        "    responses.append(None)",
        "else:",
        "    responses.append(answer('OUTPUT0', 'AFTER'))",
    )
    for _ in range(2):
        over, more, last = execute(instance, request(id="over"), request(id="more"), request(id="over"))
        assert [each.again for each in (over, more, last)] == [False, True, False]
        assert outputs(over) == ["OUTPUT0", "AFTER"]
        assert more.empty


def test_states_go_with_it(tmp_path: Path) -> None:
    instance = iterating(tmp_path, AGAIN, "responses.append(answer('AFTER'))")
    (response,) = execute(instance)
    assert response.again
    assert outputs(response) == ["AFTER"]


@pytest.mark.parametrize(
    ("flags", "again"),
    [(RESCHEDULE, True), ("3", True), ("7", True), ("pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL", False)],
)
def test_the_last_word_counts(tmp_path: Path, flags: str, again: bool) -> None:
    instance = iterating(
        tmp_path, AGAIN, f"request.set_release_flags({flags})", f"responses.append({'None' if again else 'answer()'})"
    )
    (response,) = execute(instance)
    assert response.again == again


EXPECTED = (
    "Failed to process the request(s) for model 'm_0', message: Expected a None object in the execute function return "
    "list for reschduled request, found type '<class 'c_python_backend_utils.InferenceResponse'>'. A "
    "response is allowed if it has no outputs but states of the sequence."
)


@pytest.mark.parametrize(
    "response",
    ["answer('OUTPUT0')", "answer('AFTER', 'OUTPUT0')", "pb_utils.InferenceResponse(error=pb_utils.TritonError('no'))"],
)
def test_an_answer_as_well_is_a_mistake(tmp_path: Path, response: str) -> None:
    instance = iterating(tmp_path, AGAIN, f"responses.append({response})")
    assert failure(instance) == EXPECTED


def test_a_batch_that_fails_runs_no_more(tmp_path: Path) -> None:
    instance = iterating(
        tmp_path,
        "if request.request_id() == 'bad':",
        f"    {AGAIN}",
        "    1 / 0",
        "responses.append(answer('OUTPUT0'))",
    )
    with pytest.raises(Internal, match="division by zero"):
        execute(instance, request(id="bad"))
    assert not execute(instance)[0].again


@pytest.mark.parametrize("decoupled", [False, True])
def test_without_iterative_sequences_it_is_refused(tmp_path: Path, decoupled: bool) -> None:
    source = executing(f"requests[0].set_release_flags({RESCHEDULE})", "return None" if decoupled else "return [None]")
    context = model_on_disk(tmp_path, source, model_transaction_policy={"decoupled": decoupled})
    (response,) = execute(instance_of(context))
    assert response.error is not None
    assert response.error.message == (
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
        "such a flag. Add to its configuration: sequence_batching { iterative_sequence: true }"
    )


class Caller:
    def __init__(self) -> None:
        self.came: list[tuple[list[str], bool]] = []

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        self.came.append((outputs(response), final))


class StreamingRequest(InferenceRequest):
    streams = True


def streaming() -> tuple[InferenceRequest, Caller]:
    plain, caller = request(), Caller()
    return StreamingRequest(plain.header, plain.data, caller, 0), caller


SEND = "requests[0].get_response_sender().send(pb_utils.InferenceResponse([pb_utils.Tensor('OUTPUT0', np.ones(1))])"
WORD = f"requests[0].set_release_flags({RESCHEDULE})"


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_response_each_time(tmp_path: Path, coroutine: bool) -> None:
    source = executing(f"{SEND})", WORD)
    if coroutine:
        source = source.replace("def execute", "async def execute")
    context = model_on_disk(tmp_path, source, sequence_batching=ITERATIVE, model_transaction_policy={"decoupled": True})
    asked, caller = streaming()
    (response,) = instance_of(context).execute([asked], ExecutionTimes())
    assert response is not None
    assert response.again
    assert caller.came == [(["OUTPUT0"], False)]


@pytest.mark.parametrize("decoupled", [False, True])
def test_after_the_last_response_there_is_no_again(tmp_path: Path, decoupled: bool) -> None:
    source = executing(f"{SEND}, 1)", WORD, "return None" if decoupled else "return [None]")
    context = model_on_disk(
        tmp_path, source, sequence_batching=ITERATIVE, model_transaction_policy={"decoupled": decoupled}
    )
    asked, caller = streaming()
    assert list(instance_of(context).execute([asked], ExecutionTimes())) == [None]
    assert caller.came == [(["OUTPUT0"], True)]
