"""The metrics of model versions that Triton lacks, made of their statistics when the page is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from nerite.observability.distribution import Distribution
from nerite.observability.exposition import UNLABELLED, Family, Labels, Sample, joined, label
from nerite.observability.stage_times import BOUNDS
from nerite.observability.statistics import Duration

if TYPE_CHECKING:
    from nerite.observability.metrics import Version

Labelled: TypeAlias = tuple[Labels, "Version"]
_Samples: TypeAlias = Iterable[Sample]


class _Metric(NamedTuple):
    """A metric of a model version."""

    name: str
    type: str
    help: str
    read: Callable[[Version], _Samples]
    """The labels that it has besides those of the version, and its values."""


def families(versions: Sequence[Labelled]) -> list[Family]:
    """Return the metrics of all versions."""
    return [
        Family(
            metric.name,
            metric.help,
            metric.type,
            [(joined(of, more), value) for of, version in versions for more, value in metric.read(version)],
        )
        for metric in _METRICS
    ]


def _whole(version: Version) -> _Samples:
    """Return nothing of a version that has answered nobody yet: a page of a thousand models that wait stays short."""
    of = version.statistics
    if of.stages is None or not of.success.count:
        return ()
    return [(UNLABELLED, Distribution.of(BOUNDS, of.stages.whole, of.success.ns / 1e9, of.stages.exemplars))]


def _stages(version: Version) -> _Samples:
    of = version.statistics
    if of.stages is None or not of.success.count:
        return ()
    return [
        (label("stage", "queue"), _times(of.stages.queue, of.queue)),
        (label("stage", "input"), _times(of.stages.compute_input, of.compute_input)),
        (label("stage", "compute"), _times(of.stages.compute_infer, of.compute_infer)),
        (label("stage", "output"), _times(of.stages.compute_output, of.compute_output)),
    ]


def _times(counts: list[int], duration: Duration) -> Distribution:
    return Distribution.of(BOUNDS, counts, duration.ns / 1e9)


def _batch_sizes(version: Version) -> _Samples:
    """Return how many rows executions had. Each size is counted by itself; the bounds are powers of two."""
    batches = version.statistics.batches
    if not batches:
        return ()
    sizes = Distribution(_powers_up_to(version.most_rows))
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
