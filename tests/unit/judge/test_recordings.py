from __future__ import annotations

import json
from typing import Any

import pytest
from rollout_outcomes import STEP_NS, failing, requests

from nerite.judge.gates import parse_gate
from nerite.judge.outcome import Outcome, Stratum
from nerite.judge.replay import RecordingError, outcome_from_json, outcome_to_json, replay
from nerite.judge.verdict import Decision

EVENT: dict[str, Any] = {"arm": "candidate", "probability": 0.1, "at_ns": 1, "latency_us": 900}


def test_an_outcome_outlives_its_recording() -> None:
    outcome = Outcome(True, 0.25, 7, 900.0, 400.0, 20.0, "timeout", Stratum("<1k", "part", "gold", True), 99)
    assert outcome_from_json(json.loads(json.dumps(outcome_to_json(outcome)))) == outcome


def test_what_is_missing_has_defaults() -> None:
    assert outcome_from_json(EVENT) == Outcome(True, 0.1, 1, 900, 900)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"arm": "canary"}, "'arm' is neither"),
        ({"latency_us": None}, "'latency_us' is no number"),
        ({"latency_us": -1}, "'latency_us' is no number"),
        ({"token_us": True}, "'token_us' is no number"),
        ({"probability": 2}, "more than 1"),
        ({"error": "oops"}, "'error' is none of"),
        ({"stratum": {"size": 1}}, "'stratum' has other keys"),
        ({"latency": 1}, "unknown key 'latency'"),
        ({"at_ns": 1.5}, "'at_ns' is no integer"),
        ({"gauge": "memory", "candidate": "much"}, "neither a number nor null"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(change: dict[str, Any], why: str) -> None:
    with pytest.raises(RecordingError, match="event 2 of the recording") as caught:
        replay([EVENT, EVENT | change], [*map(parse_gate, ["errors"])])
    assert why in str(caught.value)


def test_a_recording_is_judged_to_its_rollback() -> None:
    recorded = [outcome_to_json(each) for each in requests(4000, 0.2, candidate=failing(0.2))]
    recorded.insert(100, {"gauge": "memory", "candidate": 1, "baseline": None, "at_ns": 100 * STEP_NS})
    recorded.insert(100, {"step": 2, "at_ns": 100 * STEP_NS})
    verdicts = replay(recorded, [*map(parse_gate, ["errors", "memory<=1GiB"])], every_ns=10 * STEP_NS)
    assert [each.decision for each in verdicts[:-1]] == [Decision.CONTINUE] * (len(verdicts) - 1)
    assert verdicts[-1].decision is Decision.ROLL_BACK
    assert verdicts[-1].at_ns < 1000 * STEP_NS


def test_other_gates_judge_otherwise() -> None:
    recorded = [outcome_to_json(each) for each in requests(2000, 0.5, candidate=failing(0.2))]
    assert replay(recorded, [*map(parse_gate, ["p95"])])[-1].decision is not Decision.ROLL_BACK
    assert replay(recorded, [*map(parse_gate, ["errors"])], alpha=0.01)[-1].decision is Decision.ROLL_BACK


def test_an_empty_recording_decides_nothing() -> None:
    assert [each.decision for each in replay([], [*map(parse_gate, ["errors"])])] == [Decision.CONTINUE]
