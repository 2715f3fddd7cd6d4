"""What the comparisons of a shadow have shown: counters, histograms, their metrics, and the status that clients see."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, TypeVar

from nerite.judge.answers import Agreement, AnswerComparison
from nerite.observability.exposition import Metric, MetricTable
from nerite.observability.histogram import Histogram
from nerite.scheduling.shadow_queue import ShadowDrop

_Name = TypeVar("_Name", bound=StrEnum)
_DISTANCES: Final = tuple(10.0**power for power in range(-8, 2))
_RATIOS: Final = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
_STEPS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SECONDS: Final = (*(-step for step in reversed(_STEPS)), 0.0, *_STEPS)


class ShadowResults:
    """Counters of one shadow."""

    __slots__ = (
        "compared", "differing", "distance", "dropped", "elements", "finish_reasons", "labels", "labels_agreed",
        "largest", "latency", "requests", "shared_text",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = 0
        """Requests that were sent to the shadow."""
        self.dropped = dict.fromkeys(ShadowDrop, 0)
        """Requests that were chosen and not compared, by reason."""
        self.compared = dict.fromkeys(Agreement, 0)
        """Comparisons by result."""
        self.labels = self.labels_agreed = 0
        """Rows of scores that were compared, and those with the same label."""
        self.elements = self.differing = 0
        """Numbers that were compared, and those that differ."""
        self.largest = 0.0
        """The largest absolute difference of two numbers."""
        self.finish_reasons = 0
        """Texts that ended for different reasons."""
        self.distance = Histogram(_DISTANCES)
        """Relative distances: of each comparison that of the output that is farthest apart."""
        self.shared_text = Histogram(_RATIOS)
        """Shared beginnings of texts, relative to the longer one."""
        self.latency = Histogram(_SECONDS)
        """Seconds that the shadow took longer."""

    def drop(self, reason: ShadowDrop) -> None:
        """Count a request that is not compared."""
        self.dropped[reason] += 1

    def take(self, comparison: AnswerComparison, slower_us: float) -> None:
        """Count a comparison; ``slower_us`` is how much longer the shadow took."""
        self.compared[comparison.agreement] += 1
        if comparison.agreement not in (Agreement.EQUAL, Agreement.CLOSE, Agreement.DIFFERENT):
            return
        self.latency.note(slower_us / 1e6)
        rows, agreeing = comparison.labels
        self.labels += rows
        self.labels_agreed += agreeing
        for each in comparison.outputs:
            if each.numbers is not None:
                self.elements += each.numbers.compared
                self.differing += each.numbers.differing
                self.largest = max(self.largest, each.numbers.largest)
        if comparison.relative is not None:
            self.distance.note(comparison.relative)
        for text in comparison.texts:
            self.shared_text.note(text.ratio)
        self.finish_reasons += comparison.finish[0] != comparison.finish[1]

    def as_json(self) -> dict[str, Any]:
        """Return the results for a status."""
        done = sum(self.compared.values())
        agreeing = self.compared[Agreement.EQUAL] + self.compared[Agreement.CLOSE]
        return {
            "requests": self.requests,
            "compared": {str(result): count for result, count in self.compared.items() if count},
            "dropped": {str(reason): count for reason, count in self.dropped.items() if count},
            "agreement": agreeing / done if done else None,
            "label_agreement": self.labels_agreed / self.labels if self.labels else None,
            "elements": self.elements,
            "differing": self.differing,
            "largest": self.largest if self.largest < float("inf") else None,
            "distance_p50": _quantile(self.distance, 0.5),
            "distance_p99": _quantile(self.distance, 0.99),
            "shared_text_mean": _mean(self.shared_text),
            "finish_reasons_differ": self.finish_reasons,
            "slower_mean_seconds": _mean(self.latency),
        }


def _named(counts: Mapping[_Name, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items()}


def _mean(values: Histogram) -> float | None:
    count = sum(values.counts)
    return values.total / count if count else None


def _quantile(values: Histogram, share: float) -> float | None:
    """Return the bound of the bucket that a quantile is in; None if there is none."""
    rank, seen = share * sum(values.counts), 0
    for bound, count in zip(values.bounds, values.counts, strict=False):
        seen += count
        if seen and seen >= rank:
            return bound
    return None


METRICS: Final = MetricTable[ShadowResults]((
    Metric("nerite_shadow_requests_total", "counter", "Requests that were sent to the shadow of a route, too",
           lambda shadow: shadow.requests),
    Metric("nerite_shadow_dropped_total", "counter", "Requests chosen for the shadow that were not compared, by reason",
           lambda shadow: _named(shadow.dropped), "reason"),
    Metric("nerite_shadow_compared_total", "counter", "Comparisons of a shadow's answer with the caller's, by result",
           lambda shadow: _named(shadow.compared), "result"),
    Metric("nerite_shadow_labels_total", "counter", "Rows of scores whose labels were compared",
           lambda shadow: shadow.labels),
    Metric("nerite_shadow_labels_agreed_total", "counter", "Those with the same label in both answers",
           lambda shadow: shadow.labels_agreed),
    Metric("nerite_shadow_distance", "histogram", "Relative distance of the output that is farthest apart",
           lambda shadow: shadow.distance),
    Metric("nerite_shadow_text_shared_ratio", "histogram", "Shared beginning of both texts, relative to the longer one",
           lambda shadow: shadow.shared_text),
    Metric("nerite_shadow_latency_difference_seconds", "histogram", "Seconds that the shadow took longer",
           lambda shadow: shadow.latency),
), ("route", "arm"))  # fmt: skip
