"""What the judge says, with the numbers that led to it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, Final, Protocol

from nerite.judge.confidence import UNKNOWN, Interval, quantile_interval, rate_interval
from nerite.judge.evidence import Array, risk_interval
from nerite.judge.latency_counts import LatencyCounts


class Decision(StrEnum):
    """What follows from the evidence so far."""

    CONTINUE = "continue"
    """Neither is shown: go on collecting."""
    ROLL_BACK = "roll_back"
    """The candidate is worse than a gate accepts. Final."""
    NOT_WORSE = "not_worse"
    """The candidate is not worse than any gate accepts: it may be promoted."""


@dataclass(frozen=True, slots=True)
class ArmCounts:
    """What a gate has counted of one arm."""

    requests: int = 0
    bad: int = 0
    rate: Interval = UNKNOWN
    """Of bad requests, with an interval that holds at all times."""
    value: Interval = UNKNOWN
    """Of a latency gate: the quantile in microseconds. Of a gauge: its last reading."""


class GateFigures(Protocol):
    """What is shown of a gate, and does not decide."""

    @property
    def reason(self) -> str:
        """The numbers in words."""

    @property
    def arms(self) -> tuple[ArmCounts, ArmCounts]:
        """Candidate and baseline."""

    @property
    def risk(self) -> Interval:
        """Relative risk of a bad event, candidate to baseline."""


class LimitFigures:
    """Those of a gauge."""

    risk = UNKNOWN

    def __init__(self, reason: str, candidate: float, baseline: float) -> None:
        self.reason = reason
        one, other = (ArmCounts(value=Interval(value, value, value)) for value in (candidate, baseline))
        self.arms = one, other


class EventFigures:
    """Those of bad events, as they were when the verdict was returned. Computed once they are asked for."""

    def __init__(
        self,
        level: float,
        requests: tuple[int, int],
        bad: tuple[int, int],
        units: tuple[Array, Array, Array],
        quantile: float,
        latencies: tuple[LatencyCounts, LatencyCounts] | None,
        worst: str,
    ) -> None:
        """Take pairs of the candidate and the baseline; ``units`` are those by probability, and the probabilities.

        ``latencies`` are those that the gate compares a ``quantile`` of.
        """
        self._level = level
        self._requests, self._bad = requests, bad
        self._units = units
        self._quantile, self._latencies = quantile, latencies
        self._worst = worst

    @cached_property
    def arms(self) -> tuple[ArmCounts, ArmCounts]:
        """Candidate and baseline."""
        return self._arm(0), self._arm(1)

    def _arm(self, arm: int) -> ArmCounts:
        requests, bad = self._requests[arm], self._bad[arm]
        value = UNKNOWN
        if self._latencies is not None:
            value = quantile_interval(self._latencies[arm], self._quantile, self._level)
        return ArmCounts(requests, bad, rate_interval(bad, requests, self._level), value)

    @cached_property
    def risk(self) -> Interval:
        """Relative risk of a bad event, candidate to baseline."""
        return Interval(*risk_interval(*self._units, self._level)) if self._units[2].size else UNKNOWN

    @cached_property
    def reason(self) -> str:
        """The numbers in words."""
        candidate, baseline = self.arms
        if not candidate.requests:
            return "no request to the candidate could be compared yet"
        parts = []
        if not math.isnan(candidate.value.value + baseline.value.value):
            parts.append(f"{candidate.value.value / 1000:,.1f} ms against {baseline.value.value / 1000:,.1f} ms")
        parts.append(
            f"{candidate.bad:,} of {candidate.requests:,} requests bad ({candidate.rate.value:.2%}) against "
            f"{baseline.bad:,} of {baseline.requests:,} ({baseline.rate.value:.2%})"
        )
        risk = self.risk
        if not math.isnan(risk.value):
            parts.append(f"relative risk {risk.value:.2g}, between {risk.low:.2g} and {risk.high:.2g}")
        if self._worst:
            parts.append(f"worst for {self._worst}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """One gate."""

    gate: str
    decision: Decision
    figures: GateFigures
    worse: float = 0.0
    """log10 of the e-value that the candidate is worse than the gate accepts."""
    worse_boundary: float = math.inf
    """Rolled back from here on."""
    not_worse: float = 0.0
    """log10 of the e-value that the candidate is not worse than the gate accepts."""
    not_worse_boundary: float = math.inf
    tolerated: float = math.nan
    """Relative risk above which the candidate is worse."""
    worst: str = ""
    """The stratum with most evidence of harm, if there is any."""

    @property
    def reason(self) -> str:
        """The numbers in words."""
        return self.figures.reason

    @property
    def candidate(self) -> ArmCounts:
        """What was counted of the candidate."""
        return self.figures.arms[0]

    @property
    def baseline(self) -> ArmCounts:
        """What was counted of the baseline."""
        return self.figures.arms[1]

    @property
    def risk(self) -> Interval:
        """Relative risk of a bad event, candidate to baseline; above ``tolerated`` is worse."""
        return self.figures.risk

    def to_json(self) -> dict[str, Any]:
        """Return the gate as ``Verdict.to_json`` has it."""
        plain = {name: _finite(getattr(self, name)) for name in _GATE_FIELDS}
        return {**plain, **{name: _finite(asdict(getattr(self, name))) for name in ("candidate", "baseline")}}


_GATE_FIELDS: Final = (
    "gate", "decision", "reason", "worse", "worse_boundary", "not_worse", "not_worse_boundary", "risk", "tolerated",
    "worst",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole."""

    decision: Decision
    reason: str
    gates: tuple[GateVerdict, ...]
    holds: tuple[str, ...]
    """Why the candidate is not promoted although no gate is against it."""
    warnings: tuple[str, ...]
    """Why the arms may not be comparable."""
    candidate_requests: int
    baseline_requests: int
    at_ns: int

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON has it: null for what is not known or not bounded."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**{name: _finite(value) for name, value in plain.items() if name != "gates"},
                "gates": [gate.to_json() for gate in self.gates]}  # fmt: skip


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Interval):
        return {name: _finite(each) for name, each in value._asdict().items()}
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, StrEnum) else value
