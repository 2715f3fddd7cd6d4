"""The evidence of a rollout over time: bounded, and the same after a restart of the server."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

from nerite.judge.verdict import Decision, GateVerdict
from nerite.rollouts.evidence_curve import MAX_POINTS, EvidenceCurve

SECOND = 1_000_000_000
LIMIT = GateVerdict("memory<=1GiB", Decision.CONTINUE, "")


def gate(worse: float, not_worse: float = 0.0) -> GateVerdict:
    return GateVerdict("errors", Decision.CONTINUE, "", worse, 2.6, not_worse, 1.3)


def grown(ticks: int) -> EvidenceCurve:
    """Return a curve that has been told of evidence every half second; harm grows by 1 in a second."""
    curve = EvidenceCurve()
    for tick in range(ticks):
        curve.note(tick * SECOND // 2, 5 if tick < ticks // 2 else 25, [gate(tick / 2, -tick / 2), LIMIT])
    return curve


@pytest.mark.parametrize("ticks", [1, 2, 3, 10, 479, 480, 481, 482, 10_001])
def test_the_curve_is_bounded_and_keeps_its_first_and_last_point(ticks: int) -> None:
    found = grown(ticks).as_json()
    seconds = found["seconds"]
    assert (seconds[0], seconds[-1]) == (0, (ticks - 1) / 2)
    assert min(MAX_POINTS // 2, math.ceil(ticks / 2)) <= len(seconds) <= MAX_POINTS
    assert {later - earlier for earlier, later in pairwise(seconds[:-1])} <= {found["spacing"]}
    assert found["gates"] == {"errors": {"worse": seconds, "not_worse": [-each for each in seconds]}}
    assert found["weight"][-1] == 25
    assert len(found["weight"]) == len(seconds)


@pytest.mark.parametrize("ticks", [0, 1, 11, 2000])
def test_a_curve_goes_on_after_a_restart(ticks: int) -> None:
    before = grown(ticks)
    document = json.loads(json.dumps(before.as_json(), allow_nan=False))
    after = EvidenceCurve.of_json(document)
    assert after.as_json() == document
    for now in range(3):
        after.note(now * SECOND + 77, 50, [gate(9)])
    assert after.as_json()["seconds"][-1] == max(0, ticks - 1) / 2 + 2, "downtime is left out"


def test_a_gate_without_a_boundary_has_no_curve() -> None:
    curve = EvidenceCurve()
    curve.note(0, 1, [LIMIT])
    curve.note(SECOND, 1, [LIMIT])
    document = curve.as_json()
    assert (document["gates"], document["seconds"]) == ({}, [0, 1])
    assert EvidenceCurve.of_json(document).as_json() == document


def test_evidence_that_is_not_finite_is_not_drawn() -> None:
    curve = EvidenceCurve()
    curve.note(0, 1, [gate(math.inf, -math.inf)])
    assert curve.as_json()["gates"]["errors"] == {"worse": [None], "not_worse": [None]}


@pytest.mark.parametrize("wrong", [{"gates": 1}, {"seconds": [1]}, {"weight": None}, {"spacing": "often"}])
def test_another_form_of_curve_is_an_error(wrong: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        EvidenceCurve.of_json({**grown(9).as_json(), **wrong})
