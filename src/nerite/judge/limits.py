"""Rules that need no evidence over time: hard limits on gauges, and a candidate that fails from the first."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

from nerite.judge.gates import LimitGate

_READINGS: Final = 5
_VIOLATIONS: Final = 3
"""Of the last readings, that are a violation: one peak is not."""
_STALE_NS: Final = 60_000_000_000

_FIRST: Final = 20
_FAILED: Final = 10
_STEPS: Final = 6
"""Steps of a rollout that begin with a look at the first requests."""
_MAX_CLUSTERS: Final = 4096


class GaugeLimit:
    """A gauge with its limit, and the last readings of it."""

    def __init__(self, gate: LimitGate) -> None:
        self.gate = gate
        self.candidate = self.baseline = math.nan
        self._at_ns: int | None = None
        self._violations: deque[bool] = deque(maxlen=_READINGS)

    def read(self, candidate: float, baseline: float, now_ns: int) -> None:
        """Take a reading; NaN for what is not known."""
        if math.isnan(candidate):
            return
        self.candidate, self.baseline, self._at_ns = candidate, baseline, now_ns
        self._violations.append(self.gate.violated(candidate, baseline))

    @property
    def violated(self) -> bool:
        """Whether the limit is exceeded: restarts at once, others in most of the last readings."""
        return sum(self._violations) >= (1 if self.gate.name == "restarts" else _VIOLATIONS)

    @property
    def violations(self) -> int:
        """Of the last readings, how many were beyond the limit."""
        return sum(self._violations)

    def known(self, now_ns: int) -> bool:
        """Return whether there is a recent reading."""
        return self._at_ns is not None and now_ns - self._at_ns <= _STALE_NS

    def to_json(self, now_ns: int) -> dict[str, Any]:
        """Return the state, with times relative to ``now_ns``."""
        values = [None if math.isnan(value) else value for value in (self.candidate, self.baseline)]
        age = None if self._at_ns is None else now_ns - self._at_ns
        return {"values": values, "age_ns": age, "violations": list(self._violations)}

    def restore(self, state: dict[str, Any], now_ns: int) -> None:
        """Take a state that ``to_json`` has returned."""
        self.candidate, self.baseline = (math.nan if value is None else float(value) for value in state["values"])
        self._at_ns = None if state["age_ns"] is None else now_ns - int(state["age_ns"])
        self._violations.extend(bool(each) for each in state["violations"])


def gauge_text(name: str, value: float) -> str:
    """Return a reading of a gauge for people."""
    if name == "memory" and value >= 2**20:
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:.0%}" if name == "kv_headroom" else f"{value:g}"


class GrossFailure:
    """Notices in each step whether half of its first 20 requests to the candidate failed, unlike the baseline's.

    It looks once. "Unlike" is Fisher's exact test at ``alpha`` divided by the number of steps, so that an outage of
    both is none of the candidate's.
    """

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha / _STEPS
        self._step = 0
        self._counts = [0, 0, 0, 0]
        self._clusters: set[int] = set()
        self.looked = False
        """Nothing more is counted in this step."""
        self.reason = ""
        """Why the candidate is rolled back; empty while it is not."""

    def begin_step(self) -> None:
        """Look at the first requests of another step."""
        if any(self._counts):
            self._step += 1
            self._counts = [0, 0, 0, 0]
            self._clusters.clear()
            self.looked = self._step >= _STEPS

    def observe(self, candidate: bool, failed: bool, cluster: int) -> None:
        """Take a request, the first of each sticky key."""
        if self.looked or cluster in self._clusters:
            return
        if cluster and len(self._clusters) < _MAX_CLUSTERS:
            self._clusters.add(cluster)
        self.add(candidate and failed, candidate, failed and not candidate, not candidate)

    def add(self, candidate_failed: int, candidate: int, baseline_failed: int, baseline: int) -> None:
        """Take counts."""
        if self.looked:
            return
        for index, value in enumerate((candidate_failed, candidate, baseline_failed, baseline)):
            self._counts[index] += value
        if self._counts[1] >= _FIRST:
            self.looked = True
            failed, requests, others_failed, others = self._counts
            chance = fisher(failed, requests, others_failed, others)
            if failed * _FIRST >= _FAILED * requests and chance <= self._alpha:
                self.reason = (
                    f"{failed} of the first {requests} requests to the candidate failed, and {others_failed} of "
                    f"{others} to the baseline"
                )

    def to_json(self) -> dict[str, Any]:
        """Return the state."""
        return {"step": self._step, "counts": self._counts, "looked": self.looked, "reason": self.reason,
                "clusters": sorted(self._clusters)}  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Take a state that ``to_json`` has returned."""
        self._step, self.looked, self.reason = int(state["step"]), bool(state["looked"]), str(state["reason"])
        self._counts = [int(each) for each in state["counts"]]
        self._clusters = {int(each) for each in state["clusters"]}


def fisher(bad: int, requests: int, others_bad: int, others: int) -> float:
    """Return the chance of at least ``bad`` of the bad requests among ``requests``, if the arms are alike."""
    all_bad = bad + others_bad
    everything = _log_ways(requests + others, all_bad)
    return sum(
        math.exp(_log_ways(requests, each) + _log_ways(others, all_bad - each) - everything)
        for each in range(max(bad, all_bad - others), min(all_bad, requests) + 1)
    )


def _log_ways(of: int, taken: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(taken + 1) - math.lgamma(of - taken + 1)
