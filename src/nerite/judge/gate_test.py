"""Says of requests whether they are bad by a gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from nerite.judge.gates import METRICS, RateGate, TailGate
from nerite.judge.latency_counts import Floats
from nerite.judge.outcome_batch import LATENCIES, Mask, OutcomeBatch
from nerite.judge.thresholds import BaselineThresholds

FAILED: Final = frozenset({"error", "timeout"})
_MISSED: Final = frozenset({"error", "timeout", "refused"})
_BAD_ENDS: Final = {"errors": FAILED, "goodput": _MISSED}
_TOKEN: Final = LATENCIES.index(METRICS["itl"])


class GateTest:
    """Says of requests whether they are bad by one gate."""

    def __init__(self, gate: RateGate | TailGate, learned: Sequence[tuple[str, float]]) -> None:
        """``learned`` are the thresholds that there are."""
        self._scale = 1.0 + gate.margin if isinstance(gate, TailGate) else 1.0
        self._places = [(LATENCIES.index(pair[0]), learned.index(pair)) for pair in gate.learned]
        """Rows of latencies, and the thresholds that they are held to."""
        self._bad_ends: frozenset[str] = frozenset()
        self._fixed: list[tuple[int, float]] = []
        if isinstance(gate, RateGate):
            self._bad_ends = _BAD_ENDS.get(gate.name, frozenset({gate.name}))
            self._fixed = [(LATENCIES.index(field), limit) for field, limit in gate.objectives]
        self._of_ends = not self._fixed and not self._places

    def bad(self, batch: OutcomeBatch, thresholds: Floats, *, ended: bool) -> tuple[Mask, Mask]:
        """Return which requests are bad, and of which it can be said whether they are.

        It cannot where no threshold is known, nor of a request that was given up before it was too slow.
        ``thresholds`` are those of each request, by place; NaN: unknown.
        """
        bad = np.zeros(batch.size, bool)
        if ended and self._bad_ends:
            for place in batch.failed:
                bad[place] = batch.errors[place] in self._bad_ends
        if self._of_ends:
            return bad, np.full(batch.size, ended)
        known = np.full(batch.size, bool(self._fixed))
        for row, limit in self._fixed:
            bad |= batch.latencies[row] > limit
        if self._places:
            scale = np.where(batch.candidate, self._scale, 1.0)
        for row, index in self._places:
            limits = thresholds[:, index]
            bad |= batch.latencies[row] > limits * scale
            known |= batch.positive[row] & (limits == limits)
        known &= batch.answered
        return bad, bad | known

    def unmatched(self, batch: OutcomeBatch, thresholds: Floats, known: BaselineThresholds) -> Mask:
        """Return for which answered requests there are thresholds for other classes, and none for their own."""
        found = np.zeros(batch.size, bool)
        for row, index in self._places:
            if known.known(index):
                found |= batch.positive[row] & np.isnan(thresholds[:, index])
        found &= batch.answered
        return found

    def patience_us(self, thresholds: tuple[float, ...] | None) -> float:
        """Return the least time after which a request under way is bad."""
        limits = [limit for row, limit in self._fixed if row != _TOKEN]
        if thresholds is not None:
            limits += [thresholds[index] for row, index in self._places if row != _TOKEN]
        return min((limit for limit in limits if not math.isnan(limit)), default=math.inf)
