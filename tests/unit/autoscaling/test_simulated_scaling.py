"""What autoscaling saves, and which promises it breaks, in the simulation that the benchmarks page shows."""

from __future__ import annotations

import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from autoscaling import HOUR, RULES, LoadCurve, curves, simulated
from scaled_pool import ScalingOutcome

CURVES = {curve.name: curve for curve in curves(2 * HOUR)}
LEARNS = "Nerite, by the promise"
KNOWS = "Nerite, by the rate of a member"


@cache
def outcome(curve: str, rule: str) -> ScalingOutcome:
    return simulated(CURVES[curve], RULES[rule])


@pytest.mark.parametrize("curve", ["even", "ramp", "daily curve"])
def test_promises_are_kept_on_loads_that_change_slowly(curve: str) -> None:
    found = outcome(curve, LEARNS)
    assert found.late < 0.02
    assert found.member_hours < outcome(curve, "always 12").member_hours


def test_a_step_breaks_fewer_promises_than_with_the_usual_rule() -> None:
    found = outcome("step", LEARNS)
    for target in ("HPA, 50 % of the rate", "HPA, 70 % of the rate"):
        assert found.late < outcome("step", target).late / 1.5
    assert found.member_hours < outcome("step", "HPA, 50 % of the rate").member_hours


def test_what_is_learned_costs_little_more_than_what_is_known() -> None:
    for curve in ("even", "ramp", "daily curve"):
        assert outcome(curve, LEARNS).member_hours < 1.5 * outcome(curve, KNOWS).member_hours


@pytest.mark.parametrize("curve", CURVES.values(), ids=lambda curve: curve.name)
def test_the_number_does_not_flap(curve: LoadCurve) -> None:
    found = outcome(curve.name, LEARNS)
    turns = [one != other for one, other in pairwise(found.wanted)]
    assert sum(turns) < curve.seconds / 40
