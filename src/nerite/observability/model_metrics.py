"""The core metrics of each model version, read from its statistics when the page is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from nerite.observability import token_metrics
from nerite.observability.exposition import UNLABELLED, Labels, MetricFamily, Sample, joined, label, labels
from nerite.observability.histogram import BOUNDS, Histogram, QuantileSum
from nerite.observability.statistics import Duration, VersionStatistics
from nerite.observability.token_metrics import TokenStatistics

# The metrics of model versions that Triton lacks, made of their statistics when the page is asked for.

Labelled: TypeAlias = tuple[Labels, "MeteredVersion"]
_Samples: TypeAlias = Iterable[Sample]


class _Metric(NamedTuple):
    """A metric of a model version."""

    name: str
    type: str
    help: str
    read: Callable[[MeteredVersion], _Samples]
    """The labels that it has besides those of the version, and its values."""


def nerite_families(versions: Sequence[Labelled]) -> list[MetricFamily]:
    """Return the metrics of all versions."""
    return [
        MetricFamily(
            metric.name,
            metric.help,
            metric.type,
            [(joined(of, more), value) for of, version in versions for more, value in metric.read(version)],
        )
        for metric in _METRICS
    ]


def _whole(version: MeteredVersion) -> _Samples:
    """Return nothing of a version that has answered nobody yet: a page of a thousand models that wait stays short."""
    of = version.statistics
    if of.stages is None or not of.success.count:
        return ()
    return [(UNLABELLED, Histogram.of(BOUNDS, of.stages.whole, of.success.ns / 1e9, of.stages.exemplars))]


def _stages(version: MeteredVersion) -> _Samples:
    of = version.statistics
    if of.stages is None or not of.success.count:
        return ()
    return [
        (label("stage", "queue"), _times(of.stages.queue, of.queue)),
        (label("stage", "input"), _times(of.stages.compute_input, of.compute_input)),
        (label("stage", "compute"), _times(of.stages.compute_infer, of.compute_infer)),
        (label("stage", "output"), _times(of.stages.compute_output, of.compute_output)),
    ]


def _times(counts: list[int], duration: Duration) -> Histogram:
    return Histogram.of(BOUNDS, counts, duration.ns / 1e9)


def _batch_sizes(version: MeteredVersion) -> _Samples:
    """Return how many rows executions had. Each size is counted by itself; the bounds are powers of two."""
    batches = version.statistics.batches
    if not batches:
        return ()
    sizes = Histogram(_powers_up_to(version.max_rows))
    for rows, of in batches.items():
        sizes.note(rows, of.compute_infer.count)
    return [(UNLABELLED, sizes)]


@lru_cache
def _powers_up_to(most: int) -> tuple[int, ...]:
    return (*(2**power for power in range(max(most - 1, 0).bit_length())), most)


_METRICS: Final = (
    _Metric("nerite_request_duration_seconds", "histogram",
            "Time from a complete request to its last response, of requests that succeeded", _whole),
    _Metric("nerite_stage_duration_seconds", "histogram",
            "Of that, the time in the queue, and before, during and after the computation", _stages),
    _Metric("nerite_batch_rows", "histogram",
            "Rows that ran together, of each execution", _batch_sizes),
    _Metric("nerite_batch_releases_total", "counter",
            "Batches by why they began when they did",
            lambda v: [(label("reason", why), count) for why, count in v.releases.items()]),
    _Metric("nerite_request_failures_total", "counter",
            "Requests that failed, by what went wrong",
            lambda v: [(label("reason", what.value), count) for what, count in v.statistics.failures.items()]),
    _Metric("nerite_requests_given_up_total", "counter",
            "Requests that nobody waited for any more, by why, whatever became of them",
            lambda v: [(label("reason", why.value), count) for why, count in v.statistics.given_up.items()]),
    _Metric("nerite_queue_requests", "gauge",
            "Requests that wait for an instance, by priority",
            lambda v: [(label("priority", str(number)), count) for number, count in v.waiting.items()]),
    _Metric("nerite_worker_restarts_total", "counter",
            "Workers started in the place of workers that died", lambda v: [(UNLABELLED, v.restarts)]),
    _Metric("nerite_model_memory_bytes", "gauge",
            "Memory that the workers of a model have for themselves", lambda v: [(UNLABELLED, v.memory)]),
)  # fmt: skip

# The metrics that Triton has where a flag says so.

_Read: TypeAlias = Callable[[VersionStatistics], Duration]

_FIRST_RESPONSE: Final = "Duration from request to first response in milliseconds"
_OTHERS: Final = {True: ("request",), False: ("hit", "miss")}
"""Stages that Triton has no summaries of, where the answers of the model are cached and where they are not."""
_SUMMARIES: Final[tuple[tuple[str, str, str, _Read], ...]] = (
    ("nv_inference_request_summary_us", "request",
     "Summary of inference request duration in microseconds (includes cached requests)", lambda s: s.success),
    ("nv_inference_queue_summary_us", "queue",
     "Summary of inference queuing duration in microseconds (includes cached requests)", lambda s: s.queue),
    ("nv_inference_compute_input_summary_us", "compute_input",
     "Cumulative compute input duration in microseconds (does not include cached requests)",
     lambda s: s.compute_input),
    ("nv_inference_compute_infer_summary_us", "compute_infer",
     "Cumulative compute inference duration in microseconds (does not include cached requests)",
     lambda s: s.compute_infer),
    ("nv_inference_compute_output_summary_us", "compute_output",
     "Cumulative inference compute output duration in microseconds (does not include cached requests)",
     lambda s: s.compute_output),
    ("nv_cache_hit_summary_per_model", "hit",
     "Summary of cache hit counts/durations per model, in microseconds.", lambda s: s.cache_hit),
    ("nv_cache_miss_summary_per_model", "miss",
     "Summary of cache miss counts/durations per model, in microseconds.", lambda s: s.cache_miss),
)  # fmt: skip


def optional_families(versions: Sequence[tuple[Labels, MeteredVersion]]) -> list[MetricFamily]:
    """Return the histogram and the summaries that are counted."""
    found = [
        MetricFamily(name, text, "summary", _summaries(versions, stage, read)) for name, stage, text, read in _SUMMARIES
    ]
    first = [
        (labels, item.statistics.optional.first_response)
        for labels, item in versions
        if item.statistics.optional is not None and item.statistics.optional.first_response is not None
    ]
    found.append(MetricFamily("nv_inference_first_response_histogram_ms", _FIRST_RESPONSE, "histogram", first))
    return [family for family in found if family.samples]


def _summaries(versions: Sequence[tuple[Labels, MeteredVersion]], stage: str, read: _Read) -> list[Sample]:
    """Return those of a stage."""
    samples: list[Sample] = []
    for of_version, item in versions:
        counted = item.statistics
        if counted.optional is None or stage in _OTHERS[item.cached]:
            continue
        quantiles = counted.optional.quantiles(stage)
        if quantiles is not None:
            duration = read(counted)
            samples.append((of_version, QuantileSum(duration.count, duration.ns // 1000, quantiles)))
    return samples


class MeteredVersion(NamedTuple):
    """A model version as the metrics see it."""

    model: str
    version: str
    namespace: str
    """Empty where there are none."""
    tags: dict[str, str]
    statistics: VersionStatistics
    pending: int
    load_seconds: float
    restarts: int
    """How often a worker was started in the place of one that died."""
    memory: int
    """Bytes that its workers have for themselves."""
    waiting: Mapping[int, int]
    """How many requests wait for an instance, by priority."""
    releases: Mapping[str, int]
    """How many batches began for which reason."""
    max_rows: int
    """Rows that a batch may have: 1 where requests have no rows."""
    cached: bool
    """The model is one whose answers may come from the cache, whether the server has one or not."""
    tokens: TokenStatistics | None = None
    """What its engines tell, if it has any."""


_COUNTS: tuple[tuple[str, str, Callable[[VersionStatistics], float]], ...] = (
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda s: s.inference_count,
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda s: s.execution_count,
    ),
)

_DURATIONS: tuple[tuple[str, str, Callable[[VersionStatistics], float]], ...] = (
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda s: s.success.ns // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda s: s.queue.ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda s: s.compute_input.ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda s: s.compute_infer.ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda s: s.compute_output.ns // 1000,
    ),
)

_OF_CACHED: tuple[tuple[str, str, Callable[[VersionStatistics], float]], ...] = (
    ("nv_cache_num_hits_per_model", "Number of cache hits per model", lambda s: s.cache_hit.count),
    (
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda s: s.cache_hit.ns // 1000,
    ),
    ("nv_cache_num_misses_per_model", "Number of cache misses per model", lambda s: s.cache_miss.count),
    (
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda s: s.cache_miss.ns // 1000,
    ),
)


def core_families(versions: Iterable[MeteredVersion], *, latencies: bool = True) -> list[MetricFamily]:
    """Return the metrics of all versions; without ``latencies`` not the sums of durations, nor those of the cache."""
    listed = [(_labels(item), item) for item in versions]
    success = MetricFamily(
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        "counter",
        [(of, item.statistics.success.count) for of, item in listed],
    )
    failure = MetricFamily(
        "nv_inference_request_failure",
        "Number of failed inference requests, all batch sizes",
        "counter",
        [
            (joined(of, label("reason", reason)), count)
            for of, item in listed
            for reason, count in item.statistics.coarse_failures().items()
        ],
    )
    counted = [
        MetricFamily(name, text, "counter", [(of, read(item.statistics)) for of, item in listed])
        for name, text, read in (*_COUNTS, *(_DURATIONS if latencies else ()))
    ]
    if latencies and any(item.cached for _, item in listed):
        counted += [
            MetricFamily(name, text, "counter", [(of, read(item.statistics)) for of, item in listed if item.cached])
            for name, text, read in _OF_CACHED
        ]
    if any(item.statistics.optional is not None for _, item in listed):
        counted += optional_families(listed)
    pending = MetricFamily(
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        "gauge",
        [(of, item.pending) for of, item in listed],
    )
    load = MetricFamily(
        "nv_model_load_duration_secs",
        "Model load time in seconds",
        "gauge",
        [(of, item.load_seconds) for of, item in listed],
    )
    own = nerite_families(listed)
    generated = [(of, item.tokens, item.pending) for of, item in listed if item.tokens is not None]
    of_tokens = token_metrics.token_families(generated)
    return [success, failure, *counted, pending, load, *own, *of_tokens]


def _labels(version: MeteredVersion) -> Labels:
    pairs = {"model": version.model, "version": version.version}
    if version.namespace:
        pairs["namespace"] = version.namespace
    pairs.update((f"_{name}", value) for name, value in version.tags.items())
    return labels(pairs)
