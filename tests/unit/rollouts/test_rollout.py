"""The state machine of a rollout: what it decides, and what holds whatever happens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.config.rollout_spec import AtDeadline, RolloutSpec, spec_of
from nerite.core.errors import Conflict
from nerite.rollouts.rollout import (
    UNREADY_NS,
    Rollout,
    RolloutCommand,
    RolloutDecision,
    RolloutFindings,
    RolloutReason,
    RolloutState,
)

SECOND = 1_000_000_000
HOLD = 60
STEPS = (1.0, 10.0, 50.0, 100.0)


def spec(**given: object) -> RolloutSpec:
    values: dict[str, object] = {"to": "2", "baseline": "1", "steps": STEPS, "hold": HOLD, "requests": 0, **given}
    return RolloutSpec(**values)  # type: ignore[arg-type]


class Run:
    """A rollout with a clock."""

    def __init__(self, **given: object) -> None:
        self.rollout = Rollout(spec(**given))
        self.now = 5 * SECOND
        self.rollout.begin(self.now)

    def after(self, seconds: float, **found: object) -> RolloutDecision | None:
        self.now += int(seconds * SECOND)
        return self.rollout.advance(self.now, RolloutFindings(**found))  # type: ignore[arg-type]

    def tell(self, command: RolloutCommand, *, force: bool = False, **found: object) -> RolloutDecision:
        return self.rollout.command(command, RolloutFindings(**found), force=force)  # type: ignore[arg-type]

    def to_the_last_step(self) -> None:
        for _ in STEPS[:-2]:
            assert self.after(HOLD) is not None
        assert self.rollout.weight == STEPS[-2]


def test_it_goes_up_by_its_steps_and_is_promoted_with_proof_only() -> None:
    run = Run()
    assert run.rollout.weight == 1
    assert run.after(HOLD - 1) is None
    decision = run.after(1)
    assert decision is not None
    assert decision[:4] == (RolloutState.RUNNING, 1, 10.0, RolloutReason.HELD)
    assert run.after(HOLD, not_worse="not worse") == (
        RolloutState.RUNNING, 2, 50.0, RolloutReason.HELD, "no harm was shown: version 2 gets 50 % of the requests",
    )  # fmt: skip
    assert run.after(10 * HOLD) is None
    assert run.after(0, not_worse="the candidate is not worse") == (
        RolloutState.PROMOTED, 2, 100.0, RolloutReason.NOT_WORSE, "the candidate is not worse",
    )  # fmt: skip
    assert run.after(HOLD, worse="too late") is None


def test_a_shadow_comes_before_the_first_step() -> None:
    run = Run(shadow=10.0, requests=20)
    assert (run.rollout.weight, run.rollout.shadow) == (0, 10)
    assert run.after(HOLD, shadowed=19) is None
    assert run.after(1, shadowed=20, ready=False) is None
    run.tell(RolloutCommand.PAUSE)
    assert (run.rollout.weight, run.rollout.shadow) == (0, 10)
    run.tell(RolloutCommand.RESUME)
    run.rollout = Rollout.of_json(json.loads(json.dumps(run.rollout.as_json())), run.rollout.spec)
    assert run.after(1, shadowed=20, agreement="19 of 20 answers agreed") == (
        RolloutState.RUNNING, 0, 1.0, RolloutReason.HELD,
        "19 of 20 answers agreed: version 2 gets 1 % of the requests",
    )  # fmt: skip
    assert run.rollout.shadow == 0
    assert run.after(HOLD - 1, requests=20) is None
    decision = run.after(1, requests=20)
    assert decision is not None
    assert decision.weight == 10


def test_a_shadow_that_fails_ends_the_rollout() -> None:
    run = Run(shadow=10.0)
    decision = run.after(1, worse="version 2 failed 20 of 20 requests that version 1 answered")
    assert decision is not None
    assert (decision.state, run.rollout.shadow) == (RolloutState.ROLLED_BACK, 0)


def test_a_step_needs_its_requests() -> None:
    run = Run(requests=20)
    assert run.after(HOLD, requests=19) is None
    assert run.after(1, requests=20) is not None
    assert run.after(HOLD, requests=39) is None
    assert run.after(1, requests=40) is not None


def test_a_step_needs_a_candidate_that_is_ready() -> None:
    run = Run()
    assert run.after(HOLD - 1) is None
    assert run.after(2, ready=False) is None
    assert run.after(0) is not None


@pytest.mark.parametrize("before", ["", "pause", "deadline"])
def test_harm_rolls_back_whatever_the_state(before: str) -> None:
    run = Run(deadline=10 * HOLD)
    if before == "pause":
        run.tell(RolloutCommand.PAUSE)
    elif before == "deadline":
        run.after(10 * HOLD)
        run.after(10 * HOLD)
        run.after(10 * HOLD)
        assert run.rollout.state is RolloutState.INCONCLUSIVE
    assert run.after(1, worse="errors are 3.1 times as frequent", not_worse="by another gate") == (
        RolloutState.ROLLED_BACK,
        run.rollout.step,
        0.0,
        RolloutReason.WORSE,
        "errors are 3.1 times as frequent",
    )


def test_times_without_a_candidate_add_up() -> None:
    run = Run(hold=3600)
    for _ in range(9):
        assert run.after(1, ready=False) is None
        assert run.after(30) is None
    decision = run.after(1, ready=False)
    assert decision is not None
    assert (decision.weight, decision.reason) == (0, RolloutReason.NOT_READY)
    assert decision.text == "version 2 was not ready for 10s in all"


@pytest.mark.parametrize(
    ("asked", "state", "weight"),
    [
        (AtDeadline.STAY, RolloutState.INCONCLUSIVE, 50),
        (AtDeadline.PROMOTE, RolloutState.PROMOTED, 100),
        (AtDeadline.ROLL_BACK, RolloutState.ROLLED_BACK, 0),
    ],
)
def test_the_deadline(asked: AtDeadline, state: RolloutState, weight: float) -> None:
    run = Run(deadline=3 * HOLD, at_deadline=asked)
    run.to_the_last_step()
    assert run.after(HOLD - 1) is None
    decision = run.after(1)
    assert decision is not None
    assert (decision.state, decision.weight, decision.reason) == (state, weight, RolloutReason.DEADLINE)


def test_proof_at_the_deadline_counts() -> None:
    run = Run(deadline=3 * HOLD)
    run.to_the_last_step()
    decision = run.after(HOLD, not_worse="not worse")
    assert decision is not None
    assert decision.reason is RolloutReason.NOT_WORSE


def test_a_pause_does_not_count() -> None:
    run = Run(deadline=3 * HOLD)
    run.after(HOLD - 1)
    run.tell(RolloutCommand.PAUSE)
    assert run.after(1000 * HOLD, not_worse="not worse") is None
    assert run.rollout.weight == 1
    run.tell(RolloutCommand.RESUME)
    assert run.after(0) is None
    assert run.after(1) is not None


def test_an_inconclusive_rollout_that_is_resumed_has_its_deadline_again() -> None:
    run = Run(deadline=3 * HOLD)
    run.to_the_last_step()
    run.after(HOLD)
    assert run.rollout.state is RolloutState.INCONCLUSIVE
    assert run.after(HOLD, not_worse="not worse") is None
    run.tell(RolloutCommand.RESUME)
    assert run.after(3 * HOLD - 1) is None
    decision = run.after(1)
    assert decision is not None
    assert decision.state is RolloutState.INCONCLUSIVE


def test_promotion_by_an_operator() -> None:
    with pytest.raises(Conflict, match="it is not shown that the candidate is not worse"):
        Run().tell(RolloutCommand.PROMOTE)
    with pytest.raises(Conflict, match="the candidate is worse: more errors"):
        Run().tell(RolloutCommand.PROMOTE, worse="more errors", not_worse="fast")
    assert Run().tell(RolloutCommand.PROMOTE, not_worse="proof").reason is RolloutReason.OPERATOR
    for found in ({}, {"worse": "more errors"}):
        decision = Run().tell(RolloutCommand.PROMOTE, force=True, **found)
        assert (decision.weight, decision.reason) == (100, RolloutReason.FORCED)


def test_what_cannot_be_asked_is_refused_with_the_state() -> None:
    run = Run()
    with pytest.raises(Conflict, match="cannot resume a rollout that is running: it must be inconclusive or paused"):
        run.tell(RolloutCommand.RESUME)
    run.tell(RolloutCommand.ABORT)
    for command in RolloutCommand:
        with pytest.raises(Conflict, match="a rollout that is aborted"):
            run.tell(command, force=True)
    with pytest.raises(Conflict):
        run.rollout.supersede()


def test_a_check_that_blocks() -> None:
    rollout = Rollout(spec())
    assert (rollout.state, rollout.weight) == (RolloutState.CHECKING, 0)
    assert rollout.advance(SECOND, RolloutFindings(worse="no request yet")) is None
    decision = rollout.block("input 'A' is missing")
    assert (decision.state, decision.weight, decision.reason) == (RolloutState.ABORTED, 0, RolloutReason.BLOCKED)


def test_after_a_restart_it_goes_on_where_it_was() -> None:
    run = Run(requests=5)
    run.after(HOLD, requests=5)
    run.after(HOLD - 1, requests=9)
    document = json.loads(json.dumps(run.rollout.as_json()))
    again = Rollout.of_json(document, spec_of(document["spec"]))
    assert again.as_json() == run.rollout.as_json()
    assert (again.weight, again.in_step) == (10, HOLD - 1)
    assert again.advance(10**15, RolloutFindings(10)) is None  # the downtime does not count
    decision = again.advance(10**15 + SECOND, RolloutFindings(10))
    assert decision is not None
    assert decision.weight == 50


@pytest.mark.parametrize(
    "wrong",
    [{"state": "asleep"}, {"step": 3}, {"step": -1}, {"step": "1"}, {"elapsed_ns": None}, {"reason": "because"}],
)
def test_a_document_of_another_form_is_refused(wrong: dict[str, object]) -> None:
    run = Run()
    with pytest.raises((TypeError, ValueError)):
        Rollout.of_json({**run.rollout.as_json(), **wrong}, run.rollout.spec)


FINDINGS = st.builds(
    RolloutFindings,
    st.integers(0, 100),
    st.booleans(),
    st.sampled_from(["", "", "", "worse"]),
    st.sampled_from(["", "not worse"]),
)
MOVES = st.one_of(
    st.tuples(st.integers(0, 3 * HOLD * SECOND), FINDINGS),
    st.tuples(st.sampled_from(list(RolloutCommand)), FINDINGS, st.booleans()),
    st.just("restart"),
)


@given(
    st.lists(MOVES, max_size=40),
    st.sampled_from(list(AtDeadline)),
    st.integers(0, 10 * HOLD),
    st.integers(0, 30),
)
def test_what_always_holds(moves: list[object], asked: AtDeadline, deadline: int, requests: int) -> None:
    """Weights go up by one step at a time, and at the end are 0 or 100; an end has one reason, and nothing follows."""
    rollout = Rollout(spec(at_deadline=asked, deadline=float(deadline), requests=requests))
    decisions = [rollout.begin(0)]
    now = 0
    for move in moves:
        before = rollout.weight
        ended = rollout.state.is_end
        if move == "restart":
            document = json.loads(json.dumps(rollout.as_json()))
            rollout = Rollout.of_json(document, spec_of(document["spec"]))
            assert rollout.weight == before
            continue
        assert isinstance(move, tuple)
        decision: RolloutDecision | None = None
        if isinstance(move[0], RolloutCommand):
            try:
                decision = rollout.command(move[0], move[1], force=move[2])
            except Conflict:
                assert rollout.weight == before
        else:
            now += move[0]
            decision = rollout.advance(now, move[1])
        if decision is None:
            assert rollout.weight == before
            continue
        assert not ended
        decisions.append(decision)
        assert (decision.state, decision.weight, decision.reason) == (rollout.state, rollout.weight, rollout.reason)
        assert decision.text
        if decision.state.is_end:
            assert decision.weight == (100 if decision.state is RolloutState.PROMOTED else 0)
        else:
            assert STEPS.index(decision.weight) - STEPS.index(before) in (0, 1)
        found = move[1]
        if decision.reason is RolloutReason.NOT_WORSE:
            assert found.not_worse and not found.worse and found.ready and before == STEPS[-2]
        if not isinstance(move[0], RolloutCommand) and found.worse:
            assert decision.state is RolloutState.ROLLED_BACK
    assert sum(decision.state.is_end for decision in decisions) <= 1


def test_the_patience_with_a_candidate_is_a_matter_of_seconds() -> None:
    assert UNREADY_NS <= 30 * SECOND
