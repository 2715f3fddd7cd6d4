"""E-values of the labels of bad events: how much the counts speak for or against a candidate.

The router assigns a request to the candidate with a probability that it knows. Take the bad events (errors, say) in
their order, and of each only its label: was it the candidate's? If bad events are ``r`` times as likely in the
candidate, the label of an event whose request was assigned with probability ``p`` is Bernoulli(``rp / (1 - p + rp)``),
whatever else influences the event: load that drifts, a mix of requests that changes. So the likelihood ratio of ``r``
to a tolerated ``r0`` is a supermartingale with mean at most 1 for every candidate within the tolerance; so is each
mixture of such ratios over several ``r``, over strata, and over times to begin with. By Ville's inequality it ever
exceeds ``1 / alpha`` with probability at most ``alpha``: one may look after every event.

All functions work on arrays whose last axis is that of the probabilities; any axes before it are separate data.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

WORSE: Final = np.geomspace(1.1, 30.0, 16)
"""Relative risks, divided by the tolerated one, that evidence of harm is a mixture over."""
BETTER: Final = 1.0 / np.geomspace(1.05, 30.0, 16)
"""The same for evidence that the candidate is not worse."""
_EITHER: Final = np.concatenate([WORSE, BETTER])
PLACES: Final = 16
"""For strata. Evidence of each has this share, so that how many there will be need not be known."""
_BELOW: Final = np.array([0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85])
_LN2: Final = math.log(2.0)
_RISKS: Final = np.geomspace(1 / 100, 100, 281)


def log_mean(values: Array) -> Array:
    """Return the logarithm of the mean, over the last axis, of what ``values`` are logarithms of."""
    top = np.maximum.reduce(values, -1, keepdims=True)
    mean: Array = np.log(np.add.reduce(np.exp(values - top), -1) / values.shape[-1]) + np.squeeze(top, -1)
    return mean


def log_evidence(candidate: Array, baseline: Array, probabilities: Array, tolerated: float, ratios: Array) -> Array:
    """Return log e-values against the relative risk ``tolerated``, in the direction of ``ratios``.

    ``candidate`` and ``baseline`` are bad events by probability of assignment (last axis).
    """
    of_candidate, of_baseline = _log_ratios(probabilities.tobytes(), tolerated, ratios.tobytes())
    return log_mean(candidate @ of_candidate + baseline @ of_baseline)


@lru_cache(maxsize=256)
def _log_ratios(probabilities: bytes, tolerated: float, ratios: bytes) -> tuple[Array, Array]:
    """Return what an event of the candidate and one of the baseline add to log likelihood ratios."""
    share, of_risks = np.frombuffer(probabilities), np.frombuffer(ratios)
    odds = tolerated * share / (1 - share)
    # Of an odds ratio r: log of (r odds / (1 + r odds)) / (odds / (1 + odds)), and of the complement.
    against = np.log1p(odds)[:, None] - np.log1p(odds[:, None] * of_risks)
    return against + np.log(of_risks), against


def start_weights(first: int, count: int) -> tuple[Array, float]:
    """Return the weights of beginning with each of ``count`` windows, and that of beginning with a later one.

    The first window is the beginning of the rollout, and has one half. The second has the number ``first``, from 1.
    """
    numbers = np.arange(first, first + count - 1, dtype=float)
    return np.concatenate(([0.5], 0.5 / (numbers * (numbers + 1)))), 0.5 / (first + count - 1)


def _since(counts: Array) -> Array:
    """Return the counts from each window on."""
    since: Array = counts[..., ::-1, :, :].cumsum(axis=-3)[..., ::-1, :, :]
    return since


def _with_sum(counts: Array) -> Array:
    """Return the counts with one more stratum, which is all together."""
    return np.concatenate([counts, np.add.reduce(counts, -2, keepdims=True)], -2)


def log_harm(
    candidate: Array, baseline: Array, probabilities: Array, tolerated: float, first: int = 1
) -> tuple[Array, Array]:
    """Return log e-values that the candidate is worse than ``tolerated``: of all together, and by stratum.

    The counts have the axes (..., window, stratum, probability). ``first`` is the number of the second window:
    if it is not 1, there were others, whose counts are in the first window. Half of the evidence begins with the
    rollout, the other half with one of the windows, so that a candidate that becomes worse late is not acquitted for
    its past. Of each, half is about all strata together, half the mean over strata.
    """
    found = log_evidence(_with_sum(_since(candidate)), _with_sum(_since(baseline)), probabilities, tolerated, WORSE)
    pooled, strata = found[..., -1], found[..., :-1]
    # The mean over all places: e-values of strata that were not seen are 1.
    top = np.maximum(np.maximum.reduce(strata, -1), 0.0)
    places = np.add.reduce(np.exp(strata - top[..., None]), -1) + (PLACES - strata.shape[-1]) * np.exp(-top)
    begun = np.logaddexp(pooled, np.log(places / PLACES) + top) - _LN2
    weights, later = start_weights(first, begun.shape[-1])
    top = np.maximum(np.maximum.reduce(begun, -1), 0.0)
    total = np.log(np.exp(begun - top[..., None]) @ weights + later * np.exp(-top)) + top
    top = np.maximum(np.maximum.reduce(strata, -2), 0.0)
    mixed = np.einsum("...ws,w->...s", np.exp(strata - top[..., None, :]), weights) + later * np.exp(-top)
    return total, np.log(mixed) + top


def log_safety(candidate: Array, baseline: Array, probabilities: Array, tolerated: float) -> Array:
    """Return log e-values that the candidate is not worse than ``tolerated``; axes (..., probability)."""
    return log_evidence(candidate, baseline, probabilities, tolerated, BETTER)


def log_below(bad: Array, requests: Array, rate: float) -> Array:
    """Return log e-values that bad events are rarer than ``rate`` in one arm, whatever the other does."""
    rates = rate * _BELOW
    good = np.maximum(requests - bad, 0)
    return log_mean(bad[..., None] * np.log(_BELOW) + good[..., None] * np.log((1 - rates) / (1 - rate)))


def log_mismatch(candidate: Array, baseline: Array, probabilities: Array) -> Array:
    """Return log e-values that outcomes of an arm are missing: the labels of all requests do not fit the assignment."""
    return log_evidence(candidate, baseline, probabilities, 1.0, _EITHER)


class GateEvidence(NamedTuple):
    """Log e-values of one gate."""

    worse: Array
    """That the candidate is worse than the gate accepts."""
    not_worse: Array
    """That it is not, or so good that the baseline does not matter."""
    strata: Array
    """That it is worse in each stratum."""


def gate_evidence(
    candidate: Array,
    baseline: Array,
    probabilities: Array,
    bad: Array,
    requests: Array,
    *,
    tolerated: float,
    floor: float,
    first: int = 1,
) -> GateEvidence:
    """Return the evidence of the counts of a gate.

    ``candidate`` and ``baseline`` are units of bad events (..., window, stratum, probability); ``bad`` and ``requests``
    are those of the candidate (...); ``tolerated`` and ``floor`` are the gate's; ``first`` is as in ``log_harm``.
    """
    worse, strata = log_harm(candidate, baseline, probabilities, tolerated, first)
    safety = log_safety(candidate.sum(axis=(-3, -2)), baseline.sum(axis=(-3, -2)), probabilities, tolerated)
    not_worse = np.logaddexp(safety, log_below(bad, requests, floor)) - _LN2
    return GateEvidence(worse, not_worse, strata)


def risk_interval(candidate: Array, baseline: Array, probabilities: Array, level: float) -> tuple[float, float, float]:
    """Return the likeliest relative risk and an interval that contains it at all times with probability ``1 - level``.

    The interval is what two-sided e-values do not reject.
    """
    if not candidate.sum() + baseline.sum():
        return float("nan"), 0.0, float("inf")
    odds = probabilities / (1 - probabilities)
    against = -np.log1p(odds[:, None] * _RISKS)
    likelihood = candidate @ (against + np.log(_RISKS)) + baseline @ against
    evidence = log_mean(likelihood) - likelihood
    kept = _RISKS[evidence < -np.log(level)]
    low = 0.0 if kept[0] == _RISKS[0] else float(kept[0])
    high = float("inf") if kept[-1] == _RISKS[-1] else float(kept[-1])
    return float(_RISKS[likelihood.argmax()]), low, high
