"""Counts of one arm of a rollout: requests, errors and latencies, as they are shown beside those of the other arm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from nerite.judge.outcome import ENDS, Outcome

_WIDTH: Final = math.log(1.05)
"""Width of a bucket of latencies, as a logarithm."""
_MAX_BUCKET: Final = 600
"""Of 60 days in microseconds; longer ones are counted here."""
FAILURES: Final = frozenset(("error", "timeout"))
"""Ends that are errors of the version, and not of its callers or of the load."""


class LatencyCounts:
    """Numbers of latencies by size. Quantiles are exact to 5 %."""

    def __init__(self) -> None:
        self._counts = [0] * (_MAX_BUCKET + 1)
        self.total = 0

    def note(self, latency_us: float) -> None:
        """Count a latency."""
        bucket = int(math.log(latency_us) / _WIDTH) if latency_us > 1 else 0
        self._counts[min(bucket, _MAX_BUCKET)] += 1
        self.total += 1

    def quantile_ms(self, quantile: float) -> float | None:
        """Return a quantile in milliseconds; None if nothing was counted."""
        rank = math.ceil(self.total * quantile)
        if not rank:
            return None
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                return math.exp((bucket + 0.5) * _WIDTH) / 1000
        return None

    def as_json(self) -> dict[str, int]:
        """Return the counts; ``of_json`` restores them."""
        return {str(bucket): count for bucket, count in enumerate(self._counts) if count}

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> LatencyCounts:
        """Restore counts. Raises ``ValueError``, ``TypeError`` or ``IndexError`` for a document of another form."""
        made = cls()
        for bucket, count in document.items():
            made._counts[int(bucket)] = int(count)
        made.total = sum(made._counts)
        return made


class ArmOutcomes:
    """How the requests of one arm have ended since the rollout began."""

    def __init__(self) -> None:
        self.ends = dict.fromkeys(ENDS, 0)
        """Requests by how they ended; an empty text stands for success."""
        self.latency = LatencyCounts()
        """Of requests that succeeded."""
        self.first = LatencyCounts()
        """Times to the first response of requests that succeeded."""

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

    def observe(self, outcome: Outcome) -> None:
        """Count a request."""
        self.ends[outcome.error] += 1
        if not outcome.error:
            self.latency.note(outcome.latency_us)
            self.first.note(outcome.first_us)

    def figures(self) -> dict[str, Any]:
        """Return what is shown."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "refused": self.ends["refused"],
            "cancelled": self.ends["cancelled"],
            "p50_ms": _rounded(self.latency.quantile_ms(0.5)),
            "p99_ms": _rounded(self.latency.quantile_ms(0.99)),
            "first_p95_ms": _rounded(self.first.quantile_ms(0.95)),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the counts; ``of_json`` restores them."""
        return {"ends": self.ends, "latency": self.latency.as_json(), "first": self.first.as_json()}

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> ArmOutcomes:
        """Restore counts. Raises an exception of Python for a document of another form."""
        made = cls()
        made.ends = {end: int(document["ends"].get(end, 0)) for end in ENDS}
        made.latency = LatencyCounts.of_json(document["latency"])
        made.first = LatencyCounts.of_json(document["first"])
        return made


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
