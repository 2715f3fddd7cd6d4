"""What the judge says, with the numbers that led to it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from nerite.judge.confidence import UNKNOWN, Interval


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


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """One gate."""

    gate: str
    decision: Decision
    reason: str
    """The numbers in words."""
    worse: float = 0.0
    """log10 of the e-value that the candidate is worse than the gate accepts."""
    worse_boundary: float = math.inf
    """Rolled back from here on."""
    not_worse: float = 0.0
    """log10 of the e-value that the candidate is not worse than the gate accepts."""
    not_worse_boundary: float = math.inf
    candidate: ArmCounts = ArmCounts()
    baseline: ArmCounts = ArmCounts()
    risk: Interval = UNKNOWN
    """Relative risk of a bad event, candidate to baseline; above ``tolerated`` is worse."""
    tolerated: float = math.nan
    worst: str = ""
    """The stratum with most evidence of harm, if there is any."""


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
        plain = _finite(asdict(self))
        assert isinstance(plain, dict)
        return plain


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
