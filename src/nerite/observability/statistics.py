"""Counting: what the statistics extension and the metrics page read. Additions only; the work is done by the reader.

All of it happens on the loop's thread, so nothing is locked and nothing is lost.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from typing import Any, Final

from nerite.config.model_config import ModelConfig
from nerite.config.options import MetricsOptions
from nerite.core.errors import Cancelled
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import CancelReason, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.observability.histogram import Histogram, Quantiles, StageTimes

# What Triton counts of times where a flag says so: summaries, and a histogram of first responses.

FIRST_RESPONSE_MS: Final = (100, 500, 2000, 5000)
STAGES: Final = ("request", "queue", "compute_input", "compute_infer", "compute_output", "hit", "miss")
"""What there are quantiles of, in microseconds."""


class OptionalTimes:
    """Those of one model version."""

    def __init__(self, first_response: Sequence[float] | None, quantiles: Sequence[float] | None) -> None:
        """``first_response``: bounds in milliseconds. None: there is no histogram, or there are no summaries."""
        self.first_response = None if first_response is None else Histogram(first_response)
        self._wanted = quantiles
        self._stages = {} if quantiles is None else {stage: Quantiles() for stage in STAGES}

    def quantiles(self, stage: str) -> list[tuple[float, float]] | None:
        """Return the quantiles of a stage in the last minute, None if there are none to be."""
        return None if self._wanted is None else self._stages[stage].read(self._wanted, time.monotonic_ns())

    def ran(self, batch: Sequence[InferenceRequest], timings: ExecutionTimes, now: int) -> None:
        """Note a batch that ran."""
        before, during = timings.inputs_ready_ns - timings.started_ns, timings.computed_ns - timings.inputs_ready_ns
        for request in batch:
            whole = now - request.arrived_ns
            self.responded(whole)
            self.took(
                whole, timings.started_ns - request.queued_ns, before, during, timings.ended_ns - timings.computed_ns
            )

    def took(self, whole: int, queue: int, before: int, during: int, after: int, count: int = 1) -> None:
        """Note ``count`` requests of which each took these times."""
        times = (whole, queue, before, during, after)
        self._note(dict(zip(STAGES, times, strict=False)), count)

    def found(self, whole: int, queue: int, looked: int) -> None:
        """Note a request that was answered from the cache, in ``looked``."""
        self.responded(whole)
        self._note({"request": whole, "queue": queue, "hit": looked})

    def missed(self, looked: int) -> None:
        """Note that a request was not in the cache, which took ``looked`` to see."""
        self._note({"miss": looked})

    def responded(self, whole: int, count: int = 1) -> None:
        """Note the first responses to ``count`` requests."""
        if self.first_response is not None:
            self.first_response.note(whole / 1e6, count)

    def _note(self, times: dict[str, int], count: int = 1) -> None:
        if self._wanted is not None:
            now = time.monotonic_ns()
            for stage, ns in times.items():
                self._stages[stage].note(ns // 1000, now, count)


MAX_RESPONSES: Final = 256
"""Responses to one request that are counted by their place; what comes after counts with the last of them."""


class RequestOutcome(enum.Enum):
    """Why a request failed."""

    REJECTED = "queue_full"
    TIMED_OUT = "queue_timeout"
    NOT_LET_IN = "not_let_in"
    """A rule of the admission refused it: it was too much for its tenant, or would have been too late."""
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
    """How often, and how long in total."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Note ``count`` events that took ``ns`` together."""
        self.count += count
        self.ns += ns


class BatchStatistics:
    """The executions of one batch size."""

    __slots__ = ("compute_infer", "compute_input", "compute_output")

    def __init__(self) -> None:
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()


class ResponseStatistics:
    """The first, or second, or third response to each request that has so many."""

    __slots__ = ("cancel", "compute_infer", "compute_output", "empty_response", "fail", "success")

    def __init__(self) -> None:
        self.compute_infer = Duration()
        """From the response before, or the beginning of the execution, until the model had this one."""
        self.compute_output = Duration()
        """Until it had left: the waiting for a client that reads slowly is part of this."""
        self.success = Duration()
        self.fail = Duration()
        self.empty_response = Duration()
        """The end of a request that has no response with it."""
        self.cancel = Duration()
        """The end of a request that its client gave up: how long the model worked for nobody."""


class ResponseProgress:
    """How far a request is that gets its responses one by one."""

    __slots__ = ("count", "over", "queued_ns", "ready_ns", "started_ns")

    def __init__(self, first: ExecutionTimes, queued_ns: int) -> None:
        """``first`` are the marks of the first response; ``queued_ns`` is when the request had begun to wait."""
        self.count = 0
        self.over = False
        self.queued_ns = queued_ns
        self.started_ns = first.started_ns
        self.ready_ns = first.inputs_ready_ns


class VersionStatistics:
    """Everything counted for one model version, from its load to its unload."""

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
        """How long requests take is noted in ``stages`` and ``optional``, too."""
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
        """Requests that were not in the cache: the time to look for them there, and to keep their answers."""
        self.failures = dict.fromkeys(RequestOutcome, 0)
        self.given_up = dict.fromkeys(CancelReason, 0)
        """Requests that nobody waited for any more, whatever became of them."""
        self.batches: dict[int, BatchStatistics] = {}
        self.responses: list[ResponseStatistics] = []
        """By their place among the responses to a request."""

    def coarse_failures(self) -> dict[str, int]:
        """Return how many requests failed, by the reasons that Triton tells apart."""
        counts = dict.fromkeys(_COARSE.values(), 0)
        for outcome, count in self.failures.items():
            counts[_COARSE[outcome]] += count
        return counts

    def failed(self, outcome: RequestOutcome, arrived_ns: int) -> None:
        """Note a request that never ran."""
        self.failures[outcome] += 1
        self.fail.add(time.monotonic_ns() - arrived_ns)

    def found(self, request: InferenceRequest, found_ns: int, now: int) -> None:
        """Note a request that was answered from the cache, since ``found_ns``. Nothing was executed for it."""
        whole, queue = now - request.arrived_ns, found_ns - request.queued_ns
        self.success.add(whole)
        self.queue.add(queue)
        self.cache_hit.add(now - found_ns)
        if self.stages is not None:
            self.stages.found(whole, queue)
        if self.optional is not None:
            self.optional.found(whole, queue, now - found_ns)

    def missed(self, looked_ns: int) -> None:
        """Note a request that was not in the cache, and how long it took to see that."""
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
        """Note a batch that ran. ``timings`` is None if its worker died under it.

        The times of a batch count once for each of its requests, as each of them waited for all of it. A response
        that is an error counts as a success of the server, unless the execution as a whole failed. ``apart`` are
        requests that ran with the batch and count by themselves, see ``ended``.
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
        """Note a batch of ``size`` requests that went on from another model in the same worker, and waited nowhere."""
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
        """Note a request that the models of an ensemble have answered; the times are sums over its steps."""
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
        """Note one of several responses.

        The computing of it began when its inputs were ready, as ``timings`` has it.
        """
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
        """Note the last of several responses. Without ``timings`` the worker died, and ``response`` says so.

        This is when the request counts, and its computing is all the time since its inputs were ready. Whoever ends a
        request with an error has failed, unless the client had given it up.
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

    def _succeeded(self, whole: int, queue: int, before: int, during: int, after: int, count: int = 1) -> None:
        """Note ``count`` requests of which each took these times, in all, in the queue, and in the execution."""
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
        """Note an execution of ``rows`` rows: the times before, during and after its computation."""
        of_size = self.batches.get(rows)
        if of_size is None:
            of_size = self.batches[rows] = BatchStatistics()
        of_size.compute_input.add(before)
        of_size.compute_infer.add(during)
        of_size.compute_output.add(after)


def _phases(timings: ExecutionTimes) -> tuple[int, int, int]:
    """Return how long an execution took before, during and after its computation."""
    return (
        timings.inputs_ready_ns - timings.started_ns,
        timings.computed_ns - timings.inputs_ready_ns,
        timings.ended_ns - timings.computed_ns,
    )


def _rows(requests: Sequence[InferenceRequest]) -> int:
    return sum(request.header.batch_size for request in requests)


# What is counted of a model version, as the options of the metrics and its configuration have it.

FIRST_RESPONSE: Final = "nv_inference_first_response_histogram_ms"


def new_statistics(options: MetricsOptions, config: ModelConfig) -> VersionStatistics:
    """Return the statistics of a version that was loaded just now."""
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
    """Return the bounds of the histogram of first responses: those of the configuration, if it has some."""
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        if control.metric_identifier is not None and control.metric_identifier.family == FIRST_RESPONSE:
            assert control.histogram_options is not None  # as was checked
            return control.histogram_options.buckets
    return FIRST_RESPONSE_MS


# Statistics in the JSON form of Triton's statistics extension.


def statistics_json(statistics: VersionStatistics, *, decoupled: bool) -> dict[str, Any]:
    """Return what was counted. Only models that are ``decoupled`` have statistics by response."""
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
    """Return the bytes of memory that a model's instances take, if there is something to tell."""
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
