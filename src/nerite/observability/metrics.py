"""The core metrics of each model version, read from its statistics when the page is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from nerite.observability import optional_metrics, own_metrics, token_metrics
from nerite.observability.exposition import Family, Labels, joined, label, labels
from nerite.observability.statistics import VersionStatistics
from nerite.observability.token_statistics import TokenStatistics


class Version(NamedTuple):
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
    most_rows: int
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


def families(versions: Iterable[Version], *, latencies: bool = True) -> list[Family]:
    """Return the metrics of all versions; without ``latencies`` not the sums of durations, nor those of the cache."""
    listed = [(_labels(item), item) for item in versions]
    success = Family(
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        "counter",
        [(of, item.statistics.success.count) for of, item in listed],
    )
    failure = Family(
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
        Family(name, text, "counter", [(of, read(item.statistics)) for of, item in listed])
        for name, text, read in (*_COUNTS, *(_DURATIONS if latencies else ()))
    ]
    if latencies and any(item.cached for _, item in listed):
        counted += [
            Family(name, text, "counter", [(of, read(item.statistics)) for of, item in listed if item.cached])
            for name, text, read in _OF_CACHED
        ]
    if any(item.statistics.optional is not None for _, item in listed):
        counted += optional_metrics.families(listed)
    pending = Family(
        "nv_inference_pending_request_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
        "gauge",
        [(of, item.pending) for of, item in listed],
    )
    load = Family(
        "nv_model_load_duration_secs",
        "Model load time in seconds",
        "gauge",
        [(of, item.load_seconds) for of, item in listed],
    )
    own = own_metrics.families(listed)
    generated = [(of, item.tokens, item.pending) for of, item in listed if item.tokens is not None]
    of_tokens = token_metrics.families(generated)
    return [success, failure, *counted, pending, load, *own, *of_tokens]


def _labels(version: Version) -> Labels:
    pairs = {"model": version.model, "version": version.version}
    if version.namespace:
        pairs["namespace"] = version.namespace
    pairs.update((f"_{name}", value) for name, value in version.tags.items())
    return labels(pairs)
