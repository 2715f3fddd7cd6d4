"""Passes the responses of instances on to callers: whole batches or single responses, in order, and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns

from nerite.core.errors import Cancelled, NeriteError
from nerite.core.execution_observer import ExecutionObserver, ExecutionTimes
from nerite.core.failures import report
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.instances.instance import Batch
from nerite.observability.statistics import RequestOutcome, ResponseProgress, VersionStatistics
from nerite.scheduling.request_queue import ResponseOrder


class ResponseDispatcher:
    """Passes on and counts the responses of one model version. For the loop's thread only."""

    __slots__ = ("_on_pause", "_order", "_positions", "_progress", "_statistics", "entered", "open")

    def __init__(
        self,
        statistics: VersionStatistics,
        on_pause: Callable[[InferenceRequest, bool], None],
        *,
        preserve_ordering: bool,
    ) -> None:
        """``on_pause`` is called when a caller has enough responses for now, and when it wants more again."""
        self._statistics = statistics
        self._on_pause = on_pause
        self.entered = 0
        """Number of requests that were queued and are not finished. Audits verify it."""
        self.open: set[InferenceRequest] = set()
        """Requests that were executed and get their responses one by one."""
        self._progress: dict[InferenceRequest, ResponseProgress] = {}
        """Requests with such a response, until their batch was executed and they had the last one."""
        self._order: ResponseOrder[tuple[InferenceRequest, InferenceResponse]] | None = (
            ResponseOrder() if preserve_ordering else None
        )
        self._positions: dict[InferenceRequest, int] = {}
        """Positions of requests in the order in which their responses leave."""

    @property
    def settled(self) -> bool:
        """Whether no state is kept for any request."""
        return not (self.open or self._progress or self._positions)

    def answering(self, request: InferenceRequest) -> bool:
        """Return whether a request has had a response, and gets more."""
        return request in self._progress

    def begin(self, batch: Batch) -> None:
        """Assign response order to the requests of a batch that starts."""
        if self._order is not None:
            for request in batch:
                if request not in self._positions:  # a request that runs again keeps its position
                    self._positions[request] = self._order.begin()

    def returned(
        self,
        batch: Batch,
        responses: Sequence[InferenceResponse | None],
        timings: ExecutionTimes | None,
        apart: Sequence[InferenceRequest],
    ) -> None:
        """Pass on the responses of an executed batch. ``apart`` are its requests that are not finished.

        A request to which the model responds that it was cancelled has failed for that reason; with any other error,
        the execution has succeeded.
        """
        answered = batch
        if self._progress or None in responses:
            answered, later = self._separate(batch, responses)
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
        now = timings.ended_ns if timings is not None and timings.followed else monotonic_ns()
        try:
            cancelled = _cancelled(batch, responses)
            if cancelled:
                self._statistics.cancelled(cancelled, now)
                answered = [request for request in answered if request not in cancelled]
                apart = [*apart, *cancelled]
            self._statistics.executed(answered, timings, now, apart)
        except Exception as error:
            report("dispatcher", error, "while a batch was counted")

    def part(
        self, request: InferenceRequest, response: InferenceResponse, final: bool, timings: ExecutionTimes | None
    ) -> None:
        """Pass on one of several responses to a request. Only last responses are kept in order."""
        progress = self._progress.get(request)
        if timings is not None:
            if progress is None:
                progress = self._progress[request] = ResponseProgress(timings, request.queued_ns)
            self._statistics.responded(request, response, progress, timings)
        if not final:
            request.on_pause = self._on_pause
            request.respond(response, False)
            return
        self._statistics.ended(request, response, progress, timings, monotonic_ns())
        if request in self.open:
            self.open.remove(request)
            self.entered -= 1
            self._progress.pop(request, None)
        elif progress is not None:
            progress.over = True
        self._respond(request, response)

    def refuse(self, request: InferenceRequest, error: NeriteError, outcome: RequestOutcome) -> None:
        """Fail a waiting request. It may have run before, and have been about to run again."""
        self._statistics.failed(outcome, request.arrived_ns)
        self._progress.pop(request, None)
        self.entered -= 1
        response = InferenceResponse.failed(error)
        if request in self._positions:
            self._respond(request, response)
        else:
            request.respond(response)

    def _separate(self, batch: Batch, responses: Sequence[InferenceResponse | None]) -> tuple[Batch, Batch]:
        """Return the requests that the result of a batch answers, and those that get their responses one by one.

        Of the latter, those without their last response are added to ``open``.
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
        """Pass on the last response to a request when its turn has come; do nothing if it had one."""
        if self._order is None:
            request.respond(response)
        elif request in self._positions:
            for earlier, answer in self._order.finish(self._positions.pop(request), (request, response)):
                earlier.respond(answer)


def _cancelled(batch: Batch, responses: Sequence[InferenceResponse | None]) -> Batch:
    """Return the requests to which a model responds that they were cancelled."""
    return [
        request
        for request, response in zip(batch, responses, strict=True)
        if response is not None and response.error is not None and isinstance(response.error, Cancelled)
    ]


# Reports to sinks that are an ``ExecutionObserver``. An exception in one does not affect the others.


def report_execution(
    batch: Batch, responses: Sequence[InferenceResponse | None], timings: ExecutionTimes | None
) -> None:
    """Report an execution to the observers of a batch. Never raises."""
    if timings is not None:
        timings.requests = len(batch)
    for request, response in zip(batch, responses, strict=True):
        if isinstance(request.sink, ExecutionObserver):
            again = response is not None and response.again
            try:
                (request.sink.turned if again else request.sink.ran)(request, timings)
            except Exception as error:
                report("dispatcher", error, "while a trace was written", request.id)


def report_response(request: InferenceRequest, timings: ExecutionTimes | None) -> None:
    """Report one of several responses to the observer of a request. Never raises."""
    if isinstance(request.sink, ExecutionObserver):
        try:
            request.sink.parted(request, timings)
        except Exception as error:
            report("dispatcher", error, "while a trace was written", request.id)
