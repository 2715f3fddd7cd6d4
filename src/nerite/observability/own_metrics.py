"""The metrics of model versions that Triton lacks, made of their statistics when the page is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from nerite.observability.distribution import Distribution
from nerite.observability.exposition import Family, Value
from nerite.observability.stage_times import BOUNDS
from nerite.observability.statistics import Duration, VersionStatistics

if TYPE_CHECKING:
    from nerite.observability.metrics import Version

Labelled: TypeAlias = tuple[Mapping[str, str], "Version"]
_Sample: TypeAlias = tuple[Mapping[str, str], Value]


def families(versions: Sequence[Labelled], *, counters: bool = True) -> list[Family]:
    """Return the metrics of all versions. Without ``counters`` nothing that counts requests has values."""
    listed = versions if counters else []
    return [
        Family(
            "nerite_request_duration_seconds",
            "Time from a complete request to its last response, of requests that succeeded",
            "histogram",
            [sample for labels, item in listed for sample in _whole(labels, item.statistics)],
        ),
        Family(
            "nerite_stage_duration_seconds",
            "Of that, the time in the queue, and before, during and after the computation",
            "histogram",
            [sample for labels, item in listed for sample in _stages(labels, item.statistics)],
        ),
        Family(
            "nerite_worker_restarts",
            "Workers started in the place of workers that died",
            "counter",
            [(labels, item.restarts) for labels, item in versions],
        ),
    ]


def _whole(labels: Mapping[str, str], of: VersionStatistics) -> Iterator[_Sample]:
    if of.stages is not None and of.success.count:
        yield labels, _histogram(of.stages.whole, of.success)


def _stages(labels: Mapping[str, str], of: VersionStatistics) -> Iterator[_Sample]:
    """Yield those of a version that has had an answer: a page of a thousand models that wait remains short."""
    if of.stages is not None and of.success.count:
        for stage, counts, duration in (
            ("queue", of.stages.queue, of.queue),
            ("input", of.stages.compute_input, of.compute_input),
            ("compute", of.stages.compute_infer, of.compute_infer),
            ("output", of.stages.compute_output, of.compute_output),
        ):
            yield {**labels, "stage": stage}, _histogram(counts, duration)


def _histogram(counts: list[int], duration: Duration) -> Distribution:
    return Distribution.of(BOUNDS, counts, duration.ns / 1e9)
