"""The simulation of the benchmark says what the judge says of the same requests."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks"))

import rollout_judge  # noqa: E402
from rollout_streams import GATES, Batch, Candidate, JudgedStreams, Load, Look, Plan, Streams  # noqa: E402

from nerite.judge.gates import parse_gate  # noqa: E402
from nerite.judge.judge import Judge  # noqa: E402
from nerite.judge.outcome import Outcome, Stratum  # noqa: E402
from nerite.judge.verdict import Decision, Verdict  # noqa: E402

SHORT, LONG = Stratum("<1k"), Stratum("<16k")
APART_NS = 60_000_000_000


def observed(judge: Judge, batch: Batch, run: int, now_ns: int) -> int:
    for index in range(batch.candidate.shape[1]):
        now_ns += APART_NS
        outcome = Outcome(
            candidate=bool(batch.candidate[run, index]),
            probability=batch.weight,
            at_ns=now_ns,
            latency_us=math.exp(batch.latency[run, index]),
            first_us=math.exp(batch.first[run, index]),
            error="error" if batch.error[run, index] else "",
            stratum=LONG if batch.long[run, index] else SHORT,
        )
        judge.observe(outcome)
    return now_ns


def same(look: Look, verdict: Verdict, run: int) -> None:
    worse = [gate.worse * math.log(10) for gate in verdict.gates]
    not_worse = [gate.not_worse * math.log(10) for gate in verdict.gates]
    assert worse == pytest.approx(look.worse[:, run], abs=1e-9)
    assert not_worse == pytest.approx(look.not_worse[:, run], abs=1e-9)
    gates = [gate.decision is Decision.ROLL_BACK for gate in verdict.gates]
    assert gates == look.rolled_back[:, run].tolist()
    assert (verdict.decision is Decision.NOT_WORSE) == look.promoted[run]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_streams_are_judged_as_by_the_judge(seed: int) -> None:
    plan = Plan((0.1, 0.5), batches=4, batch=300)
    load, arms = Load(errors=0.02, drifting=True), Candidate(latency=1.05, first=1.1, errors=2)
    streams, judged = Streams(plan, load, arms, 2, (seed,)), JudgedStreams(plan, 2)
    judges = [Judge([*map(parse_gate, GATES)], window_ns=10**18) for _ in range(2)]
    now = 0
    step = -1
    for batch in streams:
        look = judged.take(batch)
        if batch.step != step:
            step = batch.step
            for judge in judges:
                judge.begin_step(now)
        later = [observed(judge, batch, run, now) for run, judge in enumerate(judges)]
        now = later[0]
        if look is not None:
            for run, judge in enumerate(judges):
                same(look, judge.verdict(now + APART_NS), run)


def test_equal_candidates_are_rolled_back_no_more_often_than_asked_for() -> None:
    job = rollout_judge.Job("A/A", Plan((0.1, 0.5), 10, 100), Load(errors=0.05), Candidate(), 200, (7,))
    _, found = rollout_judge.run(job)
    assert (found.rules[0] > 0).mean() <= 0.05


def test_the_fixed_sample_reaches_its_power() -> None:
    """By hand: 0.3 bad of the candidate's requests, 0.1 of the baseline's, half and half."""
    size = rollout_judge.fixed_sample(0.3, 0.1, 0.5, 1.0, 0.8)
    random = np.random.default_rng(1)
    events = random.poisson(size * 0.2, 4000)
    hits = random.binomial(events, 0.75)
    level = math.exp(-rollout_judge.log_boundary(0.05, 3))
    from scipy.stats import binom

    assert (binom.sf(hits - 1, events, 0.5) <= level).mean() == pytest.approx(0.8, abs=0.04)
