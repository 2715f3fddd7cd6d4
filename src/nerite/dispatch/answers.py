"""What instances answer, on its way to those who asked: passed on, as a batch or one by one, in order, and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from nerite.core.errors import NeriteError
from nerite.core.execution_observer import ExecutionObserver, ExecutionTimes
from nerite.core.failures import report
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.instances.instance import Batch
from nerite.observability.statistics import RequestOutcome, ResponseProgress, VersionStatistics
from nerite.scheduling.request_queue import ResponseOrder

_now = time.monotonic_ns


class ResponseDispatcher:
    """Those of one model version. For the loop's thread only."""

    __slots__ = ("_on_pause", "_order", "_progress", "_statistics", "_turns", "entered", "open")

    def __init__(
        self,
        statistics: VersionStatistics,
        on_pause: Callable[[InferenceRequest, bool], None],
        *,
        preserve_ordering: bool,
    ) -> None:
        """``on_pause`` is told who has enough responses for now, or wants more again."""
        self._statistics = statistics
        self._on_pause = on_pause
        self.entered = 0
        """How many requests were let wait and have not come to their end. An audit counts them again."""
        self.open: set[InferenceRequest] = set()
        """Requests that ran, and get their responses one by one."""
        self._progress: dict[InferenceRequest, ResponseProgress] = {}
        """Requests that had such a response, until their batch has run and they had the last."""
        self._order: ResponseOrder[tuple[InferenceRequest, InferenceResponse]] | None = (
            ResponseOrder() if preserve_ordering else None
        )
        self._turns: dict[InferenceRequest, int] = {}
        """The places of requests in the order in which they leave."""

    @property
    def settled(self) -> bool:
        """Whether nothing is kept for any request."""
        return not (self.open or self._progress or self._turns)

    def begin(self, batch: Batch) -> None:
        """Take note that a batch runs: its answers leave in the order in which that began."""
        if self._order is not None:
            for request in batch:
                if request not in self._turns:  # one that runs once more has its turn
                    self._turns[request] = self._order.begin()

    def returned(
        self,
        batch: Batch,
        responses: Sequence[InferenceResponse | None],
        timings: ExecutionTimes | None,
        apart: Sequence[InferenceRequest],
    ) -> None:
        """Pass on what a batch returned. ``apart`` are requests that ran with it, and are not done."""
        answered = batch
        if self._progress or None in responses:
            answered, later = self._sorted(batch, responses)
            apart = [*apart, *later]
            self.entered -= sum(request not in self.open for request in batch)
        else:
            self.entered -= len(batch)
        if self._order is None:
            for request, response in zip(batch, responses, strict=True):
                if response is not None:
                    request.respond(response)
        else:
            for request, response in zip(batch, responses, strict=True):
                if response is not None:
                    self._respond(request, response)
        now = timings.ended_ns if timings is not None and timings.followed else _now()
        try:
            self._statistics.executed(answered, timings, now, apart)
        except Exception as error:
            report("dispatcher", error, "while a batch was counted")

    def part(
        self, request: InferenceRequest, response: InferenceResponse, final: bool, timings: ExecutionTimes | None
    ) -> None:
        """Pass on one of several responses to a request. Only last ones keep an order."""
        progress = self._progress.get(request)
        if timings is not None:
            if progress is None:
                progress = self._progress[request] = ResponseProgress(timings, request.queued_ns)
            self._statistics.responded(request, response, progress, timings)
        if not final:
            request.on_pause = self._on_pause
            request.respond(response, False)
            return
        self._statistics.ended(request, response, progress, timings, _now())
        if request in self.open:
            self.open.remove(request)
            self.entered -= 1
            self._progress.pop(request, None)
        elif progress is not None:
            progress.over = True
        self._respond(request, response)

    def refuse(self, request: InferenceRequest, error: NeriteError, outcome: RequestOutcome) -> None:
        """Answer a request that waited with an error. It may have run before, and was to run once more."""
        self._statistics.failed(outcome, request.arrived_ns)
        self._progress.pop(request, None)
        self.entered -= 1
        response = InferenceResponse.failed(error)
        if request in self._turns:
            self._respond(request, response)
        else:
            request.respond(response)

    def _sorted(self, batch: Batch, responses: Sequence[InferenceResponse | None]) -> tuple[Batch, Batch]:
        """Return the requests that a batch has answered by what it returned, and those that get their responses apart.

        Of these, the ones without their last response stay open.
        """
        answered: Batch = []
        apart: Batch = []
        for request, response in zip(batch, responses, strict=True):
            progress = self._progress.get(request)
            over = progress is not None and progress.over
            if response is None and not over:
                self.open.add(request)
            else:
                self._progress.pop(request, None)
            (apart if response is None or over else answered).append(request)
        return answered, apart

    def _respond(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """Pass on the last response to a request, when its turn has come; none to one that had it."""
        if self._order is None:
            request.respond(response)
        elif request in self._turns:
            for earlier, answer in self._order.finish(self._turns.pop(request), (request, response)):
                earlier.respond(answer)


# Tells the sinks that are a ``ExecutionObserver`` how their requests ran. What one raises does not concern the
# others.


def tell_of_batch(batch: Batch, responses: Sequence[InferenceResponse | None], timings: ExecutionTimes | None) -> None:
    """Tell of an execution. Never raises."""
    if timings is not None:
        timings.requests = len(batch)
    for request, response in zip(batch, responses, strict=True):
        if isinstance(request.sink, ExecutionObserver):
            again = response is not None and response.again
            try:
                (request.sink.turned if again else request.sink.ran)(request, timings)
            except Exception as error:
                report("dispatcher", error, "while a trace was written", request.id)


def tell_of_response(request: InferenceRequest, timings: ExecutionTimes | None) -> None:
    """Tell of one of several responses. Never raises."""
    if isinstance(request.sink, ExecutionObserver):
        try:
            request.sink.parted(request, timings)
        except Exception as error:
            report("dispatcher", error, "while a trace was written", request.id)
