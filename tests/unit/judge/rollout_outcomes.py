"""Outcomes for tests of the judge: streams of requests, a fixed time apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from nerite.judge.gates import parse_gate
from nerite.judge.judge import Judge
from nerite.judge.outcome import Outcome, Stratum
from nerite.judge.verdict import Decision, Verdict

STEP_NS = 100_000_000
SECOND_NS = 1_000_000_000

Change = Callable[[Outcome], Outcome]


def judge_of(*gates: str, **options: float) -> Judge:
    return Judge([*map(parse_gate, gates)], **options)  # type: ignore[arg-type]


def stratum_of(prompt_tokens: int, cached_tokens: int = 0, tenant: str = "", stream: bool = False) -> Stratum:
    """Return a stratum of requests to a language model, by the sizes of their prompts and what was cached of them."""
    prompt = next((name for limit, name in ((256, "<256"), (1024, "<1k"), (4096, "<4k")) if prompt_tokens < limit), "")
    share = cached_tokens / prompt_tokens
    return Stratum(prompt or ">=4k", "none" if share < 0.1 else "part" if share < 0.7 else "most", tenant, stream)


def requests(
    count: int,
    probability: float,
    seed: int = 1,
    *,
    errors: float = 0.0,
    candidate: Change = lambda outcome: outcome,
    begin_ns: int = 0,
    every_ns: int = STEP_NS,
    stratum: Stratum = Stratum(),  # noqa: B008
) -> Iterator[Outcome]:
    """Yield outcomes of log-normal latencies, those of the candidate changed as told."""
    random = np.random.default_rng(seed)
    labels = random.random(count) < probability
    failed = random.random(count) < errors
    noise = random.standard_normal((3, count))
    for index in range(count):
        latency, first, token = np.exp([10, 9, 7] + 0.4 * noise[:, index])
        outcome = Outcome(
            bool(labels[index]),
            probability,
            begin_ns + (index + 1) * every_ns,
            float(latency),
            float(min(first, latency)),
            float(token),
            "error" if failed[index] else "",
            stratum,
        )
        yield candidate(outcome) if outcome.candidate else outcome


def failing(rate: float, seed: int = 9) -> Change:
    random = np.random.default_rng(seed)
    return lambda outcome: outcome._replace(error="error") if random.random() < rate else outcome


def slower(factor: float, field: str = "latency_us") -> Change:
    return lambda outcome: outcome._replace(**{field: getattr(outcome, field) * factor})


def decided(judge: Judge, outcomes: Iterator[Outcome], every: int = 20) -> tuple[int, Verdict]:
    """Observe until something is decided; return after how many requests, and what."""
    number, now = 0, 0
    for number, outcome in enumerate(outcomes, 1):
        judge.observe(outcome)
        now = outcome.at_ns + SECOND_NS
        if number % every == 0 and (verdict := judge.verdict(outcome.at_ns)).decision is not Decision.CONTINUE:
            return number, verdict
    return number, judge.verdict(now)
