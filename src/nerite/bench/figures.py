"""What a measurement shows: rates, latencies, tokens, and what it cost the client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nerite.bench.measurement import Window
from nerite.bench.objectives import Objective, good, measured
from nerite.bench.records import Records
from nerite.core.tensor import Array

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


@dataclass(frozen=True, slots=True)
class Spread:
    """How a time is distributed, in milliseconds."""

    mean: float
    deviation: float
    least: float
    most: float
    quantiles: Mapping[str, float]

    @classmethod
    def of(cls, seconds: Array) -> Spread:
        """Summarise times, of which there is at least one."""
        ms = seconds * 1e3
        values = np.quantile(ms, list(QUANTILES.values()), method="inverted_cdf")
        found = dict(zip(QUANTILES, values.tolist(), strict=True))
        return cls(float(ms.mean()), float(ms.std()), float(ms.min()), float(ms.max()), found)

    def __getitem__(self, quantile: str) -> float:
        return self.quantiles[quantile]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What only answers in parts have."""

    first: Spread
    """From when a request was due to its first token."""
    between: Spread | None
    """From token to token, on average over an answer: a value for each answer of more than one token."""
    gaps: Spread | None
    """Between two parts of an answer, as they came: a value for each pair."""
    rate: float
    """Tokens a second, of all answers together."""
    mean: float
    """Tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What some windows show together."""

    seconds: float
    answered: int
    rate: float
    """Answers a second."""
    failed: int
    failures: Mapping[str, int]
    latency: Spread
    lag: Spread
    """From when a request was due to when it was sent."""
    tokens: Tokens | None
    goodput: float | None
    """Good answers a second; None without objectives."""
    latencies: Array = field(repr=False, default_factory=lambda: np.empty(0))
    """Quantiles of the latency in milliseconds, evenly spaced, for a plot."""


def figures(windows: Sequence[Window], objectives: tuple[Objective, ...] = ()) -> Figures | None:
    """Return what windows show together; None if no request was answered in them."""
    records = Records.joined([window.records for window in windows])
    if not len(records.ended):
        return None
    seconds = sum(window.seconds for window in windows)
    answered = len(records.ended)
    return Figures(
        seconds=seconds,
        answered=answered,
        rate=answered / seconds,
        failed=len(records.failed),
        failures=Counter(records.reasons),
        latency=Spread.of(records.latency),
        lag=Spread.of(records.sent - records.due),
        tokens=_tokens(records, seconds) if records.streamed else None,
        goodput=good(records, objectives) / seconds if objectives else None,
        latencies=np.quantile(records.latency, np.linspace(0, 1, 201)) * 1e3,
    )


def _tokens(records: Records, seconds: float) -> Tokens:
    several = records.tokens > 1
    between = measured(records, "itl")[several]
    total = float(records.tokens.sum())
    return Tokens(
        first=Spread.of(measured(records, "ttft")),
        between=Spread.of(between) if len(between) else None,
        gaps=Spread.of(records.gaps) if len(records.gaps) else None,
        rate=total / seconds,
        mean=total / len(records.tokens),
    )
