"""Which backend a model's file is best served by, where several read it. Pure: it is told what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from nerite.core.tensor import Array
from nerite.intake.measurement import Latency

_FASTER: Final = 1.15
"""What another backend has to gain for a model to leave the one that is its file's own."""
_SLOWER: Final = 0.9
"""How much of the own backend's rate at a single row the other one may lose for a gain in batches."""
_ALIKE: Final = 0.02
"""Answers that differ by more, as a part of the largest, are another model's. BF16 alone makes up to 0.01."""


@dataclass(frozen=True)
class Contestant:
    """A backend, what was measured with it, and what it answered to the same request as the others."""

    backend: str
    latencies: Sequence[Latency]
    answers: Mapping[str, Array]

    @property
    def best(self) -> Latency:
        """The batch with the highest rate."""
        return max(self.latencies, key=lambda each: each.per_second)


@dataclass(frozen=True)
class Verdict:
    """Who won, and the figures that say so."""

    winner: Contestant
    reason: str


def verdict(own: Contestant, others: Sequence[Contestant]) -> Verdict:
    """Return which backend to take. ``own`` is the file's own, and stays where another one gains little."""
    fair = [each for each in others if difference(own.answers, each.answers) <= _ALIKE and _is_faster(own, each)]
    if fair:
        winner = max(fair, key=lambda each: each.best.per_second)
        apart = difference(own.answers, winner.answers)
        return Verdict(
            winner, f"{_figures(winner)}, where {_figures(own)}; answers differ by {apart:.2g} of the largest"
        )
    compared = "; ".join(
        _figures(each) if difference(own.answers, each.answers) <= _ALIKE else f"{each.backend} answers something else"
        for each in others
    )
    return Verdict(own, f"{_figures(own)}; {compared}")


def difference(some: Mapping[str, Array], others: Mapping[str, Array]) -> float:
    """Return how far answers are from each other, as a part of the largest number in them; 1 if not comparable."""
    if some.keys() != others.keys():
        return 1.0
    return max((_difference(value, others[name]) for name, value in some.items()), default=0.0)


def _difference(some: Array, other: Array) -> float:
    if some.shape != other.shape or some.dtype != other.dtype:
        return 1.0
    if some.dtype.kind not in "fiu":
        return float(not np.array_equal(some, other))
    wide, far = some.astype(np.float64), other.astype(np.float64)
    if not np.array_equal(np.isfinite(wide), np.isfinite(far)):
        return 1.0
    finite = np.isfinite(wide)
    largest = np.abs(wide[finite]).max(initial=0.0)
    apart = np.abs(wide[finite] - far[finite]).max(initial=0.0)
    return float(apart / largest) if largest else float(apart)


def _is_faster(own: Contestant, other: Contestant) -> bool:
    gains = other.best.per_second >= _FASTER * own.best.per_second
    return gains and other.latencies[0].per_second >= _SLOWER * own.latencies[0].per_second


def _figures(contestant: Contestant) -> str:
    best = contestant.best
    return f"{contestant.backend} has {best.per_second:,.0f}/s, and a single one in {contestant.latencies[0].ms:.2f} ms"
