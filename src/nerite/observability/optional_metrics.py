"""The metrics that Triton has where a flag says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from nerite.observability.exposition import Family, Labels, Sample
from nerite.observability.quantiles import Summed
from nerite.observability.statistics import Duration, VersionStatistics

if TYPE_CHECKING:
    from nerite.observability.metrics import Version

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


def families(versions: Sequence[tuple[Labels, Version]]) -> list[Family]:
    """Return the histogram and the summaries that are counted."""
    found = [Family(name, text, "summary", _summaries(versions, stage, read)) for name, stage, text, read in _SUMMARIES]
    first = [
        (labels, item.statistics.optional.first_response)
        for labels, item in versions
        if item.statistics.optional is not None and item.statistics.optional.first_response is not None
    ]
    found.append(Family("nv_inference_first_response_histogram_ms", _FIRST_RESPONSE, "histogram", first))
    return [family for family in found if family.samples]


def _summaries(versions: Sequence[tuple[Labels, Version]], stage: str, read: _Read) -> list[Sample]:
    """Return those of a stage."""
    samples: list[Sample] = []
    for labels, item in versions:
        counted = item.statistics
        if counted.optional is None or stage in _OTHERS[item.cached]:
            continue
        quantiles = counted.optional.quantiles(stage)
        if quantiles is not None:
            duration = read(counted)
            samples.append((labels, Summed(duration.count, duration.ns // 1000, quantiles)))
    return samples
