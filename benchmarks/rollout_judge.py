"""How often a judge of rollouts is wrong, and how many requests it needs to be right.

    python benchmarks/rollout_judge.py [--runs N] [--power-runs N] [--processes N] [--json FILE] [--plot FILE] [--print]

1. Rollouts of an hour in steps of 1, 5, 10, 25 and 50 %, with 4 requests a second, looked at after every 30 s. The
   candidate is the baseline once more (A/A), or worse. All rules see the same requests.
2. Requests until a worse candidate is found with a constant weight, beside a test with a fixed number of requests.
3. Candidates exactly at a margin, and equal ones: how often are they promoted, and after how many requests?
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from page import publish
from rollout_plot import draw
from rollout_rules import RULES, FixedRules
from rollout_streams import ALPHA, BETA, GATES, SIGMA, Candidate, JudgedStreams, Load, Plan, Streams
from scipy import stats

from nerite.judge.judge import log_boundary

RAMP: Final = Plan((0.01, 0.05, 0.10, 0.25, 0.50), batches=24, batch=120)
CHUNK: Final = 250
PLOT: Final = Path(__file__).parents[1] / "docs" / "rollout-judge.svg"
JUDGE: Final = "Nerite's judge, alpha = 5 %"


class Job(NamedTuple):
    """Some runs of one scenario."""

    name: str
    plan: Plan
    load: Load
    arms: Candidate
    runs: int
    seed: tuple[int, ...]
    rules: bool = False


class Found(NamedTuple):
    """Of each run, after how many batches something was said first; 0: never."""

    rules: np.ndarray
    """(rules, runs): rolled back."""
    gates: np.ndarray
    """(gates, runs): rolled back by one gate."""
    safe: np.ndarray
    """(gates, runs): not worse by one gate."""
    promoted: np.ndarray
    """(runs): not worse by all, in the last step, and not rolled back before."""


def run(job: Job) -> tuple[str, Found]:
    """Simulate some runs."""
    judge, rules = JudgedStreams(job.plan, job.runs), FixedRules(job.runs)
    by_rule = np.zeros((1 + len(RULES), job.runs), int)
    by_gate = np.zeros((len(GATES), job.runs), int)
    safe = np.zeros((len(GATES), job.runs), int)
    promoted = np.zeros(job.runs, int)

    def first(into: np.ndarray, said: np.ndarray, number: int) -> None:
        into[(into == 0) & said] = number

    for number, batch in enumerate(Streams(job.plan, job.load, job.arms, job.runs, job.seed)):
        look = judge.take(batch)
        if job.rules:
            said = rules.take(batch)
            first(by_rule[1:], said, number)
        if look is None:
            continue
        first(by_rule[0], look.rolled_back.any(axis=0), number)
        first(by_gate, look.rolled_back, number)
        first(safe, look.not_worse >= -math.log(BETA), number)
        if batch.step == len(job.plan.weights) - 1:
            first(promoted, look.promoted & (by_rule[0] == 0), number)
        if not job.rules and ((by_gate > 0) | (safe > 0)).all():
            break
    return job.name, Found(by_rule, by_gate, safe, promoted)


def run_all(jobs: list[Job], processes: int) -> dict[str, Found]:
    """Run all jobs, in parts, and put the parts together."""
    parts = [
        job._replace(runs=min(CHUNK, job.runs - begin), seed=(*job.seed, begin))
        for job in jobs
        for begin in range(0, job.runs, CHUNK)
    ]
    total, done, began = sum(part.runs for part in parts), 0, time.monotonic()
    found: dict[str, list[Found]] = {}
    with multiprocessing.Pool(processes) as pool:
        for name, each in pool.imap_unordered(run, parts):
            found.setdefault(name, []).append(each)
            done += each.promoted.size
            print(
                f"\r{done:,} of {total:,} runs, {time.monotonic() - began:.0f} s", end="", file=sys.stderr, flush=True
            )
    print(file=sys.stderr)
    return {
        name: Found(*(np.concatenate(arrays, axis=-1) for arrays in zip(*each, strict=True)))
        for name, each in found.items()
    }


ERRORS, TAIL, FIRST = range(3)
RAMPS: Final = (
    ("A/A", Load(), Candidate()),
    ("A/A, load and prompts drift", Load(drifting=True), Candidate()),
    ("errors 1 %, not 0.1 %", Load(errors=0.001), Candidate(errors=10)),
    ("p99 x 1.5, the tail alone", Load(), Candidate(tail=1.5)),
    ("first response x 1.3", Load(), Candidate(first=1.3)),
)
POWERS: Final = (
    ("errors 1 %, not 0.1 %", ERRORS, Load(errors=0.001), Candidate(errors=10)),
    ("p99 x 1.5, the tail alone", TAIL, Load(), Candidate(tail=1.5)),
    ("first response x 1.3", FIRST, Load(), Candidate(first=1.3)),
)
MARGINS: Final = (
    ("errors x 1.5", ERRORS, Load(errors=0.01), Candidate(errors=1.5)),
    ("latency x 1.1", TAIL, Load(), Candidate(latency=1.1)),
    ("first response x 1.1", FIRST, Load(), Candidate(first=1.1)),
)
EQUALS: Final = (
    ("errors 1 % in both", ERRORS, Load(errors=0.01)),
    ("errors 0.02 % in both", ERRORS, Load(errors=0.0002)),
    ("p99", TAIL, Load()),
    ("TTFT p95", FIRST, Load()),
)
WEIGHTS: Final = (0.5, 0.1)
MARGIN_PLAN: Final = Plan((0.5,), batches=200, batch=200)


def power_plan(weight: float) -> Plan:
    """Return looks after every 25 or 100 requests."""
    return Plan((weight,), batches=480, batch=25) if weight == 0.5 else Plan((weight,), batches=480, batch=100)


def jobs_of(runs: int, power_runs: int) -> list[Job]:
    """Return all that is simulated."""
    jobs = [
        Job(name, RAMP, load, arms, runs if arms == Candidate() else power_runs, (1, index), rules=True)
        for index, (name, load, arms) in enumerate(RAMPS)
    ]
    for index, (name, _, load, arms) in enumerate(POWERS):
        jobs += [
            Job(f"power {weight} {name}", power_plan(weight), load, arms, power_runs, (2, index, int(weight * 100)))
            for weight in WEIGHTS
        ]
    jobs += [
        Job(f"margin {name}", MARGIN_PLAN, load, arms, power_runs, (3, index))
        for index, (name, _, load, arms) in enumerate(MARGINS)
    ]
    jobs += [
        Job(f"equal {name}", MARGIN_PLAN, load, Candidate(), power_runs, (4, index))
        for index, (name, _, load) in enumerate(EQUALS)
    ]
    return jobs


def rates_of(gate: int, load: Load, arms: Candidate) -> tuple[float, float]:
    """Return how often requests of the candidate and of the baseline are bad."""
    if gate == ERRORS:
        return load.errors * arms.errors, load.errors
    quantile = 0.99 if gate == TAIL else 0.95
    slower = max(arms.latency * arms.tail if gate == TAIL else arms.first, 1.0)
    z = stats.norm.ppf(quantile) + math.log(1.1 / slower) / SIGMA
    return float(stats.norm.sf(z)), 1 - quantile


def fixed_sample(candidate: float, baseline: float, weight: float, tolerated: float, power: float) -> int:
    """Return how many requests the best test with one look needs: the binomial test of the labels of bad events.

    It is uniformly most powerful among unbiased tests, and has the level of one gate.
    """
    level = math.exp(-log_boundary(ALPHA, len(GATES)))
    share = weight * candidate + (1 - weight) * baseline
    null = weight * tolerated / (1 - weight + weight * tolerated)
    truth = weight * candidate / share

    def reached(requests: int) -> bool:
        events = np.arange(
            int(stats.poisson.ppf(1e-6, requests * share)), int(stats.poisson.isf(1e-6, requests * share)) + 1
        )
        critical = stats.binom.isf(level, events, null)
        rejected = stats.binom.sf(critical, events, truth)
        return bool((stats.poisson.pmf(events, requests * share) * rejected).sum() >= power)

    low, high = 1, 64
    while not reached(high):
        low, high = high, high * 2
    while high - low > max(1, high // 500):
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def percent(hits: np.ndarray) -> str:
    """Return the share of runs in which something happened."""
    return f"{100 * (hits > 0).mean():.1f} %" if (hits > 0).any() else f"0 of {hits.size:,}"


def quantile(batches: np.ndarray, part: float, each: float, unit: str = "") -> str:
    """Return after how much something happened in a part of the runs."""
    sorted_ones = np.sort(np.where(batches > 0, batches, np.iinfo(int).max))
    value = sorted_ones[min(math.ceil(part * len(sorted_ones)) - 1, len(sorted_ones) - 1)]
    return f"{value * each:,.0f}{unit}" if value < np.iinfo(int).max else "more"


def tables(found: dict[str, Found], runs: int, power_runs: int) -> str:
    """Return everything as Markdown."""
    names = [name for name, *_ in RAMPS]
    lines = [
        f"A rollout of an hour: 1, 5, 10, 25, 50 %, 12 minutes each, 14,400 requests; {runs:,} runs of each A/A, "
        f"{power_runs:,} of each other. In brackets: after how many minutes half of the runs were rolled back.",
        "",
        "| rolled back | " + " | ".join(names) + " |",
        "|---" * (1 + len(names)) + "|",
    ]
    for index, rule in enumerate((JUDGE, *RULES)):
        cells = []
        for name in names:
            hits = found[name].rules[index]
            half = quantile(hits, 0.5, 0.5)
            cells.append(percent(hits) + (f" ({half})" if half != "more" else ""))
        lines.append(f"| {f'**{rule}**' if not index else rule} | " + " | ".join(cells) + " |")
    shares = [f"{100 * (found[name].promoted > 0).mean():.1f} %" for name in names]
    lines.append("| promoted by the judge within the hour | " + " | ".join(shares) + " |")
    lines += [
        "",
        "Requests to both arms until a worse candidate is found, with a look after every 25 (weight 50 %) or 100:",
        "",
    ]
    lines += [
        "| worse by | weight | judge, median | judge, 90 % | fixed sample, power 0.8 | power 0.9 |",
        "|---|---|---|---|---|---|",
    ]
    for name, gate, load, arms in POWERS:
        for weight in WEIGHTS:
            hits = found[f"power {weight} {name}"].gates[gate]
            each = power_plan(weight).batch
            sizes = [
                fixed_sample(*rates_of(gate, load, arms), weight, 1.5 if gate == ERRORS else 1.0, power)
                for power in (0.8, 0.9)
            ]
            lines.append(
                f"| {name} | {weight:.0%} | {quantile(hits, 0.5, each)} | {quantile(hits, 0.9, each)} | "
                f"{sizes[0]:,} | {sizes[1]:,} |"
            )
    limit = MARGIN_PLAN.batch * MARGIN_PLAN.batches
    lines += [
        "",
        f"Candidates exactly at the margin of a gate, weight 50 %, up to {limit:,} requests, a look after every 200:",
        "",
    ]
    lines += [
        '| candidate | wrongly "not worse" (at most 5 %) | rolled back by the gate (at most 1.5 %) |',
        "|---|---|---|",
    ]
    for name, gate, *_ in MARGINS:
        each = found[f"margin {name}"]
        lines.append(f"| {name} | {percent(each.safe[gate])} | {percent(each.gates[gate])} |")
    lines += [
        "",
        f'Equal candidates, weight 50 %: requests to both arms until a gate says "not worse", up to {limit:,}:',
        "",
    ]
    lines += ["| gate | within the limit | median | 90 % |", "|---|---|---|---|"]
    for name, gate, _ in EQUALS:
        hits = found[f"equal {name}"].safe[gate]
        lines.append(f"| {name} | {percent(hits)} | {quantile(hits, 0.5, 200)} | {quantile(hits, 0.9, 200)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write tables and plot."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--runs", type=int, default=20_000, help="of each A/A rollout (default: %(default)s)")
    flags.add_argument("--power-runs", type=int, default=2_000, help="of each other scenario (default: %(default)s)")
    flags.add_argument("--processes", type=int, default=os.cpu_count(), help="(default: %(default)s)")
    flags.add_argument("--json", type=Path, help="write when each run was decided")
    flags.add_argument("--plot", type=Path, default=PLOT, help="(default: %(default)s)")
    flags.add_argument("--print", action="store_true", help="print the tables and leave page and plot alone")
    given = flags.parse_args()
    found = run_all(jobs_of(given.runs, given.power_runs), given.processes)
    if given.json:
        plain: dict[str, Any] = {
            name: {key: value.tolist() for key, value in each._asdict().items()} for name, each in found.items()
        }
        given.json.write_text(json.dumps(plain))
    if not given.print:
        given.plot.write_text(draw((JUDGE, *RULES), [found[name].rules for name, *_ in RAMPS[:2]]))
    publish("rollout judge", tables(found, given.runs, given.power_runs), given)


if __name__ == "__main__":
    main()
