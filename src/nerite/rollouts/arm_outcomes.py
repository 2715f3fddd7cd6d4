"""Counts of one arm of a rollout: requests, errors and latencies, as they are shown beside those of the other arm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from nerite.judge.latency_counts import LatencyCounts
from nerite.judge.outcome import ENDS
from nerite.judge.outcome_batch import LATENCIES, Mask, OutcomeBatch

FAILURES: Final = frozenset(("error", "timeout"))
"""Ends that are errors of the version, and not of its callers or of the load."""


class ArmOutcomes:
    """How the requests of one arm have ended since the rollout began."""

    def __init__(self) -> None:
        self.ends = dict.fromkeys(ENDS, 0)
        """Requests by how they ended; an empty text stands for success."""
        self.latency = LatencyCounts()
        """Of requests that succeeded."""
        self.first = LatencyCounts()
        """Times to the first response of requests that succeeded."""
        self.token = LatencyCounts()
        """Mean times between responses or tokens of requests that succeeded and had several."""

    @property
    def requests(self) -> int:
        """Number of requests that have ended."""
        return sum(self.ends.values())

    @property
    def answered(self) -> int:
        """Number of requests that the version has answered, well or not."""
        return self.ends[""] + self.errors

    @property
    def errors(self) -> int:
        """Number of requests that failed."""
        return sum(self.ends[end] for end in FAILURES)

    def count(self, batch: OutcomeBatch, arm: Mask) -> None:
        """Count those of a batch that are requests of this arm."""
        succeeded = arm & batch.answered
        self.ends[""] += int(np.count_nonzero(succeeded))
        for place in batch.failed:
            self.ends[batch.errors[place]] += bool(arm[place])
        for field, counts in (("latency_us", self.latency), ("first_us", self.first), ("token_us", self.token)):
            counts.add(batch.buckets_where(LATENCIES.index(field), succeeded))

    def figures(self) -> dict[str, Any]:
        """Return what is shown."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "refused": self.ends["refused"],
            "cancelled": self.ends["cancelled"],
            "p50_ms": _milliseconds(self.latency.quantile(0.5)),
            "p99_ms": _milliseconds(self.latency.quantile(0.99)),
            "first_p95_ms": _milliseconds(self.first.quantile(0.95)),
            "token_p95_ms": _milliseconds(self.token.quantile(0.95)),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the counts; ``of_json`` restores them."""
        return {
            "ends": self.ends,
            "latency": self.latency.to_json(),
            "first": self.first.to_json(),
            "token": self.token.to_json(),
        }

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> ArmOutcomes:
        """Restore counts. Raises an exception of Python for a document of another form."""
        made = cls()
        made.ends = {end: int(document["ends"].get(end, 0)) for end in ENDS}
        made.latency = LatencyCounts.of_json(document["latency"])
        made.first = LatencyCounts.of_json(document["first"])
        made.token = LatencyCounts.of_json(document["token"])
        return made


def _milliseconds(latency_us: float) -> float | None:
    return None if math.isnan(latency_us) else float(f"{latency_us / 1000:.3g}")
