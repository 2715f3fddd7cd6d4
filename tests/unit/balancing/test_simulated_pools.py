"""What the balancer does for caches and waits, in the simulation that the benchmarks page shows."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from balancing import SCENARIOS, Result, Scenario, Simulation
from balancing_choosers import Chooser, LeastRequests, Nerite, RoundRobin


def play(scenario: Scenario, make: type[Chooser]) -> Result:
    return Simulation(scenario, make, 20.0).run()


def tail(result: Result) -> float:
    return float(np.quantile(result.ttft, 0.95))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_caches_are_used_and_nobody_waits_for_longer(scenario: Scenario) -> None:
    ours = play(scenario, Nerite)
    assert ours.unanswered == 0
    for usual in (play(scenario, RoundRobin), play(scenario, LeastRequests)):
        assert ours.hit_rate >= usual.hit_rate
        assert tail(ours) < tail(usual)


def test_a_killed_member_fails_only_answers_that_had_begun() -> None:
    (scenario,) = (each for each in SCENARIOS if each.killed)
    result = play(scenario, Nerite)
    assert result.unanswered == 0
    assert result.failed < 40


def test_runs_are_reproducible() -> None:
    one, two = play(SCENARIOS[0], Nerite), play(SCENARIOS[0], Nerite)
    assert one.hit_rate == two.hit_rate
    assert list(one.ttft) == list(two.ttft)
