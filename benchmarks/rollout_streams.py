"""Streams of simulated rollouts, many at a time: what both arms answer, and what the judge says of it.

The evidence is computed by `nerite.judge.evidence`, the function that the judge itself calls, on arrays with one more
axis, that of the runs. Counting and thresholds are vectorised here; `tests/unit/judge/test_rollout_streams.py` shows
that a `Judge` that is given the same requests one by one comes to the same e-values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from nerite.judge.evidence import gate_evidence
from nerite.judge.gates import RateGate, TailGate, parse_gate
from nerite.judge.judge import LEAST_BAD, SUSPICION, log_boundary
from nerite.judge.latency_counts import upper_edge

GATES: Final = ("errors", "p99=+10%", "ttft_p95=+10%")
ALPHA: Final = 0.05
BETA: Final = 0.05
LEAST_REQUESTS: Final = 100
PRIMING: Final = 2000
"""Requests of the baseline before the rollout, that the first thresholds come from."""
BUCKETS: Final = 560
"""Of latencies, as the judge counts them, from the bucket ``LEAST`` on: 0.14 ms to 9 s."""
LEAST: Final = 250
SIGMA: Final = 0.5
"""Of the logarithm of latencies."""
_WIDTH: Final = math.log(upper_edge(1) / upper_edge(0))
_LATENCY: Final = (math.log(20_000), math.log(80_000))
_FIRST: Final = (math.log(5_000), math.log(30_000))
_LONG_ERRORS: Final = 3.0
_Z95: Final = 1.6448536


class Plan(NamedTuple):
    """Weights of the candidate, and the requests that are judged at each."""

    weights: tuple[float, ...]
    batches: int
    """Of each weight."""
    batch: int
    """Requests between two looks."""


class Candidate(NamedTuple):
    """How the candidate differs: factors."""

    errors: float = 1.0
    latency: float = 1.0
    tail: float = 1.0
    """Of the slowest 5 % of requests."""
    first: float = 1.0


class Load(NamedTuple):
    """What both arms are given."""

    errors: float = 0.005
    drifting: bool = False
    """Latencies go up and down by 40 %, and prompts become longer and shorter."""


class Batch(NamedTuple):
    """One batch of each run: arrays (runs, requests). Latencies are logarithms of microseconds."""

    step: int
    weight: float
    candidate: np.ndarray
    long: np.ndarray
    error: np.ndarray
    latency: np.ndarray
    first: np.ndarray


@dataclass
class Streams:
    """The requests of some runs."""

    plan: Plan
    load: Load
    arms: Candidate
    runs: int
    seed: tuple[int, ...]
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the seed."""
        self.random = np.random.default_rng(self.seed)

    def _batch(self, step: int, weight: float, requests: int, when: float) -> Batch:
        shape = (self.runs, requests)
        random = self.random
        share = 0.35 + 0.25 * math.sin(5 * when) if self.load.drifting else 0.0
        drift = 0.4 * math.sin(9 * when) if self.load.drifting else 0.0
        candidate = random.random(shape, dtype=np.float32) < weight
        long = random.random(shape, dtype=np.float32) < share
        rate = self.load.errors * np.where(long, _LONG_ERRORS, 1.0) * np.where(candidate, self.arms.errors, 1.0)
        error = random.random(shape, dtype=np.float32) < rate
        noise = random.standard_normal(shape, dtype=np.float32).astype(float)
        latency = np.where(long, _LATENCY[1], _LATENCY[0]) + SIGMA * noise + drift
        latency += candidate * (math.log(self.arms.latency) + (noise > _Z95) * math.log(self.arms.tail))
        noise = random.standard_normal(shape, dtype=np.float32).astype(float)
        first = np.where(long, _FIRST[1], _FIRST[0]) + SIGMA * noise + drift
        first += candidate * math.log(self.arms.first)
        return Batch(step, weight, candidate, long, error, latency, first)

    def __iter__(self) -> Iterator[Batch]:
        """Yield what comes before the rollout (step -1), and then each batch."""
        yield self._batch(-1, 0.0, PRIMING, 0.0)
        total = self.plan.batches * len(self.plan.weights)
        for step, weight in enumerate(self.plan.weights):
            for number in range(self.plan.batches):
                yield self._batch(step, weight, self.plan.batch, (step * self.plan.batches + number) / total)


class Look(NamedTuple):
    """Evidence of all runs after a batch; arrays (gates, runs)."""

    worse: np.ndarray
    not_worse: np.ndarray
    rolled_back: np.ndarray
    """Gates that say so at this look."""
    suspected: np.ndarray
    """Runs with a stratum that looks worse."""
    requests: np.ndarray
    """Of the candidate."""

    @property
    def promoted(self) -> np.ndarray:
        """Runs whose candidate may be promoted."""
        safe = (self.not_worse >= -math.log(BETA)).all(axis=0) & ~self.rolled_back.any(axis=0)
        return safe & ~self.suspected & (self.requests >= LEAST_REQUESTS)


class JudgedStreams:
    """The judge of many runs."""

    def __init__(self, plan: Plan, runs: int) -> None:
        """Begin with no evidence."""
        self.gates = [gate for gate in map(parse_gate, GATES) if isinstance(gate, RateGate | TailGate)]
        steps = len(plan.weights)
        self.runs, self.weights = runs, np.array(plan.weights)
        self.bad = np.zeros((2, len(self.gates), runs, steps, 2, steps))
        """Of the candidate and the baseline; by gate, run, window, stratum, probability."""
        self.exposed = np.zeros((len(self.gates), runs))
        self.requests = np.zeros(runs)
        self.seen = np.zeros((2, runs, 2, BUCKETS))
        """Requests of the baseline: latency or first response, run, stratum, bucket."""
        self.thresholds = np.full((2, runs, 2), np.nan)
        self.step = -1

    def _learn(self, batch: Batch) -> None:
        base = np.arange(self.runs)[:, None] * 2 + batch.long
        kept = ~batch.candidate & ~batch.error
        for index, values in enumerate((batch.latency, batch.first)):
            places = (base * BUCKETS + (values / _WIDTH).astype(int) - LEAST)[kept]
            self.seen[index] += np.bincount(places, minlength=self.runs * 2 * BUCKETS).reshape(self.runs, 2, BUCKETS)

    def _freeze(self) -> None:
        edges = np.log([upper_edge(bucket) for bucket in range(LEAST, LEAST + BUCKETS)])
        for index, gate in enumerate(self.gates[1:]):
            assert isinstance(gate, TailGate)
            seen = self.seen[index].cumsum(axis=-1)
            total = seen[..., -1]
            at = (seen >= np.ceil(total * gate.quantile)[..., None]).argmax(axis=-1)
            self.thresholds[index] = np.where(total * (1 - gate.quantile) >= 3, edges[at], np.inf)
        self.seen = np.where(self.seen >= 0.25, self.seen / 2, 0.0)

    def take(self, batch: Batch) -> Look | None:
        """Count a batch, and look."""
        if batch.step < 0:
            self._learn(batch)
            return None
        if batch.step != self.step:
            self._freeze()
            self.step = batch.step
        bad = [batch.error]
        for index, values in enumerate((batch.latency, batch.first)):
            gate = self.gates[index + 1]
            of_stratum = self.thresholds[index]
            limit = np.where(batch.long, of_stratum[:, 1:], of_stratum[:, :1])
            bad.append(values > limit + batch.candidate * math.log1p(gate.margin))
        for index, events in enumerate(bad):
            for arm, ours in enumerate((batch.candidate, ~batch.candidate)):
                for stratum, those in enumerate((~batch.long, batch.long)):
                    counts = (events & ours & those).sum(axis=1)
                    self.bad[arm, index, :, self.step, stratum, self.step] += counts
            compared = batch.candidate & (events | ~batch.error if index else True)
            self.exposed[index] += compared.sum(axis=1)
        self.requests += batch.candidate.sum(axis=1)
        self._learn(batch)
        return self._look()

    def _look(self) -> Look:
        now = self.step + 1
        candidate, baseline = self.bad[:, :, :, :now, :, :now]
        of_candidate = candidate.sum(axis=(-3, -2, -1))
        found = [
            gate_evidence(
                candidate[index],
                baseline[index],
                self.weights[:now],
                of_candidate[index],
                self.exposed[index],
                tolerated=gate.tolerated,
                floor=gate.floor,
            )
            for index, gate in enumerate(self.gates)
        ]
        worse = np.array([each.worse for each in found])
        boundary = log_boundary(ALPHA, len(self.gates))
        return Look(
            worse,
            np.array([each.not_worse for each in found]),
            (worse >= boundary) & (of_candidate >= LEAST_BAD),
            np.max([each.strata.max(axis=-1) for each in found], axis=0) > SUSPICION,
            self.requests,
        )
