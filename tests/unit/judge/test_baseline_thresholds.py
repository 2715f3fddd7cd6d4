from __future__ import annotations

import json
import math

import numpy as np
import pytest
from rollout_outcomes import SECOND_NS, STEP_NS, requests, stratum_of

from nerite.judge.outcome import Outcome, Stratum
from nerite.judge.outcome_batch import OutcomeBatch
from nerite.judge.thresholds import BaselineThresholds

P95 = ("latency_us", 0.95)
TOKEN = ("token_us", 0.9)


def learn(thresholds: BaselineThresholds, outcome: Outcome) -> None:
    thresholds.learn(OutcomeBatch([outcome], [0]))


def learned(count: int, *, stratum: Stratum = Stratum(), factor: float = 1.0) -> BaselineThresholds:  # noqa: B008
    thresholds = BaselineThresholds([P95, TOKEN])
    for outcome in requests(count, 0.0, stratum=stratum):
        learn(thresholds, outcome._replace(latency_us=outcome.latency_us * factor))
    return thresholds


def test_a_threshold_is_the_quantile() -> None:
    values = [outcome.latency_us for outcome in requests(1024, 0.0)]
    found = learned(1024).of(Stratum(), math.inf)
    assert found is not None
    assert found[0] == pytest.approx(np.quantile(values, 0.95), rel=0.03)


def test_too_few_requests_have_no_threshold() -> None:
    assert learned(100).of(Stratum(), math.inf) is None
    thresholds = BaselineThresholds([("latency_us", 0.99), P95])
    for outcome in requests(200, 0.0):
        learn(thresholds, outcome)
    found = thresholds.of(Stratum(), math.inf)
    assert found is not None
    assert math.isnan(found[0])
    assert math.isfinite(found[1])


def test_a_request_is_held_to_what_was_in_force_when_it_began() -> None:
    thresholds = learned(128)
    frozen_ns = 128 * STEP_NS
    assert thresholds.of(Stratum(), frozen_ns - 1) is None
    before = thresholds.of(Stratum(), frozen_ns)
    for outcome in requests(128, 0.0, 2, begin_ns=frozen_ns):
        learn(thresholds, outcome._replace(latency_us=outcome.latency_us * 10))
    assert thresholds.of(Stratum(), 255 * STEP_NS) == before
    after = thresholds.of(Stratum(), 256 * STEP_NS)
    assert before is not None
    assert after is not None
    assert after[0] > 5 * before[0]


def test_after_the_first_window_thresholds_change_with_windows_alone() -> None:
    thresholds = learned(1000)
    thresholds.end_window(1000 * STEP_NS)
    before = thresholds.of(Stratum(), math.inf)
    for outcome in requests(3000, 0.0, 2, begin_ns=1000 * STEP_NS):
        learn(thresholds, outcome._replace(latency_us=outcome.latency_us * 10))
    assert thresholds.of(Stratum(), math.inf) == before
    thresholds.end_window(10**6 * SECOND_NS)
    assert thresholds.of(Stratum(), math.inf) != before


def test_a_window_that_ends_early_does_not_end_the_first_look() -> None:
    """A step of a few seconds: the few requests in it may have been slow because both versions had just started."""
    thresholds = learned(200, factor=10)
    thresholds.end_window(200 * STEP_NS)
    before = thresholds.of(Stratum(), math.inf)
    for outcome in requests(5000, 0.0, 2, begin_ns=200 * STEP_NS):
        learn(thresholds, outcome)
    after = thresholds.of(Stratum(), math.inf)
    assert before is not None
    assert after is not None
    assert after[0] < before[0] / 3


def test_older_requests_count_for_half() -> None:
    """1,100 quick ones, then 1,100 slow ones: the median is that of the slow ones, of which there are two thirds."""
    thresholds = BaselineThresholds([("latency_us", 0.5)])
    for latency in (1e3, 1e6):
        for index in range(1100):
            learn(thresholds, Outcome(False, 0.0, index, latency, latency))
        thresholds.end_window(1)
    found = thresholds.of(Stratum(), math.inf)
    assert found is not None
    assert found[0] == pytest.approx(1e6, rel=0.03)


def test_a_rare_class_takes_the_threshold_of_a_wider_one() -> None:
    thresholds = learned(1000, stratum=Stratum("<1k", "", "gold"))
    wanted = thresholds.of(Stratum("<1k", "", "gold"), math.inf)
    assert thresholds.of(Stratum("<1k", "", "new"), math.inf) == wanted
    assert thresholds.of(Stratum("<4k"), math.inf) == wanted


def test_cached_and_uncached_requests_are_never_mixed() -> None:
    thresholds = learned(1000, stratum=stratum_of(500, 400))
    assert thresholds.of(stratum_of(5000, 4000), math.inf) is not None
    assert thresholds.of(stratum_of(500, 0), math.inf) is None
    assert thresholds.of(stratum_of(500, 400, stream=True), math.inf) is None


def test_before_the_first_token_the_greatest_threshold_counts() -> None:
    thresholds = BaselineThresholds([P95])
    for outcome in requests(2000, 0.0, stratum=stratum_of(500, 400, stream=True)):
        learn(thresholds, outcome)
        cold = outcome._replace(stratum=stratum_of(500, 0, stream=True), latency_us=outcome.latency_us * 4)
        learn(thresholds, cold)
    unknown = Stratum("<1k", "", "", True)
    assert thresholds.of(unknown, math.inf) == thresholds.of(stratum_of(500, 0, stream=True), math.inf)
    assert thresholds.of(unknown._replace(stream=False), math.inf) is None


def test_single_responses_have_no_token_time() -> None:
    thresholds = BaselineThresholds([TOKEN])
    for outcome in requests(500, 0.0):
        learn(thresholds, outcome._replace(token_us=0.0))
    found = thresholds.of(Stratum(), math.inf)
    assert found is not None
    assert math.isnan(found[0])
    assert not thresholds.known(0)


def test_the_state_outlives_a_restart() -> None:
    thresholds = learned(700, stratum=stratum_of(500, 400, "gold", True))
    state = json.loads(json.dumps(thresholds.to_json(1000 * STEP_NS)))
    again = BaselineThresholds([P95, TOKEN])
    again.restore(state, 1000 * STEP_NS)
    assert again.to_json(1000 * STEP_NS) == thresholds.to_json(1000 * STEP_NS)


def test_a_stratum_in_words_and_without_what_the_arm_may_have_changed() -> None:
    found = Stratum("<1k", "part")
    assert found.before_assignment == Stratum("<1k")
    assert (found.label, Stratum().label) == ("prompt <1k, cached part", "all requests")
