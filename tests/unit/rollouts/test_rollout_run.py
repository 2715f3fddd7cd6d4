"""A rollout with its judge and its counts: what clients get, and what outlives a restart."""

from __future__ import annotations

import json
from random import Random

import pytest

from nerite.config.rollout_spec import RolloutSpec
from nerite.judge.outcome import Outcome
from nerite.observability.exposition import Page
from nerite.rollouts import metrics
from nerite.rollouts.arm_outcomes import ArmOutcomes
from nerite.rollouts.record import MAX_HISTORY, RolloutRecord
from nerite.rollouts.rollout import RolloutCommand, RolloutFindings, RolloutReason, RolloutState
from nerite.rollouts.run import ArmGauges, RolloutRun
from nerite.scheduling.weighted_route import RouteArm, RouteShadow

SECOND = 1_000_000_000


def begun(**given: object) -> RolloutRun:
    spec = RolloutSpec(**{"to": "2", "baseline": "1", "steps": (50.0, 100.0), "gates": ("errors",), **given})  # type: ignore[arg-type]
    run = RolloutRun("m", "1a", spec, "2026-11-25T10:00:00.000Z")
    run.rollout.begin(0)
    return run


def load(run: RolloutRun, requests: int, errors: float, *, start: int = 0, seed: int = 7) -> int:
    """Have both versions answer; the candidate fails with a probability. Return the time."""
    draw = Random(seed)
    now = start
    for _ in range(requests):
        now += 100_000_000
        candidate = draw.random() < 0.5
        error = "error" if candidate and draw.random() < errors else ""
        run.observe(Outcome(candidate, 0.5, now, 1000.0, 900.0, error=error))
    return now


def test_errors_of_the_candidate_are_harm() -> None:
    run = begun()
    now = load(run, 200, errors=0.5)
    found = run.findings(now)
    assert found.worse and not found.not_worse
    assert found.requests == run.candidate.requests > 50
    status = run.status()
    assert status["arms"]["candidate"]["errors"] == run.candidate.errors > 20
    assert status["arms"]["baseline"]["errors"] == 0
    assert status["arms"]["candidate"]["p50_ms"] == pytest.approx(1.0, rel=0.05)
    (gate,) = status["gates"]
    assert gate["gate"] == "errors"
    json.dumps(status, allow_nan=False)


def test_equal_versions_are_found_not_worse() -> None:
    run = begun()
    now = load(run, 12_000, errors=0.0)
    assert run.findings(now).not_worse
    assert not run.findings(now).worse


class UnderWay:
    """A request that has not ended."""

    def __init__(self, candidate: bool, arrived_ns: int) -> None:
        self.counted = 0
        self._candidate = candidate
        self.arrived_ns = arrived_ns

    def outcome(self, now_ns: int) -> Outcome:
        age = (now_ns - self.arrived_ns) / 1e3
        return Outcome(self._candidate, 0.5, now_ns, age, age)


def test_a_candidate_that_hangs_is_found_before_it_answers() -> None:
    run = begun(gates=("errors", "p99"))
    now = load(run, 2000, errors=0.0)
    run.begin_step(now)
    hanging = [UnderWay(True, now + number * SECOND // 5) for number in range(60)]
    run.look_under_way(reversed(hanging), now + 13 * SECOND)
    assert all(each.counted for each in hanging)
    assert "p99" in run.findings(now + 13 * SECOND).worse
    again = begun(gates=("errors", "p99"))
    load(again, 2000, errors=0.0)
    again.begin_step(now)
    both = [UnderWay(number % 2 == 0, now + number * SECOND // 5) for number in range(60)]
    again.look_under_way(both, now + 13 * SECOND)
    assert not again.findings(now + 13 * SECOND).worse, "both hang"


def test_each_outcome_is_counted_once_though_the_server_stops_in_between() -> None:
    run = begun()
    now = load(run, 77, errors=0.0)
    again = RolloutRun.of_json("m", json.loads(json.dumps(run.as_json())), now)
    now = load(again, 5, errors=0.0, start=now)
    last = RolloutRun.of_json("m", json.loads(json.dumps(again.as_json())), now)
    assert last.baseline.requests + last.candidate.requests == 82
    verdict = last.judge.verdict(now)
    assert verdict.candidate_requests + verdict.baseline_requests == 82


def test_requests_that_are_young_are_not_looked_at() -> None:
    class Young(UnderWay):
        def outcome(self, now_ns: int) -> Outcome:
            raise AssertionError("no gate can find it late yet")

    run = begun(gates=("errors", "p99"))
    now = load(run, 2000, errors=0.0)
    late, young = UnderWay(True, now - SECOND), Young(True, now - 1000)
    run.look_under_way([young, late], now)
    assert late.counted and not young.counted


def test_requests_that_were_refused_are_not_answers_of_the_candidate() -> None:
    run = begun()
    run.observe(Outcome(True, 0.5, SECOND, 10.0, 10.0, error="refused"))
    run.observe(Outcome(True, 0.5, SECOND, 10.0, 10.0, error="cancelled"))
    run.observe(Outcome(True, 0.5, SECOND, 10.0, 10.0, error="timeout"))
    assert run.findings(2 * SECOND).requests == 1


def test_the_candidate_is_not_to_blame_if_the_baseline_is_not_ready_either() -> None:
    run = begun()
    run.answer_of("2")(False)
    assert not run.ready
    run.answer_of("1")(False)
    assert run.ready


def test_restarts_count_from_the_first_reading() -> None:
    run = begun(gates=("restarts<=0",))
    run.gauge(ArmGauges(restarts=3), ArmGauges(restarts=1), SECOND)
    assert not run.findings(SECOND).worse
    run.gauge(ArmGauges(restarts=4), ArmGauges(restarts=1), 2 * SECOND)
    assert run.findings(2 * SECOND).worse


def test_the_route_of_each_state() -> None:
    run = begun(sticky="header:x-user,tenant")
    route = run.route()
    assert [(arm.label, arm.weight) for arm in route.arms] == [("m:1", 50), ("m:2", 50)]
    assert [str(key) for key in route.sticky] == ["header:x-user", "tenant"]
    run.rollout.command(RolloutCommand.ABORT, RolloutFindings())
    assert [arm.weight for arm in run.route().arms] == [100, 0]
    assert run.route().salt == route.salt
    assert (run.winner, run.loser) == ("1", "2")


def test_the_step_of_a_shadow() -> None:
    run = begun(shadow=10.0)
    route = run.route()
    assert ([arm.weight for arm in route.arms], route.shadow) == ([100, 0], RouteShadow(RouteArm("m", "2", 0), 0.1))
    run.shadow = {"compared": {"equal": 90, "close": 5, "different": 5}, "dropped": {}}
    found = run.findings(SECOND)
    assert (found.shadowed, found.agreement, found.worse) == (100, "95 of 100 answers agreed", "")
    assert run.status()["shadowing"]
    restored = RolloutRun.of_json("m", json.loads(json.dumps(run.as_json())), 0)
    assert (restored.rollout.shadow, restored.shadow) == (10, run.shadow)
    run.shadow = {"compared": {"shadow_failed": 5, "equal": 10}, "dropped": {"timeout": 5, "late": 100}}
    assert run.findings(SECOND).worse == "version 2 failed 10 of 20 requests that version 1 answered"
    run.rollout.command(RolloutCommand.ABORT, RolloutFindings())
    assert run.route().shadow is None


def record_of(run: RolloutRun) -> RolloutRecord:
    record = RolloutRecord("m")
    record.run = run
    return record


def test_everything_outlives_a_restart() -> None:
    run = begun(gates=("errors", "p99=+10%", "memory<=1GiB"))
    now = load(run, 300, errors=0.02)
    run.gauge(ArmGauges(memory=1e6), ArmGauges(memory=1e6), now)
    run.findings(now)
    record = record_of(run)
    record.note(run.rollout.command(RolloutCommand.PAUSE, RolloutFindings()), "2026-11-25T10:00:01.000Z")
    record.declared = run.spec.as_json()
    document = json.loads(json.dumps(record.as_json(), allow_nan=False))
    again = RolloutRecord.of_json("m", document, now)
    assert json.loads(json.dumps(again.as_json())) == document
    assert again.run is not None
    assert again.run.status() == run.status()
    again.run.findings(now)
    assert again.run.status() == run.status()
    assert again.run.curve.as_json()["gates"].keys() == {"errors", "p99=+10%"}
    assert again.keeps() == ((1, 2), 1)


@pytest.mark.parametrize("wrong", [{"run": 1}, {"history": None}, {"pinned": "two"}, {"declared": 1}])
def test_another_form_is_an_error(wrong: dict[str, object]) -> None:
    document = record_of(begun()).as_json()
    with pytest.raises((TypeError, ValueError)):
        RolloutRecord.of_json("m", {**document, **wrong}, 0)


def test_what_stays_loaded() -> None:
    record = record_of(begun())
    assert record.keeps() == ((1, 2), 1)
    assert record.run is not None
    record.note(record.run.rollout.command(RolloutCommand.ABORT, RolloutFindings()), "")
    assert record.keeps() is None
    record.pinned = "1"
    assert record.keeps() == ((1,), 1)


def test_the_history_is_bounded_and_has_evidence() -> None:
    record = record_of(begun())
    assert record.run is not None
    for number in range(MAX_HISTORY):
        command = RolloutCommand.RESUME if number % 2 else RolloutCommand.PAUSE
        record.note(record.run.rollout.command(command, RolloutFindings()), f"{number}")
    record.note(record.run.rollout.command(RolloutCommand.ABORT, RolloutFindings()), "last")
    assert len(record.history) == MAX_HISTORY
    last = record.history[-1]
    assert (last["at"], last["state"], last["reason"], last["weight"]) == ("last", "aborted", "operator", 0)
    assert last["evidence"]["arms"]["baseline"]["weight"] == 100
    assert record.decisions[RolloutReason.OPERATOR] == MAX_HISTORY + 1


def test_earlier_rollouts_are_told_by_their_last_decision() -> None:
    record = record_of(begun())
    assert record.run is not None
    record.note(record.run.rollout.command(RolloutCommand.PAUSE, RolloutFindings()), "1")
    record.note(record.run.rollout.command(RolloutCommand.ABORT, RolloutFindings()), "2")
    assert record.past() == []
    record.run = RolloutRun("m", "1b", record.run.spec, "3")
    (told,) = record.past()
    assert (told["id"], told["at"], told["state"], "evidence" in told) == ("1a", "2", "aborted", False)
    record.run = None
    assert [each["id"] for each in record.past()] == ["1a"]


def test_metrics() -> None:
    run = begun(gates=("errors", "restarts<=0"))
    now = load(run, 100, errors=0.1)
    run.findings(now)
    page = Page()
    record = record_of(run)
    metrics.write(page, [record], "b00t")
    text = b"".join(page.pieces()).decode()
    assert 'nerite_rollout_weight{arm="candidate",model="m",version="2"} 0.5' in text
    total = (
        f'nerite_rollout_requests_total{{arm="candidate",model="m",outcome="error",version="2"}} {run.candidate.errors}'
    )
    assert total in text
    assert 'nerite_rollout_state{model="m",state="running"} 1' in text
    assert 'nerite_rollout_state{model="m",state="promoted"} 0' in text
    assert 'nerite_rollout_step{model="m"} 1' in text
    assert 'nerite_rollout_evidence_boundary{gate="errors",kind="worse",model="m"}' in text
    assert 'nerite_rollout_evidence_boundary{gate="restarts' not in text
    run.rollout.command(RolloutCommand.ABORT, RolloutFindings())
    page = Page()
    metrics.write(page, [record], "b00t")
    text = b"".join(page.pieces()).decode()
    assert "nerite_rollout_weight{" not in text
    assert 'nerite_rollout_state{model="m",state="aborted"} 1' in text
    assert record.run is not None and record.run.rollout.state is RolloutState.ABORTED


def test_ends_by_kind() -> None:
    run = begun()
    for error in ("", "error", "timeout", "refused", "cancelled"):
        run.observe(Outcome(True, 0.5, SECOND, 10.0, 10.0, error=error))
    arm = run.candidate
    assert (arm.requests, arm.errors, arm.answered, arm.latency.total) == (5, 2, 3, 1)
    assert arm.figures()["token_p95_ms"] is None
    run.observe(Outcome(True, 0.5, SECOND, 90_000.0, 10_000.0, token_us=8000.0))
    arm = run.candidate
    assert arm.figures()["token_p95_ms"] == pytest.approx(8, rel=0.05)
    assert ArmOutcomes.of_json(arm.as_json()).figures() == arm.figures()
