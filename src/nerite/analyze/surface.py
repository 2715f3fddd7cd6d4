"""What measurements of some points let expect of the others: a Gaussian process. Pure.

Points that differ little answer much alike, so each measurement says something about all of them, and several near
each other say more than one that is not exact. What is expected are ranks, not rates: it does not matter then by how
much the bad ones are worse, or how one that exceeds the limits compares with one that keeps to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from nerite.core.tensor import Array

_REACH: Final = 1.0
"""How far a measurement is heard of. An axis is as long as 1, however many values it has."""
_NOISE: Final = 0.15
"""How far, in standard deviations of all of them, a measurement may be from the truth."""
_STANDARD: Final = NormalDist()


def promise(places: Array, known: Sequence[int], order: Sequence[int]) -> Array:
    """Return for each of ``places``, which are rows of coordinates, how much better it may be than all that are known.

    ``known`` are those that were measured, and ``order`` how many of them are worse than each.
    """
    measured = places[list(known)]
    values = np.array([_STANDARD.inv_cdf((rank + 0.5) / len(known)) for rank in order])
    own = _likeness(measured, measured) + _NOISE**2 * np.eye(len(known))
    others = _likeness(places, measured)
    solved = np.linalg.solve(own, np.column_stack([values, others.T]))
    expected = others @ solved[:, 0]
    deviation = np.sqrt(np.maximum(1e-9, 1 - np.einsum("ij,ji->i", others, solved[:, 1:])))
    ahead = (expected - expected[list(known)].max()) / deviation
    above = np.array([_STANDARD.cdf(each) for each in ahead.tolist()])
    there = np.array([_STANDARD.pdf(each) for each in ahead.tolist()])
    improvement: Array = deviation * (ahead * above + there)
    improvement[list(known)] = 0.0
    return improvement


def _likeness(some: Array, others: Array) -> Array:
    """Return how much each is like each of the others, from 0 to 1 (Matérn 3/2, axis by axis)."""
    away = np.sqrt(3) / _REACH * np.abs(some[:, None] - others[None])
    likeness: Array = np.prod((1 + away) * np.exp(-away), axis=2)
    return likeness
