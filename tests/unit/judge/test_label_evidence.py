"""E-values of labels: by hand, and Ville's bound in small simulations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nerite.judge.evidence import (
    BETTER,
    PLACES,
    WORSE,
    log_below,
    log_evidence,
    log_harm,
    log_mismatch,
    log_safety,
    risk_interval,
    start_weights,
)

HALF = np.array([0.5])


def likelihood(hits: int, misses: int, probability: float, risk: float) -> float:
    chance = risk * probability / (1 - probability + risk * probability)
    return chance**hits * (1 - chance) ** misses


@pytest.mark.parametrize(("hits", "misses"), [(0, 0), (1, 0), (0, 1), (7, 2), (40, 60)])
@pytest.mark.parametrize("tolerated", [1.0, 1.5])
@pytest.mark.parametrize("probability", [0.01, 0.3])
def test_the_e_value_is_the_mean_of_likelihood_ratios(
    hits: int, misses: int, tolerated: float, probability: float
) -> None:
    found = log_evidence(np.array([hits]), np.array([misses]), np.array([probability]), tolerated, WORSE)
    null = likelihood(hits, misses, probability, tolerated)
    ratios = [likelihood(hits, misses, probability, tolerated * ratio) / null for ratio in WORSE]
    assert math.exp(found) == pytest.approx(sum(ratios) / len(ratios))


def test_probabilities_of_assignment_multiply() -> None:
    probabilities = np.array([0.1, 0.5])
    one = WORSE[:1]
    both = log_evidence(np.array([3, 2]), np.array([1, 4]), probabilities, 1.0, one)
    apart = [
        log_evidence(np.array([hits]), np.array([misses]), np.array([probability]), 1.0, one)
        for hits, misses, probability in ((3, 1, 0.1), (2, 4, 0.5))
    ]
    assert both == pytest.approx(sum(apart))


def test_harm_combines_starts_and_strata_by_hand() -> None:
    """Two windows, two strata: half of the rollout from its start, a quarter from the second window."""
    candidate = np.array([[[1.0], [0.0]], [[4.0], [1.0]]])
    baseline = np.array([[[2.0], [1.0]], [[0.0], [2.0]]])

    def value(hits: float, misses: float) -> float:
        return math.exp(log_evidence(np.array([hits]), np.array([misses]), HALF, 1.5, WORSE))

    def since(first: tuple[float, float], second: tuple[float, float]) -> float:
        pooled = value(first[0] + second[0], first[1] + second[1])
        return (pooled + (value(*first) + value(*second) + PLACES - 2) / PLACES) / 2

    by_hand = since((5, 2), (1, 3)) / 2 + since((4, 0), (1, 2)) / 4 + 1 / 4
    total, strata = log_harm(candidate, baseline, HALF, 1.5)
    assert math.exp(total) == pytest.approx(by_hand)
    assert math.exp(strata[0]) == pytest.approx(value(5, 2) / 2 + value(4, 0) / 4 + 1 / 4)


@pytest.mark.parametrize(("first", "count"), [(1, 1), (1, 2), (1, 12), (5, 12)])
def test_the_weights_of_starts_are_at_most_one_together(first: int, count: int) -> None:
    weights, later = start_weights(first, count)
    assert len(weights) == count
    forgotten = sum(0.5 / (number * (number + 1)) for number in range(1, first))
    assert weights.sum() + later + forgotten == pytest.approx(1)


def test_evidence_of_harm_grows_with_bad_events_of_the_candidate_and_falls_with_the_baselines() -> None:
    hits = np.arange(30.0)
    fixed = np.full(30, 10.0)
    up = log_evidence(hits[:, None], fixed[:, None], HALF, 1.0, WORSE)
    down = log_evidence(fixed[:, None], hits[:, None], HALF, 1.0, WORSE)
    assert (np.diff(up) > 0).all()
    assert (np.diff(down) < 0).all()
    assert (np.diff(log_safety(hits[:, None], fixed[:, None], HALF, 1.5)) < 0).all()


def test_nothing_counted_is_no_evidence() -> None:
    nothing = np.zeros((1, 1, 1))
    total, strata = log_harm(nothing, nothing, HALF, 1.5)
    assert total == pytest.approx(0)
    assert strata == pytest.approx([0])
    assert log_safety(np.zeros(1), np.zeros(1), HALF, 1.5) == pytest.approx(0)
    assert log_below(np.array(0.0), np.array(0.0), 0.01) == pytest.approx(0)


def walked(runs: int, events: int, chance: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    labels = np.random.default_rng(seed).random((runs, events)) < chance
    return labels.cumsum(axis=1).astype(float), (~labels).cumsum(axis=1).astype(float)


@pytest.mark.parametrize("probability", [0.05, 0.5])
@pytest.mark.parametrize("tolerated", [1.0, 1.5])
def test_ville(probability: float, tolerated: float) -> None:
    """At the tolerated risk exactly, looked at after each of 400 events, e-values reach 20 in at most 5 % of runs."""
    chance = tolerated * probability / (1 - probability + tolerated * probability)
    candidate, baseline = walked(2000, 400, chance, seed=3)
    counts = candidate[..., None, None, None], baseline[..., None, None, None]
    harm, _ = log_harm(*counts, np.array([probability]), tolerated)
    safety = log_safety(candidate[..., None], baseline[..., None], np.array([probability]), tolerated)
    for values in (harm, safety):
        reached = (values.max(axis=1) >= math.log(20)).mean()
        assert 0 < reached <= 0.05


def test_ville_where_the_candidate_may_have_changed() -> None:
    """Ten windows, any of which may be the beginning."""
    random = np.random.default_rng(4)
    labels = random.random((1000, 10, 40)) < 0.5
    reached = np.zeros(1000, bool)
    for window in range(10):
        for event in (9, 19, 29, 39):
            candidate = labels[:, : window + 1].sum(axis=2).astype(float)
            candidate[:, window] = labels[:, window, : event + 1].sum(axis=1)
            total = np.full(window + 1, 40.0)
            total[window] = event + 1
            counts = candidate[..., None, None], (total - candidate)[..., None, None]
            reached |= log_harm(*counts, HALF, 1.0)[0] >= math.log(20)
    assert 0 < reached.mean() <= 0.05


def test_ville_for_a_rate_below_a_limit() -> None:
    random = np.random.default_rng(5)
    bad = (random.random((2000, 2000)) < 0.01).cumsum(axis=1).astype(float)
    requests = np.arange(1.0, 2001)
    reached = (log_below(bad, requests[None, :], 0.01).max(axis=1) >= math.log(20)).mean()
    assert 0 < reached <= 0.05


def test_a_better_candidate_is_even_less_likely_to_look_worse() -> None:
    candidate, baseline = walked(500, 300, 1 / 3, seed=6)
    harm, _ = log_harm(candidate[..., None, None, None], baseline[..., None, None, None], HALF, 1.0)
    assert (harm.max(axis=1) >= math.log(20)).mean() == 0


def test_a_late_change_is_found_in_spite_of_a_good_past() -> None:
    """1,000 bad events of two equal arms, and then 25 that are all the candidate's."""
    candidate = np.array([500.0, 25.0])[:, None, None]
    baseline = np.array([500.0, 0.0])[:, None, None]
    assert log_harm(candidate, baseline, HALF, 1.0)[0] > math.log(100)
    assert log_harm(candidate.sum(axis=0)[None], baseline.sum(axis=0)[None], HALF, 1.0)[0] < 0


def test_missing_outcomes_are_noticed_in_both_directions() -> None:
    for candidate, baseline, noticed in ((100, 900, False), (60, 900, True), (150, 900, True)):
        found = log_mismatch(np.array([float(candidate)]), np.array([float(baseline)]), np.array([0.1]))
        assert (found > math.log(20)) == noticed


def test_the_interval_of_the_risk_contains_it() -> None:
    value, low, high = risk_interval(np.array([200.0]), np.array([100.0]), HALF, 0.05)
    assert low < 2 < high
    assert value == pytest.approx(2, rel=0.03)
    assert low > 1
    assert high < 3.5
    value, low, high = risk_interval(np.array([0.0]), np.array([30.0]), HALF, 0.05)
    assert low == 0
    assert high < 1
    value, low, high = risk_interval(np.zeros(1), np.zeros(1), HALF, 0.05)
    assert math.isnan(value)
    assert (low, high) == (0, math.inf)


def test_alternatives_are_on_their_side_of_the_line() -> None:
    assert (WORSE > 1).all()
    assert (BETTER < 1).all()
