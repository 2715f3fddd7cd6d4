"""Statistics of model versions, for the statistics extension and the metrics page.

Counting is addition; the reader does the rest. Everything happens on the loop's thread, so there are no locks.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from nerite.core.errors import Cancelled
from nerite.core.request import CancelReason, InferenceRequest
from nerite.observability.histogram import Histogram, Quantiles, StageTimes

if TYPE_CHECKING:
    from nerite.config.model_config import ModelConfig
    from nerite.config.options import MetricsOptions
    from nerite.core.execution_observer import ExecutionTimes
    from nerite.core.response import InferenceResponse

FIRST_RESPONSE_MS: Final = (100, 500, 2000, 5000)
STAGES: Final = ("request", "queue", "compute_input", "compute_infer", "compute_output", "hit", "miss")
"""Stages with summaries, in microseconds."""


class OptionalTimes:
    """Summaries and the histogram of first responses of a model version, which Triton has if flags enable them."""

    def __init__(self, first_response: Sequence[float] | None, quantiles: Sequence[float] | None) -> None:
        """``first_response``: bounds in milliseconds. None disables the histogram or the summaries."""
        self.first_response = None if first_response is None else Histogram(first_response)
        self._wanted = quantiles
        self._stages = {} if quantiles is None else {stage: Quantiles() for stage in STAGES}

    def quantiles(self, stage: str) -> list[tuple[float, float]] | None:
        """Return the quantiles of a stage in the last minute; None if summaries are disabled."""
        return None if self._wanted is None else self._stages[stage].read(self._wanted, time.monotonic_ns())

    def ran(self, batch: Sequence[InferenceRequest], timings: ExecutionTimes, now: int) -> None:
        """Count an executed batch."""
        before, during = timings.inputs_ready_ns - timings.started_ns, timings.computed_ns - timings.inputs_ready_ns
        for request in batch:
            whole = now - request.arrived_ns
            self.responded(whole)
            self.took(
                whole, timings.started_ns - request.queued_ns, before, during, timings.ended_ns - timings.computed_ns
            )

    def took(self, whole: int, queue: int, before: int, during: int, after: int, count: int = 1) -> None:
        """Count ``count`` requests, each of which took these times."""
        times = (whole, queue, before, during, after)
        self._note(dict(zip(STAGES, times, strict=False)), count)

    def found(self, whole: int, queue: int, looked: int) -> None:
        """Count a request answered from the cache; ``looked``: nanoseconds of the lookup."""
        self.responded(whole)
        self._note({"request": whole, "queue": queue, "hit": looked})

    def missed(self, looked: int) -> None:
        """Count a cache miss; ``looked``: nanoseconds of the lookup."""
        self._note({"miss": looked})

    def responded(self, whole: int, count: int = 1) -> None:
        """Count the first responses to ``count`` requests."""
        if self.first_response is not None:
            self.first_response.note(whole / 1e6, count)

    def _note(self, times: dict[str, int], count: int = 1) -> None:
        if self._wanted is not None:
            now = time.monotonic_ns()
            for stage, ns in times.items():
                self._stages[stage].note(ns // 1000, now, count)


MAX_RESPONSES: Final = 256
"""Maximum number of responses to a request that are counted separately; later ones count with the last of these."""


class RequestOutcome(enum.Enum):
    """Reason for which a request failed. The value is a label of the metrics."""

    REJECTED = "queue_full"
    TIMED_OUT = "queue_timeout"
    NOT_LET_IN = "not_let_in"
    """Rejected by admission control: over a quota of its tenant, or it would have missed its deadline."""
    CANCELED = "cancelled"
    BACKEND = "model_error"
    WORKER_DIED = "worker_died"
    OTHER = "other"


_COARSE: Final = {
    RequestOutcome.REJECTED: "REJECTED",
    RequestOutcome.TIMED_OUT: "REJECTED",
    RequestOutcome.NOT_LET_IN: "REJECTED",
    RequestOutcome.CANCELED: "CANCELED",
    RequestOutcome.BACKEND: "BACKEND",
    RequestOutcome.WORKER_DIED: "BACKEND",
    RequestOutcome.OTHER: "OTHER",
}


class Duration:
    """Number of events, and their total time."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Add ``count`` events that took ``ns`` in total."""
        self.count += count
        self.ns += ns


class BatchStatistics:
    """Executions of one batch size."""

    __slots__ = ("compute_infer", "compute_input", "compute_output")

    def __init__(self) -> None:
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()


class ResponseStatistics:
    """All n-th responses to requests, for one n."""

    __slots__ = ("cancel", "compute_infer", "compute_output", "empty_response", "fail", "success")

    def __init__(self) -> None:
        self.compute_infer = Duration()
        """From the previous response, or the start of the execution, until the model returned this one."""
        self.compute_output = Duration()
        """Until it was sent, including the time to wait for a slow client."""
        self.success = Duration()
        self.fail = Duration()
        self.empty_response = Duration()
        """Ends of requests without a response."""
        self.cancel = Duration()
        """Ends of cancelled requests, with the computing time of results that were not delivered."""


class ResponseProgress:
    """Progress of a request with several responses."""

    __slots__ = ("count", "over", "queued_ns", "ready_ns", "started_ns")

    def __init__(self, first: ExecutionTimes, queued_ns: int) -> None:
        """``first``: timestamps of the first response; ``queued_ns``: time at which the request was queued."""
        self.count = 0
        self.over = False
        self.queued_ns = queued_ns
        self.started_ns = first.started_ns
        self.ready_ns = first.inputs_ready_ns


class VersionStatistics:
    """All counts of a model version, from its load to its unload."""

    __slots__ = (
        "batches",
        "cache_hit",
        "cache_miss",
        "compute_infer",
        "compute_input",
        "compute_output",
        "execution_count",
        "fail",
        "failures",
        "given_up",
        "inference_count",
        "last_inference_ms",
        "optional",
        "queue",
        "responses",
        "stages",
        "success",
    )

    def __init__(self, stages: StageTimes | None = None, optional: OptionalTimes | None = None) -> None:
        """``stages`` and ``optional`` also record the times of requests, if given."""
        self.stages = stages
        self.optional = optional
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.cache_hit = Duration()
        self.cache_miss = Duration()
        """Cache misses: the time of the lookups and insertions."""
        self.failures = dict.fromkeys(RequestOutcome, 0)
        self.given_up = dict.fromkeys(CancelReason, 0)
        """Requests whose clients stopped waiting, regardless of the outcome."""
        self.batches: dict[int, BatchStatistics] = {}
        self.responses: list[ResponseStatistics] = []
        """By position among the responses to a request."""

    def coarse_failures(self) -> dict[str, int]:
        """Return the number of failed requests by Triton's reasons."""
        counts = dict.fromkeys(_COARSE.values(), 0)
        for outcome, count in self.failures.items():
            counts[_COARSE[outcome]] += count
        return counts

    def failed(self, outcome: RequestOutcome, arrived_ns: int) -> None:
        """Count a failed request that was not executed."""
        self.failures[outcome] += 1
        self.fail.add(time.monotonic_ns() - arrived_ns)

    def found(self, request: InferenceRequest, found_ns: int, now: int) -> None:
        """Count a request answered from the cache; ``found_ns``: time at which it was looked up."""
        whole, queue = now - request.arrived_ns, found_ns - request.queued_ns
        self.success.add(whole)
        self.queue.add(queue)
        self.cache_hit.add(now - found_ns)
        if self.stages is not None:
            self.stages.found(whole, queue)
        if self.optional is not None:
            self.optional.found(whole, queue, now - found_ns)

    def missed(self, looked_ns: int) -> None:
        """Count a cache miss, and the time of the lookup."""
        self.cache_miss.add(looked_ns)
        if self.optional is not None:
            self.optional.missed(looked_ns)

    def executed(
        self,
        batch: Sequence[InferenceRequest],
        timings: ExecutionTimes | None,
        now: int,
        apart: Sequence[InferenceRequest] = (),
    ) -> None:
        """Count an executed batch. ``timings`` is None if its worker died.

        The times of a batch count for each of its requests, because each waited for the whole batch. An error response
        counts as a success of the server, unless the execution as a whole failed. ``apart``: requests of the batch
        that are counted separately, by ``ended`` or ``cancelled``.
        """
        size = len(batch)
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        if timings is None:
            self._failed_batch(batch, RequestOutcome.WORKER_DIED, now)
            return
        if timings.failed:
            self._failed_batch(batch, RequestOutcome.BACKEND, now)
            self._of_size(_rows(batch) + _rows(apart), *_phases(timings))
            return
        rows = total = queued = 0
        started = timings.started_ns
        for request in batch:
            rows += request.header.batch_size
            total += now - request.arrived_ns
            queued += started - request.queued_ns
        self.inference_count += rows
        success, queue = self.success, self.queue
        success.count += size
        success.ns += total
        queue.count += size
        queue.ns += queued
        before, during, after = _phases(timings)
        of = self.compute_input
        of.count += size
        of.ns += before * size
        of = self.compute_infer
        of.count += size
        of.ns += during * size
        of = self.compute_output
        of.count += size
        of.ns += after * size
        self._of_size(rows + _rows(apart) if apart else rows, before, during, after)
        if self.stages is not None:
            self.stages.ran(batch, timings, now)
        if self.optional is not None:
            self.optional.ran(batch, timings, now)

    def followed(self, size: int, rows: int, timings: ExecutionTimes) -> None:
        """Count a batch of ``size`` requests that followed another model in the same worker, without queueing."""
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        before, during, after = _phases(timings)
        took = timings.ended_ns - timings.started_ns
        self._of_size(rows, before, during, after)
        if timings.failed:
            self.failures[RequestOutcome.BACKEND] += size
            self.fail.add(took * size, size)
            return
        self.inference_count += rows
        self._succeeded(took, 0, before, during, after, size)
        if self.optional is not None:
            self.optional.responded(took, size)

    def composed(self, request: InferenceRequest, queue: int, before: int, during: int, after: int, now: int) -> None:
        """Count a request to an ensemble. The times are sums over its steps."""
        rows = request.header.batch_size
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.inference_count += rows
        whole = now - request.arrived_ns
        self._succeeded(whole, queue, before, during, after)
        self._of_size(rows, before, during, after)
        if self.optional is not None:
            self.optional.responded(whole)

    def responded(
        self,
        request: InferenceRequest,
        response: InferenceResponse,
        progress: ResponseProgress,
        timings: ExecutionTimes,
    ) -> None:
        """Count one of several responses, whose computation started when the inputs of ``timings`` were ready."""
        place = min(progress.count, MAX_RESPONSES - 1)
        progress.count += 1
        if place == len(self.responses):
            self.responses.append(ResponseStatistics())
        of = self.responses[place]
        infer = timings.computed_ns - timings.inputs_ready_ns
        output = timings.ended_ns - timings.computed_ns
        nothing = response.empty or response.error is not None
        if nothing and (request.cancelled or isinstance(response.error, Cancelled)):
            of.cancel.add(infer + output)
            return
        if self.optional is not None and progress.count == 1 and not response.empty:
            self.optional.responded(timings.ended_ns - request.arrived_ns)
        of.compute_infer.add(infer)
        if response.empty:
            of.empty_response.add(infer)
            return
        of.compute_output.add(output)
        (of.success if response.error is None else of.fail).add(infer + output)

    def ended(
        self,
        request: InferenceRequest,
        response: InferenceResponse,
        progress: ResponseProgress | None,
        timings: ExecutionTimes | None,
        now: int,
    ) -> None:
        """Count a request at the last of its responses. Without ``timings``, the worker died.

        Its computation lasted from the time at which its inputs were ready. If the last response is an error the
        request has failed, unless the client had cancelled it.
        """
        self.last_inference_ms = time.time_ns() // 1_000_000
        if request.cancelled or isinstance(response.error, Cancelled):
            self._failed(request, RequestOutcome.CANCELED, now)
        elif timings is None:
            self._failed(request, RequestOutcome.WORKER_DIED, now)
        elif response.error is not None or progress is None:
            self._failed(request, RequestOutcome.BACKEND, now)
        else:
            self.inference_count += request.header.batch_size
            self._succeeded(
                now - request.arrived_ns,
                progress.started_ns - progress.queued_ns,
                progress.ready_ns - progress.started_ns,
                timings.computed_ns - progress.ready_ns,
                timings.ended_ns - timings.computed_ns,
            )

    def cancelled(self, requests: Sequence[InferenceRequest], now: int) -> None:
        """Count requests of an executed batch that the model did not complete because they were cancelled."""
        self._failed_batch(requests, RequestOutcome.CANCELED, now)

    def _succeeded(self, whole: int, queue: int, before: int, during: int, after: int, count: int = 1) -> None:
        """Count ``count`` requests, each of which took these times in total, in the queue, and in the execution."""
        self.success.add(whole * count, count)
        self.queue.add(queue * count, count)
        self.compute_input.add(before * count, count)
        self.compute_infer.add(during * count, count)
        self.compute_output.add(after * count, count)
        if self.stages is not None:
            self.stages.took(whole, queue, before, during, after, count)
        if self.optional is not None:
            self.optional.took(whole, queue, before, during, after, count)

    def _failed(self, request: InferenceRequest, outcome: RequestOutcome, now: int) -> None:
        self.failures[outcome] += 1
        self.fail.add(now - request.arrived_ns)

    def _failed_batch(self, batch: Sequence[InferenceRequest], outcome: RequestOutcome, now: int) -> None:
        size = len(batch)
        self.failures[outcome] += size
        self.fail.add(sum(now - request.arrived_ns for request in batch), size)

    def _of_size(self, rows: int, before: int, during: int, after: int) -> None:
        """Count an execution of ``rows`` rows, with the times before, during and after its computation."""
        of_size = self.batches.get(rows)
        if of_size is None:
            of_size = self.batches[rows] = BatchStatistics()
        of_size.compute_input.add(before)
        of_size.compute_infer.add(during)
        of_size.compute_output.add(after)


def _phases(timings: ExecutionTimes) -> tuple[int, int, int]:
    """Return the times of an execution before, during and after its computation."""
    return (
        timings.inputs_ready_ns - timings.started_ns,
        timings.computed_ns - timings.inputs_ready_ns,
        timings.ended_ns - timings.computed_ns,
    )


def _rows(requests: Sequence[InferenceRequest]) -> int:
    return sum(request.header.batch_size for request in requests)


FIRST_RESPONSE: Final = "nv_inference_first_response_histogram_ms"


def new_statistics(options: MetricsOptions, config: ModelConfig) -> VersionStatistics:
    """Return the statistics of a newly loaded version, as the options enable them."""
    if not options.enabled:
        return VersionStatistics()
    optional = None
    if options.histogram_latencies or options.summary_latencies:
        optional = OptionalTimes(
            _buckets(config) if options.histogram_latencies else None,
            [quantile for quantile, _ in options.summary_quantiles] if options.summary_latencies else None,
        )
    return VersionStatistics(StageTimes() if options.stage_histograms else None, optional)


def _buckets(config: ModelConfig) -> Sequence[float]:
    """Return the bounds of the histogram of first responses: those of the configuration, or the defaults."""
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        if control.metric_identifier is not None and control.metric_identifier.family == FIRST_RESPONSE:
            assert control.histogram_options is not None  # by validation
            return control.histogram_options.buckets
    return FIRST_RESPONSE_MS


def statistics_json(statistics: VersionStatistics, *, decoupled: bool) -> dict[str, Any]:
    """Return the statistics in Triton's JSON form. Only decoupled models have ``response_stats``."""
    return {
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {
            "success": _duration(statistics.success),
            "fail": _duration(statistics.fail),
            "queue": _duration(statistics.queue),
            "compute_input": _duration(statistics.compute_input),
            "compute_infer": _duration(statistics.compute_infer),
            "compute_output": _duration(statistics.compute_output),
            "cache_hit": _duration(statistics.cache_hit),
            "cache_miss": _duration(statistics.cache_miss),
        },
        "response_stats": {
            str(place): _response(response) for place, response in enumerate(statistics.responses) if decoupled
        },
        "batch_stats": [_batch(size, batch) for size, batch in sorted(statistics.batches.items())],
    }


def memory_json(size: int) -> list[dict[str, Any]]:
    """Return the memory of a model's instances; empty if unknown."""
    return [{"type": "CPU", "id": 0, "byte_size": size}] if size else []


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}


def _response(response: ResponseStatistics) -> dict[str, Any]:
    return {
        "compute_infer": _duration(response.compute_infer),
        "compute_output": _duration(response.compute_output),
        "success": _duration(response.success),
        "fail": _duration(response.fail),
        "empty_response": _duration(response.empty_response),
        "cancel": _duration(response.cancel),
    }


def _batch(size: int, batch: BatchStatistics) -> dict[str, Any]:
    return {
        "batch_size": size,
        "compute_input": _duration(batch.compute_input),
        "compute_infer": _duration(batch.compute_infer),
        "compute_output": _duration(batch.compute_output),
    }
