"""Objectives for single requests: what makes an answer a good one, and how many were."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nerite.bench.records import Records
from nerite.core.tensor import Array

MEASURES = {
    "latency": "until the answer is complete",
    "ttft": "until its first token",
    "itl": "between two tokens, on average over an answer",
}
"""What an objective may be about, all in milliseconds."""


@dataclass(frozen=True, slots=True)
class Objective:
    """An answer is good if its ``measure`` is at most ``milliseconds``."""

    measure: str
    milliseconds: float

    def met(self, records: Records) -> Array:
        """Say of each answer whether it is good."""
        met: Array = measured(records, self.measure) * 1e3 <= self.milliseconds
        return met


def measured(records: Records, measure: str) -> Array:
    """Return the seconds of a measure for each answer. What did not come in parts came as one."""
    if measure == "latency":
        return records.latency
    if not records.streamed:
        return records.latency if measure == "ttft" else np.zeros(len(records.ended))
    if measure == "ttft":
        return records.first - records.due
    between: Array = (records.last - records.first) / np.maximum(records.tokens - 1, 1)
    return between


def good(records: Records, objectives: tuple[Objective, ...]) -> int:
    """Return how many answers meet all objectives."""
    met = np.ones(len(records.ended), bool)
    for objective in objectives:
        met &= objective.met(records)
    return int(met.sum())
