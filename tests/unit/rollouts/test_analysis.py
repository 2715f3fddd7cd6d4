"""What Argo Rollouts and Flagger are told of a rollout."""

from __future__ import annotations

import pytest

from nerite.config.rollout_spec import RolloutSpec
from nerite.core.errors import InvalidArgument
from nerite.rollouts.analysis import QUESTIONS, analysis_of, answer_of, question_of
from nerite.rollouts.fleet_order import FleetLead, FleetOrder
from nerite.rollouts.rollout import Rollout, RolloutReason, RolloutState
from nerite.rollouts.run import RolloutRun

SPEC = RolloutSpec("2", "1")


def run() -> RolloutRun:
    made = RolloutRun("m", "0123456789ab", SPEC, "now")
    made.rollout.begin(0)
    return made


def test_it_is_what_the_judge_says() -> None:
    made = run()
    assert analysis_of(made)["decision"] == "continue"
    made.findings(1)
    found = analysis_of(made)
    assert (found["decision"], found["state"], found["weight"]) == ("continue", "running", 1.0)
    assert "not yet decided" in found["reason"]


def test_it_is_what_the_judge_of_the_fleet_says() -> None:
    made = run()
    verdict = {"decision": "not_worse", "reason": "as all have counted"}
    made.lead = FleetLead(FleetOrder("0123456789ab", 1, 1, "now", Rollout(SPEC), verdict=verdict), 0)
    made.findings(1)
    assert analysis_of(made)["reason"] == "as all have counted"
    assert analysis_of(made)["decision"] == "not_worse"


@pytest.mark.parametrize(
    ("state", "decision"),
    [
        (RolloutState.PROMOTED, "not_worse"),
        (RolloutState.ROLLED_BACK, "roll_back"),
        (RolloutState.ABORTED, "roll_back"),
    ],
)
def test_it_is_how_the_rollout_has_ended(state: RolloutState, decision: str) -> None:
    made = run()
    made.text = made.rollout.end(state, RolloutReason.OPERATOR, "so").text
    assert (analysis_of(made)["decision"], analysis_of(made)["reason"]) == (decision, "so")


@pytest.mark.parametrize(
    ("ask", "codes"), [("harmless", (200, 200, 409)), ("not-worse", (409, 200, 409)), ("harmful", (409, 409, 200))]
)
def test_the_answers_to_flagger(ask: str, codes: tuple[int, ...]) -> None:
    question = question_of({"name": "nerite", "phase": "Progressing", "metadata": {"ask": ask}})
    found = [answer_of(question, {"decision": each})[0] for each in ("continue", "not_worse", "roll_back")]
    assert tuple(found) == codes


@pytest.mark.parametrize("payload", [None, [], {}, {"metadata": None}, {"metadata": {"ask": "why"}}])
def test_webhooks_that_ask_nothing(payload: object) -> None:
    with pytest.raises(InvalidArgument, match=", ".join(QUESTIONS)):
        question_of(payload)
