"""Fused steps: successive steps of an ensemble that a worker runs without a round trip to the server.

The server sends each chain of steps once, as JSON (``chain_to_json``), and with a batch the number of its chain. The
worker goes as far as it can: if the next model is busy with another batch, no longer loaded, or would refuse the
request, the server gets the response of the last step and continues from there, as it does without fused steps. Which
request follows from a response is decided in both places by ``EnsembleProgress``.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nerite.core import headers
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ENSEMBLES, Memo
from nerite.core.errors import InvalidArgument
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import TensorData, read_only
from nerite.instances import instance
from nerite.scheduling.ensemble import (
    EnsembleProgress,
    EnsembleProgressCache,
    GraphStep,
    StepPlan,
    StepStart,
    StepTensor,
    explain_step_failure,
)
from nerite.workers.child.hosted_model import HostedModel, WorkerBatch, WorkerRequest
from nerite.workers.ipc import messages


class FusedStep(NamedTuple):
    """Step that follows another one in a worker."""

    step: GraphStep
    seat: int
    """Seat of the instance that runs it."""
    version: str
    """Version of the model."""
    max_rows: int
    """Maximum number of rows in an execution; 0: each request runs alone."""


class FusedRun(NamedTuple):
    """One execution of a fused step."""

    number: int
    """Index of the step in its chain, from 1: 0 is the step that was given the batch."""
    rows: int
    timings: ExecutionTimes
    requests: Sequence[int]
    """Indices of the requests in the batch."""


def chain_to_json(ensemble: str, first: GraphStep, followers: Sequence[FusedStep]) -> dict[str, Any]:
    """Return a chain of steps of an ensemble as JSON."""
    return {
        "ensemble": ensemble,
        "first": _step_to_json(first),
        "followers": [[_step_to_json(step), *rest] for step, *rest in followers],
    }


def _step_to_json(step: GraphStep) -> dict[str, Any]:
    model = step.signature
    return {
        **step._asdict(),
        "signature": [
            model.model_name,
            model.max_batch_size,
            [(each.name, each.datatype.name, each.dims, each.optional, each.ragged) for each in model.inputs.values()],
            [(each.name, each.datatype.name, each.dims) for each in model.outputs.values()],
        ],
    }


def _step_from_json(value: dict[str, Any]) -> GraphStep:
    model, max_batch_size, inputs, outputs = value["signature"]
    signature = Signature(
        model,
        max_batch_size,
        [SignatureInput(name, dtypes.BY_NAME[datatype], tuple(dims), *rest) for name, datatype, dims, *rest in inputs],
        [SignatureOutput(name, dtypes.BY_NAME[datatype], tuple(dims)) for name, datatype, dims in outputs],
    )
    tensors = {each: tuple((name, tensor) for name, tensor in value[each]) for each in ("inputs", "outputs")}
    return GraphStep(**{**value, **tensors, "signature": signature})


_RUN: Final = struct.Struct("<QQQ")


def runs_to_bytes(runs: Iterable[FusedRun]) -> bytes:
    """Return what follows the records of a RESULT message: executions of fused steps, in order."""
    parts: list[bytes] = []
    for number, rows, timings, requests in runs:
        count = len(requests)
        parts += (_RUN.pack(number, rows, count), messages.packed_times(timings), struct.pack(f"<{count}Q", *requests))
    return b"".join(parts)


def runs_from_bytes(data: memoryview) -> Iterator[FusedRun]:
    """Yield the executions that ``runs_to_bytes`` encoded."""
    at = 0
    while at < len(data):
        number, rows, count = _RUN.unpack_from(data, at)
        timings, at = messages.read_timings(data, at + _RUN.size)
        yield FusedRun(number, rows, timings, struct.unpack_from(f"<{count}Q", data, at))
        at += 8 * count


class FusedChain:
    """A step, and the steps that may follow it in this worker."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        """``value``: see ``chain_to_json``."""
        self.ensemble: str = value["ensemble"]
        self.followers = [FusedStep(_step_from_json(step), *rest) for step, *rest in value["followers"]]
        self._first = _step_from_json(value["first"])
        self._plan = StepPlan(self._first.signature, "", [self._first, *(each.step for each in self.followers)])
        self._progress: Memo[tuple[RequestHeader, ResponseHeader], EnsembleProgress] = Memo()

    def begin(self, request: RequestHeader, response: ResponseHeader) -> EnsembleProgress:
        """Return the progress after a response of the first step. Repeated ones are interned.

        Raises ``InvalidArgument`` if the model of the next step would refuse its request.
        """
        key = request, response
        progress = self._progress.get(key)
        if progress is None:
            progress = _BoundProgressCache(self._plan, request).resume(self._first, response)
            ENSEMBLES.put(self._progress, key, progress, progress.footprint + headers.response_header_bytes(response))
        return progress


class _BoundProgressCache(EnsembleProgressCache):
    """Progress whose requests are validated by the signatures of their models, as the server does it."""

    def start(self, step: GraphStep, tensors: Mapping[str, StepTensor | None]) -> StepStart:
        """Return the request of a step. Raises ``InvalidArgument``."""
        start = super().start(step, tensors)
        step.signature.bind(start.header)
        return start


class _ChainProgress:
    """One request on its way through a chain."""

    __slots__ = ("_chain", "_data", "_progress", "_reached", "_request")

    def __init__(self, chain: FusedChain, request: InferenceRequest) -> None:
        self._chain = chain
        self._request = request.header
        self._data = [request.data]
        """Tensor data by message: the first request, then the responses."""
        self._progress: EnsembleProgress | None = None
        self._reached: GraphStep | None = None

    def after(self, response: InferenceResponse) -> StepStart | None:
        """Return the next step, after a response with outputs; None if it would be refused."""
        header = response.header
        assert header is not None
        try:
            if self._progress is None or self._reached is None:
                self._progress = self._chain.begin(self._request, header)
            else:
                self._progress = self._progress.after(self._reached, header)
        except InvalidArgument:
            return None
        self._data.append(response.data)
        start = next(iter(self._progress.starts), None)
        self._reached = None if start is None else start.step
        return start

    def inputs(self, start: StepStart) -> list[TensorData]:
        """Return the data of a request. Outputs are read-only, because the model that made them may keep them."""
        found = ((whose, self._data[whose][which]) for whose, which in start.places)
        return [read_only(each) if whose else each for whose, each in found]


class FusedSteps:
    """The chains of steps that this worker knows."""

    def __init__(self, hosted_models: Mapping[int, HostedModel]) -> None:
        """``hosted_models`` are the instances of the worker, by seat."""
        self._hosted_models = hosted_models
        self._chains: dict[int, FusedChain] = {}

    def add(self, number: int, chain: Mapping[str, Any]) -> None:
        """Store a chain, which later batches refer to by its number."""
        self._chains[number] = FusedChain(chain)

    def run(
        self, number: int, batch: WorkerBatch, responses: list[InferenceResponse | None], own: HostedModel
    ) -> list[FusedRun]:
        """Run the steps of chain ``number`` on the responses to ``batch``, which are replaced; return the executions.

        ``own`` is the instance that returned the responses, which the caller holds.
        """
        chain = self._chains[number]
        runs: list[FusedRun] = []
        going = {index: _ChainProgress(chain, request) for index, request in enumerate(batch.requests)}
        for at, follower in enumerate(chain.followers, 1):
            hosted = self._hosted_models.get(follower.seat)
            if hosted is None or (hosted is not own and not hosted.try_acquire()):
                break
            try:
                asked = _requests_of(batch, responses, going)
                for portion in _portions(asked, follower.max_rows):
                    timings = _execute(chain.ensemble, follower, hosted, portion, responses)
                    rows = sum(request.header.batch_size for request in portion.values())
                    runs.append(FusedRun(at, rows, timings, tuple(portion)))
            finally:
                if hosted is not own:
                    hosted.release()
            going = {index: going[index] for index in asked}
            if not going:
                break
        return runs


def _requests_of(
    batch: WorkerBatch, responses: Sequence[InferenceResponse | None], going: Mapping[int, _ChainProgress]
) -> dict[int, FusedRequest]:
    """Return the requests of the next step, by their index in the batch, which they take the place of."""
    now = time.monotonic_ns()
    asked: dict[int, FusedRequest] = {}
    for index, progress in going.items():
        before, response = batch.requests[index], responses[index]
        if response is None or response.header is None or before.cancelled:
            continue
        start = progress.after(response)
        if start is not None:
            request = FusedRequest(start.header, progress.inputs(start), batch, now, before.id)
            asked[index] = batch.requests[index] = request
    return asked


def _portions(asked: Mapping[int, FusedRequest], max_rows: int) -> Iterator[dict[int, FusedRequest]]:
    """Yield the requests that may run together."""
    portion: dict[int, FusedRequest] = {}
    rows = 0
    key: object = None
    for index, request in asked.items():
        header = request.header
        rows += header.batch_size
        if portion and (rows > max_rows or header.batch_key != key):
            yield portion
            portion, rows = {}, header.batch_size
        portion[index] = request
        key = header.batch_key
    if portion:
        yield portion


def _execute(
    ensemble: str,
    follower: FusedStep,
    hosted: HostedModel,
    portion: Mapping[int, FusedRequest],
    responses: list[InferenceResponse | None],
) -> ExecutionTimes:
    """Execute a step, and replace the responses of the previous one by its responses."""
    assert hosted.instance is not None
    timings = ExecutionTimes()
    answers = instance.run_model(hosted.instance, hosted.name, [*portion.values()], timings)
    step = follower.step
    for (index, request), answer in zip(portion.items(), answers, strict=True):
        response = request.awaited() if answer is None else answer
        if response.error is not None:
            error = explain_step_failure(
                response.error, ensemble, step.number, step.model, follower.version, request.header
            )
            response = InferenceResponse.failed(error)
        responses[index] = EMPTY if response.empty else response
    return timings


_answered: Final = threading.Condition()


class FusedRequest(WorkerRequest):
    """Request to the model of a fused step. It has one response, which stays in the worker."""

    __slots__ = ("_answer",)

    _answer: InferenceResponse

    def respond(self, response: InferenceResponse, final: bool = True) -> None:
        """Keep the response of a model that sends it instead of returning it. Thread-safe."""
        with _answered:
            if self.finished:
                return
            if not response.empty or not hasattr(self, "_answer"):
                self._answer = response
            self.finished = final
            _answered.notify_all()

    def awaited(self) -> InferenceResponse:
        """Wait until the model has sent the response, and return it."""
        with _answered:
            _answered.wait_for(lambda: self.finished)
        return self._answer
