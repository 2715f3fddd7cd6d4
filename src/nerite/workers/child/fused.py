"""Fused steps, seen from the worker: runs successive steps of an ensemble without a round trip to the server.

It goes as far as it can. If the next model is busy with another batch, no longer loaded, or would refuse the request,
the server gets the response of the last step and continues from there, as it does without fused steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nerite.core import headers
from nerite.core.byte_budget import ENSEMBLES, Memo
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.instances import instance
from nerite.scheduling import fused_steps
from nerite.scheduling.fused_steps import StepQuestion
from nerite.workers.child.hosted_model import HostedModel, WorkerBatch, WorkerRequest
from nerite.workers.ipc.messages import FusedBatch, FusedRun

_answered: Final = threading.Condition()


class FusedFollower(WorkerRequest):
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


class FusedHop:
    """Transition from one step to the next, and the instance that serves the next."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        """``value``: see the FUSED_STEPS message."""
        self.link = fused_steps.link_from_json(value["link"])
        self.seat: int = value["seat"]
        self.version: str = value["version"]
        self._most: int = value["most"]
        """Maximum number of rows in an execution; 0: each request runs alone."""
        self._questions: Memo[tuple[RequestHeader, ResponseHeader], StepQuestion | None] = Memo()

    def question(self, first: RequestHeader, before: ResponseHeader) -> StepQuestion | None:
        """Return the request of the next step, as the link makes it. Repeated ones are interned."""
        key = first, before
        question = self._questions.get(key, ...)
        if question is ...:
            question = self.link.question(first, before)
            size = headers.request_header_bytes(first) + headers.response_header_bytes(before)
            if question is not None:
                size += headers.request_header_bytes(question.header)
            ENSEMBLES.put(self._questions, key, question, size)
        return question

    def portions(self, asked: Mapping[int, InferenceRequest]) -> Iterator[list[int]]:
        """Yield the indices of requests that may run together."""
        portion: list[int] = []
        rows = 0
        key: object = None
        for index, request in asked.items():
            header = request.header
            rows += header.batch_size
            if portion and (rows > self._most or header.batch_key != key):
                yield portion
                portion, rows = [], header.batch_size
            portion.append(index)
            key = header.batch_key
        if portion:
            yield portion


class FusedSteps:
    """The steps that may follow a batch in this worker."""

    def __init__(self, hops: Sequence[Mapping[str, Any]]) -> None:
        self._hops = [FusedHop(each) for each in hops]

    def follow(
        self,
        batch: WorkerBatch,
        responses: list[InferenceResponse | None],
        own: HostedModel,
        hosted_models: Mapping[int, HostedModel],
    ) -> FusedBatch:
        """Run steps on the responses to ``batch``, replacing them; return the step that each request reached.

        ``own`` is the instance that returned the responses, which the caller holds.
        """
        fused = FusedBatch([], [0] * len(responses))
        first = list(batch.requests)
        going: Sequence[int] = range(len(responses))
        for number, hop in enumerate(self._hops, 1):
            hosted = hosted_models.get(hop.seat)
            if hosted is None or (hosted is not own and not hosted.try_acquire()):
                break
            try:
                asked = _requests_of(hop, batch, first, responses, going)
                for portion in hop.portions(asked):
                    _run(number, hop, hosted, batch, portion, responses, fused)
            finally:
                if hosted is not own:
                    hosted.release()
            going = tuple(asked)
            if not going:
                break
        return fused


def _requests_of(
    hop: FusedHop,
    batch: WorkerBatch,
    first: Sequence[InferenceRequest],
    responses: Sequence[InferenceResponse | None],
    going: Sequence[int],
) -> dict[int, InferenceRequest]:
    """Return the requests of a step, by their index in the batch."""
    now = time.monotonic_ns()
    asked: dict[int, InferenceRequest] = {}
    for index in going:
        response = responses[index]
        if response is None or response.header is None or batch.requests[index].cancelled:
            continue
        had = first[index]
        question = hop.question(had.header, response.header)
        if question is None:
            continue
        # Read-only, because the previous model may keep its outputs.
        data = [
            memoryview(response.data[at]).toreadonly() if before else had.data[at] for before, at in question.places
        ]
        asked[index] = batch.requests[index] = FusedFollower(question.header, data, batch, now, had.id)
    return asked


def _run(
    number: int,
    hop: FusedHop,
    hosted: HostedModel,
    batch: WorkerBatch,
    portion: list[int],
    responses: list[InferenceResponse | None],
    fused: FusedBatch,
) -> None:
    """Execute a step, and replace the responses of the previous one by its responses."""
    assert hosted.instance is not None
    requests = [batch.requests[index] for index in portion]
    timings = ExecutionTimes()
    answers = instance.run_model(hosted.instance, hosted.name, requests, timings)
    fused.runs.append(FusedRun(number, timings, sum(request.header.batch_size for request in requests), portion))
    for index, request, answer in zip(portion, requests, answers, strict=True):
        if answer is None:
            assert isinstance(request, FusedFollower)
            answer = request.awaited()
        if answer.error is not None:
            answer = InferenceResponse.failed(hop.link.explained(answer.error, request.header, hop.version))
        responses[index] = EMPTY if answer.empty else answer
        fused.reached[index] = number
