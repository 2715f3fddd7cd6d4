from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
from rollout_outcomes import SECOND_NS, STEP_NS, decided, failing, judge_of, requests, slower, stratum_of

from nerite.judge.counts import MAX_CLUSTERS, CountRow, difference
from nerite.judge.judge import LOAD, Judge
from nerite.judge.outcome import Outcome, Stratum
from nerite.judge.verdict import Decision

ALL = ("errors", "p99", "ttft_p95", "itl", "goodput")


def both(*streams: Iterator[Outcome]) -> Iterator[Outcome]:
    """Merge streams by time."""
    yield from sorted((outcome for stream in streams for outcome in stream), key=lambda outcome: outcome.at_ns)


def test_without_requests_nothing_is_decided() -> None:
    judge = judge_of(*ALL, "memory<=1GiB")
    for now in (0, SECOND_NS, 10**6 * SECOND_NS):
        verdict = judge.verdict(now)
        assert verdict.decision is Decision.CONTINUE
        assert all(gate.decision is Decision.CONTINUE for gate in verdict.gates)
        json.dumps(verdict.to_json(), allow_nan=False)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_requests_of_one_arm_alone_decide_nothing(probability: float) -> None:
    judge = judge_of("errors", least_requests=1)
    number, verdict = decided(judge, requests(2000, probability, errors=0.9))
    assert number == 2000
    assert verdict.decision is Decision.CONTINUE


def test_one_arm_that_ends_nothing_is_never_promoted() -> None:
    """The candidate hangs: only the baseline's requests end."""
    judge = judge_of("errors", "p99")
    stream = (outcome for outcome in requests(5000, 0.5) if not outcome.candidate)
    _, verdict = decided(judge, stream)
    assert verdict.decision is Decision.CONTINUE
    assert any("outcomes of one arm are missing" in hold for hold in verdict.holds)
    assert any("outcomes of one arm are missing" in warning for warning in verdict.warnings)


def test_a_judge_needs_gates_and_levels() -> None:
    with pytest.raises(ValueError, match="without gates"):
        Judge([])
    with pytest.raises(ValueError, match=r"alpha is 0\.7"):
        judge_of("errors", alpha=0.7)


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5])
def test_ten_of_the_first_twenty_requests_failing_roll_back_at_once(probability: float) -> None:
    judge = judge_of(*ALL)
    seen = 0
    for outcome in requests(10_000, probability, seed=3):
        if outcome.candidate:
            seen += 1
            outcome = outcome._replace(error="error" if seen % 2 else "")
        judge.observe(outcome)
        if judge.verdict(outcome.at_ns).decision is Decision.ROLL_BACK:
            break
    assert seen <= 25


def test_an_outage_of_both_arms_is_none_of_the_candidates() -> None:
    _, verdict = decided(judge_of("errors"), requests(2000, 0.5, errors=0.6))
    assert verdict.decision is not Decision.ROLL_BACK


def test_nothing_is_promoted_while_the_baseline_itself_fails() -> None:
    judge = judge_of("errors=+50%,1%")
    _, verdict = decided(judge, requests(40_000, 0.5, errors=0.1))
    assert [gate.decision for gate in verdict.gates] == [Decision.NOT_WORSE]
    assert verdict.decision is Decision.CONTINUE
    assert any("requests to the baseline fail: it has an incident of its own" in hold for hold in verdict.holds)
    _, verdict = decided(judge_of("errors=+50%,1%"), requests(40_000, 0.5, errors=0.04))
    assert verdict.decision is Decision.NOT_WORSE


def test_more_errors_are_rolled_back_with_their_numbers() -> None:
    number, verdict = decided(judge_of(*ALL), requests(20_000, 0.1, errors=0.002, candidate=failing(0.05)))
    assert verdict.decision is Decision.ROLL_BACK
    assert number < 4000
    gate = verdict.gates[0]
    assert gate.gate == "errors"
    assert gate.worse >= gate.worse_boundary
    assert gate.candidate.rate.low < 0.05 < gate.candidate.rate.high
    assert gate.risk.low > 1.5
    assert verdict.reason.startswith(f"errors: {gate.candidate.bad} of {gate.candidate.requests} requests bad")


@pytest.mark.parametrize(
    ("gate", "field", "factor"),
    [("p99", "latency_us", 1.5), ("ttft_p95", "first_us", 1.4), ("itl", "token_us", 1.4), ("goodput", "token_us", 2.0)],
)
def test_slower_candidates_are_rolled_back(gate: str, field: str, factor: float) -> None:
    number, verdict = decided(judge_of(gate), requests(20_000, 0.3, candidate=slower(factor, field)))
    assert verdict.decision is Decision.ROLL_BACK
    assert number < 8000
    assert verdict.reason.startswith(f"{gate}: ")


def test_a_good_candidate_is_promoted() -> None:
    number, verdict = decided(judge_of("errors", "ttft_p95=+20%", "itl=+20%"), requests(30_000, 0.5), every=100)
    assert verdict.decision is Decision.NOT_WORSE
    assert number > 1000
    assert all(gate.not_worse >= gate.not_worse_boundary for gate in verdict.gates)


def test_few_requests_promote_nobody() -> None:
    judge = judge_of("errors=+50%,50%", least_requests=500)
    number, verdict = decided(judge, requests(2000, 0.5))
    assert verdict.decision is Decision.NOT_WORSE
    assert number >= 900
    assert verdict.candidate_requests >= 500


def test_the_decision_to_roll_back_is_final() -> None:
    judge = judge_of("errors")
    number, verdict = decided(judge, requests(5000, 0.5, candidate=failing(0.5)))
    for outcome in requests(5000, 0.5, seed=2, begin_ns=number * STEP_NS):
        judge.observe(outcome)
    later = judge.verdict(6000 * STEP_NS)
    assert later.decision is Decision.ROLL_BACK
    assert later.reason == verdict.reason


def test_equal_candidates_are_seldom_rolled_back() -> None:
    """30 rollouts, looked at after every 50 requests. A candidate within its margins is rolled back in at most 5 %."""
    found = [
        decided(judge_of("errors", "p95", "ttft"), requests(1000, 0.2, seed, errors=0.03), every=50)[1].decision
        for seed in range(30)
    ]
    assert found.count(Decision.ROLL_BACK) <= 2


def test_a_change_of_the_mix_is_not_the_candidates_fault() -> None:
    """Simpson's paradox: as the candidate's weight grows, prompts become long, which fail more often and take longer.

    Whoever adds up the arms finds the candidate far worse; in each stratum it is the baseline.
    """
    judge = judge_of("errors", "p99", "ttft_p95")
    short, long = Stratum("<256"), Stratum("<16k")
    bad, all_of_them = [0, 0], [0, 0]

    def heavy(outcome: Outcome) -> Outcome:
        return outcome._replace(latency_us=outcome.latency_us * 8, first_us=outcome.first_us * 8)

    begin = 0
    for probability, count, stratum, errors in ((0.1, 4000, short, 0.005), (0.5, 4000, long, 0.05)):
        judge.begin_step(begin)
        for outcome in requests(count, probability, 5, errors=errors, begin_ns=begin, stratum=stratum):
            outcome = heavy(outcome) if stratum is long else outcome
            judge.observe(outcome)
            bad[outcome.candidate] += outcome.error == "error"
            all_of_them[outcome.candidate] += 1
            if outcome.at_ns % (100 * STEP_NS) == 0:
                assert judge.verdict(outcome.at_ns).decision is not Decision.ROLL_BACK
        begin += count * STEP_NS
    assert bad[True] / all_of_them[True] > 1.8 * bad[False] / all_of_them[False]
    assert judge.verdict(begin).decision is not Decision.ROLL_BACK


def test_the_worst_stratum_is_named() -> None:
    judge = judge_of("errors")
    good = requests(6000, 0.5, 1, errors=0.02, stratum=Stratum("<256"))
    bad = requests(6000, 0.5, 2, errors=0.02, candidate=failing(0.15), stratum=Stratum(">=16k", stream=True))
    _, verdict = decided(judge, both(good, bad))
    assert verdict.decision is Decision.ROLL_BACK
    assert verdict.gates[0].worst == "prompt >=16k, stream"
    assert "worst for prompt >=16k, stream" in verdict.reason


def test_a_cold_cache_is_not_taken_for_a_slow_candidate() -> None:
    """Uncached prompts take three times as long, and the candidate has four times as many of them."""
    judge = judge_of("ttft_p95", "p95")
    random = np.random.default_rng(8)
    for outcome in requests(12_000, 0.3, 4, stratum=stratum_of(500, 400)):
        if random.random() < (0.6 if outcome.candidate else 0.15):
            outcome = outcome._replace(
                stratum=stratum_of(500, 0), first_us=outcome.first_us * 3, latency_us=outcome.latency_us * 3
            )
        judge.observe(outcome)
    assert judge.verdict(12_000 * STEP_NS).decision is not Decision.ROLL_BACK


def test_a_class_that_the_baseline_never_has_holds_the_promotion() -> None:
    judge = judge_of("ttft_p95")
    for outcome in requests(4000, 0.5, 4, stratum=stratum_of(500, 400)):
        judge.observe(outcome._replace(stratum=stratum_of(500, 0)) if outcome.candidate else outcome)
    verdict = judge.verdict(4000 * STEP_NS)
    assert verdict.decision is Decision.CONTINUE
    assert any("prefix cache cold" in hold for hold in verdict.holds)


def test_a_request_that_does_not_end_counts_as_soon_as_it_is_late() -> None:
    judge = judge_of("p95", "errors")
    for outcome in requests(1000, 0.0):
        judge.observe(outcome)
    patience = judge.patience_us(Stratum())
    assert math.isfinite(patience)
    late = Outcome(True, 0.5, 2000 * STEP_NS, patience * 0.9, patience * 0.9)
    assert judge.observe_running([(late, 0)]) == [0]
    late = late._replace(at_ns=2001 * STEP_NS, latency_us=patience * 2, first_us=patience * 2)
    (counted,) = judge.observe_running([(late, 0)])
    assert counted
    assert judge.observe_running([(late._replace(at_ns=2002 * STEP_NS), counted)]) == [counted]
    assert judge.verdict(2003 * STEP_NS).gates[0].candidate.bad == 1
    judge.observe(late._replace(at_ns=2004 * STEP_NS, error="cancelled"), counted)
    row = judge.verdict(2005 * STEP_NS).gates[0].candidate
    assert (row.bad, row.requests) == (1, 1)


def test_a_candidate_that_hangs_is_rolled_back_before_its_requests_end() -> None:
    judge = judge_of("p95")
    for outcome in requests(2000, 0.0):
        judge.observe(outcome)
    judge.begin_step(2000 * STEP_NS)
    for outcome in requests(400, 0.5, 2, begin_ns=2001 * STEP_NS):
        if not outcome.candidate:
            judge.observe(outcome)
        else:
            hanging = outcome._replace(latency_us=1e7, first_us=1e7, at_ns=outcome.at_ns + 10 * SECOND_NS)
            judge.observe_running([(hanging, 0)])
    assert judge.verdict(3000 * STEP_NS).decision is Decision.ROLL_BACK


def test_a_cancelled_request_that_was_not_late_says_nothing_of_latency() -> None:
    judge = judge_of("p95", "cancelled")
    for outcome in requests(1000, 0.0):
        judge.observe(outcome)
    judge.observe(Outcome(True, 0.5, 1001 * STEP_NS, 10.0, 10.0, error="cancelled"))
    latency, cancelled = judge.verdict(1002 * STEP_NS).gates
    assert (latency.candidate.requests, cancelled.candidate.bad) == (0, 1)


def test_a_burst_is_one_event() -> None:
    """A batch of 30 fails together, once."""
    judge = judge_of("errors")
    for outcome in requests(400, 0.1, 3):
        judge.observe(outcome)
    for _ in range(30):
        judge.observe(Outcome(True, 0.1, 401 * STEP_NS, 1e4, 1e4, error="error"))
    verdict = judge.verdict(402 * STEP_NS)
    assert verdict.gates[0].candidate.bad == 30
    assert verdict.decision is Decision.CONTINUE


def test_stalls_of_each_arm_do_not_look_like_more_harm_where_there_is_less_traffic() -> None:
    """Each arm stalls every 10 s: the baseline has nine requests under way then, the candidate one."""
    judge = judge_of("goodput:latency<=500ms=+10%")
    random = np.random.default_rng(5)
    now = 0
    for _ in range(300):
        now += 10 * SECOND_NS
        for arm, size in ((False, 9), (True, 1)):
            for _ in range(random.poisson(size)):
                judge.observe(Outcome(arm, 0.1, now + 5 * SECOND_NS * arm, 1e6, 1e6))
    verdict = judge.verdict(now + 10 * SECOND_NS)
    assert verdict.decision is not Decision.ROLL_BACK
    assert verdict.gates[0].candidate.bad > 200


def test_a_sticky_key_has_one_bad_event() -> None:
    judge = judge_of("errors")
    for index in range(100):
        judge.observe(
            Outcome(True, 0.1, index * SECOND_NS, 1e4, 1e4, error="error" if index % 4 == 0 else "", cluster=77)
        )
        judge.observe(Outcome(False, 0.1, index * SECOND_NS, 1e4, 1e4, cluster=78))
    verdict = judge.verdict(200 * SECOND_NS)
    assert verdict.gates[0].candidate.bad == 25
    assert verdict.decision is Decision.CONTINUE
    assert judge.counts()["errors"][0].candidate_units == 1


def test_too_many_sticky_keys_are_told() -> None:
    judge = judge_of("errors")
    for index in range(MAX_CLUSTERS + 5):
        judge.observe(Outcome(bool(index % 2), 0.5, index * STEP_NS, 1e4, 1e4, error="error", cluster=index + 1))
    assert any("5 bad events of sticky keys" in each for each in judge.verdict(10**15).warnings)


def test_thresholds_outlive_hours_without_requests() -> None:
    judge = judge_of("p95")
    for outcome in requests(1000, 0.0):
        judge.observe(outcome)
    for hour in range(1, 50):
        judge.verdict(hour * 3600 * SECOND_NS)
    assert math.isfinite(judge.patience_us(Stratum()))


def test_load_that_differs_makes_the_arms_incomparable() -> None:
    judge = judge_of("errors")
    for index in range(5):
        judge.gauge(LOAD, 2.0, 8.0, index * SECOND_NS)
    assert any("not comparable" in each for each in judge.verdict(6 * SECOND_NS).warnings)


def test_a_hard_limit_needs_most_of_the_last_readings() -> None:
    judge = judge_of("errors=+50%,50%", "memory<=+20%")
    for outcome in requests(2000, 0.5):
        judge.observe(outcome)
    now = 2001 * STEP_NS
    assert judge.verdict(now).decision is Decision.CONTINUE  # no reading yet
    for value in (100, 130, 100, 100, 100, 100, 100):
        judge.gauge("memory", value, 100, now)
    assert judge.verdict(now).decision is Decision.NOT_WORSE
    assert judge.verdict(now + 120 * SECOND_NS).decision is Decision.CONTINUE  # the reading is old
    for _ in range(3):
        judge.gauge("memory", 130, 100, now)
    verdict = judge.verdict(now)
    assert verdict.decision is Decision.ROLL_BACK
    assert verdict.reason == "memory<=+20%: 130 in the candidate, 100 in the baseline"


def test_a_restart_is_a_violation_at_once() -> None:
    judge = judge_of("restarts<=0")
    judge.gauge("restarts", 1, 0, 1)
    assert judge.verdict(2).decision is Decision.ROLL_BACK


def everything(judge: Judge, now_ns: int) -> object:
    return json.loads(json.dumps([judge.verdict(now_ns).to_json(), judge.to_json()]))


@pytest.mark.parametrize("stop", [1, 150, 1111, 2999])
def test_a_judge_that_was_stopped_goes_on_as_if_it_had_not_been(stop: int) -> None:
    options = {"window_ns": 60 * SECOND_NS}
    gates = (*ALL, "memory<=1GiB")
    whole, judge = judge_of(*gates, **options), judge_of(*gates, **options)
    random = np.random.default_rng(6)
    stream = [
        outcome._replace(cluster=int(random.integers(0, 50)), stratum=stratum_of(int(random.integers(1, 9000))))
        for outcome in requests(3000, 0.3, errors=0.05, candidate=slower(1.1))
    ]
    for number, outcome in enumerate(stream):
        if number == stop:
            judge = Judge.from_json(json.loads(json.dumps(judge.to_json())), stream[number - 1].at_ns)
        for each in (whole, judge):
            each.observe(outcome)
            if number % 100 == 0:
                each.gauge("memory", 2**29, 2**28, outcome.at_ns)
                each.verdict(outcome.at_ns)
    now = stream[-1].at_ns + SECOND_NS
    assert everything(judge, now) == everything(whole, now)


@pytest.mark.parametrize("gates", [ALL, ("errors", "refused", "goodput:ttft<=5ms", "p50"), ("cancelled",)])
def test_when_outcomes_are_counted_changes_nothing(gates: tuple[str, ...]) -> None:
    """One judge counts each by itself, the other one as many together as it likes, also where thresholds change."""
    options = {"window_ns": 30 * SECOND_NS}
    single, together = judge_of(*gates, **options), judge_of(*gates, **options)
    random = np.random.default_rng(11)
    for outcome in requests(4000, 0.3, errors=0.05, candidate=slower(1.2)):
        outcome = outcome._replace(
            probability=float(random.choice([0.3, 0.3, 0.5, 0.0])),
            error=str(
                random.choice(["", outcome.error, "timeout", "refused", "cancelled"], p=[0.8, 0.14, *[0.02] * 3])
            ),
            token_us=outcome.token_us * float(random.random() < 0.5),
            stratum=stratum_of(
                int(random.integers(1, 20_000)), int(random.integers(0, 9000)), f"t{random.integers(3)}"
            ),
            cluster=int(random.integers(0, 3)) * int(random.integers(1, 2**60)),
        )
        counted = int(random.integers(0, 2 ** len(gates))) if random.random() < 0.02 else 0
        for judge in (single, together):
            judge.observe(outcome, counted)
        single.count()
        if random.random() < 0.002:
            assert everything(single, outcome.at_ns) == everything(together, outcome.at_ns)
    assert everything(single, outcome.at_ns) == everything(together, outcome.at_ns)


def test_a_verdict_keeps_the_figures_of_its_time() -> None:
    judge, other = judge_of("errors", "p95"), judge_of("errors", "p95")
    for outcome in requests(2000, 0.5, errors=0.02):
        judge.observe(outcome)
        other.observe(outcome)
    verdict, expected = judge.verdict(2000 * STEP_NS), other.verdict(2000 * STEP_NS).to_json()
    for outcome in requests(2000, 0.5, 2, errors=0.5, begin_ns=2000 * STEP_NS, candidate=slower(3)):
        judge.observe(outcome)
    judge.verdict(4000 * STEP_NS)
    assert verdict.to_json() == expected


def test_the_clock_of_another_process_may_begin_anew() -> None:
    judge = judge_of("errors", "p95")
    for outcome in requests(1500, 0.5, begin_ns=10**15):
        judge.observe(outcome)
    again = Judge.from_json(judge.to_json(), 5)
    for outcome in requests(1500, 0.5, 2, begin_ns=5):
        again.observe(outcome)
    assert again.verdict(1501 * STEP_NS).gates[1].candidate.requests > 1300


def test_the_rolled_back_stay_so_after_a_restart() -> None:
    judge = judge_of("errors")
    _, verdict = decided(judge, requests(5000, 0.5, candidate=failing(0.5)))
    assert Judge.from_json(judge.to_json(), 0).verdict(0).reason == verdict.reason


@pytest.mark.parametrize("state", [{}, {"gates": ["errors"]}, judge_of("errors").to_json() | {"counts": [{}]}])
def test_what_is_no_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="saved state of the judge cannot be read"):
        Judge.from_json(state, 0)


def rows_of(seed: int) -> list[CountRow]:
    judge = judge_of("errors")
    for outcome in requests(500, 0.2, seed, errors=0.05, stratum=Stratum("<1k" if seed % 2 else "<4k")):
        judge.observe(outcome)
    judge.verdict(10**15)
    return judge.counts()["errors"]


def test_counts_of_replicas_add_up_in_any_order() -> None:
    forwards, backwards = judge_of("errors"), judge_of("errors")
    replicas = [rows_of(seed) for seed in range(6)]
    for rows in replicas:
        forwards.add("errors", rows, 1)
    for rows in reversed(replicas):
        backwards.add("errors", rows, 1)
    assert forwards.counts() == backwards.counts()
    one, other = forwards.verdict(2), backwards.verdict(2)
    assert one.candidate_requests == sum(row.candidate for rows in replicas for row in rows)
    assert one.gates[0].worse == pytest.approx(other.gates[0].worse)
    assert one.gates[0].not_worse == pytest.approx(other.gates[0].not_worse)


def test_differences_of_scrapes_add_up() -> None:
    judge, whole = judge_of("errors"), judge_of("errors")
    scraped: list[CountRow] = []
    for outcome in requests(2000, 0.3, errors=0.05):
        whole.observe(outcome)
        if outcome.at_ns % (300 * STEP_NS) == 0:
            rows = whole.counts()["errors"]
            judge.add("errors", difference(rows, scraped), outcome.at_ns)
            scraped = rows
    assert scraped[0].candidate > 500
    assert judge.counts()["errors"] == scraped


def test_a_replica_that_has_restarted_counts_from_zero() -> None:
    before = CountRow(Stratum(), 0.1, 5, 9, 100, 900, 5.0, 9.0)
    after = CountRow(Stratum(), 0.1, 1, 0, 20, 90, 1.0, 0.0)
    assert difference([after], [before]) == [after]


def test_a_fleet_decides_by_counts_alone() -> None:
    judge = judge_of("errors")
    row = CountRow(Stratum(), 0.1, 0, 2, 100, 900, 0.0, 2.0)
    for scrape in range(20):
        judge.add("errors", [row._replace(candidate_bad=3, candidate_units=3.0)], scrape * 15 * SECOND_NS)
    assert judge.verdict(300 * SECOND_NS).decision is Decision.ROLL_BACK
    with pytest.raises(ValueError, match="none of the gates errors"):
        judge.add("p99", [row], 0)


def test_more_strata_than_places_share_the_last() -> None:
    judge = judge_of("errors")
    for index in range(100):
        stratum = Stratum(tenant=f"t{index}")
        judge.observe(Outcome(bool(index % 2), 0.5, index * SECOND_NS, 1e4, 1e4, error="error", stratum=stratum))
    verdict = judge.verdict(200 * SECOND_NS)
    assert verdict.gates[0].candidate.bad == 50
    assert len({row.stratum for row in judge.counts()["errors"]}) <= 16
