"""Minutes of too much, in front of an engine by a clock of its own: who is served, when, and at what rate."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping

import pytest
from token_engine import Engine, S, crowd, percentile

from nerite.admission.policy import AdmissionPolicy, ModelLimits, PriorityClass, Tenant
from nerite.admission.refusals import QuotaLimit

GOLD, SILVER, BRONZE = (
    PriorityClass("gold", 1, 6, 2.0),
    PriorityClass("silver", 2, 3, 4.0),
    PriorityClass("bronze", 3, 1),
)
CLASSES = {each.name: each for each in (GOLD, SILVER, BRONZE)}
WEIGHTS = {"a": 3, "b": 2, "c": 1}
POLICY = AdmissionPolicy(
    classes=CLASSES,
    tenants={name: Tenant(name, "gold", weight) for name, weight in WEIGHTS.items()},
    llms={"*": ModelLimits(max_running=32, queue_length=200)},
)
EVERYBODY = {(tenant, each.name): float(each.share) for tenant in WEIGHTS for each in CLASSES.values()}
SECONDS = 120
WARM = 10
REQUESTS = 18.7
"""That the engine can do in a second."""


@functools.cache
def peak() -> float:
    """Return the tokens a second that the engine does if somebody always waits, and it has all the memory it likes."""
    engine = Engine(AdmissionPolicy(llms={"*": ModelLimits(max_running=32, queue_length=100)}), tells=False)
    engine.run(30 * S, crowd(engine, 5 * REQUESTS, {("default", ""): 1.0}))
    return sum(engine.seen.work.values()) / 30


def overloaded(
    times: float,
    who: Mapping[tuple[str, str], float] = EVERYBODY,
    blocks: int = 1200,
    seconds: int = SECONDS,
    seed: int = 1,
    policy: AdmissionPolicy = POLICY,
    noise: float = 0.0,
) -> Engine:
    """Have so many times as much come as the engine can do."""
    engine = Engine(policy, blocks, seed=seed, noise=noise)
    arrivals = crowd(engine, times * REQUESTS, dict(who))
    engine.counting = False
    engine.run(WARM * S, arrivals)
    engine.counting = True
    engine.run((WARM + seconds) * S, arrivals)
    return engine


@pytest.mark.parametrize("blocks", [1200, 800], ids=["sequences are short", "memory is short"])
@pytest.mark.parametrize("times", [2, 5])
def test_too_much_of_everything(times: float, blocks: int) -> None:
    engine = overloaded(times, blocks=blocks)
    seen = engine.seen
    total = sum(seen.work.values())
    for tenant, weight in WEIGHTS.items():
        assert seen.work[tenant] / total == pytest.approx(weight / 6, rel=0.05)
    for level in (GOLD, SILVER):
        assert percentile(seen.first_token[level.name], 0.99) <= level.ttft_seconds
    assert seen.in_time / SECONDS >= 0.9 * peak()
    assert seen.preemptions == 0
    assert seen.most_blocks <= blocks
    assert seen.most_promised <= 1.0
    assert engine.gate.waiting <= 200


@pytest.mark.parametrize("times", [2, 5])
def test_brief_promises_are_kept_with_steps_of_any_length(times: float) -> None:
    """Who is let in has waited nearly as long as is promised, so what is left has to be enough for its prompt."""
    brief = dataclasses.replace(POLICY, classes={**CLASSES, "gold": dataclasses.replace(GOLD, ttft_seconds=0.7)})
    seen = overloaded(times, policy=brief, noise=0.3).seen
    assert percentile(seen.first_token["gold"], 0.99) < 0.7
    late = [each for each in seen.first_token["gold"] if each > 0.7]
    assert len(late) < len(seen.first_token["gold"]) / 200


def test_shares_are_kept_where_few_may_wait() -> None:
    """A tenant of whom there is always enough, and of whom at times nobody waits, since none may wait for long."""
    brief = dataclasses.replace(POLICY, classes={"gold": dataclasses.replace(GOLD, ttft_seconds=0.6)})
    who = {(tenant, "gold"): 1.0 for tenant in WEIGHTS}
    work = overloaded(2, who, policy=brief, noise=0.1).seen.work
    for tenant, weight in WEIGHTS.items():
        assert work[tenant] / sum(work.values()) == pytest.approx(weight / 6, rel=0.05)


def test_below_its_capacity_nobody_is_refused() -> None:
    seen = overloaded(0.8).seen
    assert seen.refused == []
    assert percentile(seen.first_token["gold"], 0.99) < 1.0


def test_who_floods_harms_nobody_else() -> None:
    who = {("a", "gold"): 0.1, ("b", "silver"): 0.1, ("c", "gold"): 5.0}
    engine = overloaded(sum(who.values()), who)
    refused = Counter({tenant: sum(use.refused.values()) for tenant, _, use in engine.gate.usage.items()})
    assert (refused["a"], refused["b"]) == (0, 0)
    assert refused["c"] > 1000


def test_a_flood_of_the_least_class_is_shed_first() -> None:
    who = {("a", "gold"): 0.5, ("c", "bronze"): 4.5}
    engine = overloaded(sum(who.values()), who)
    uses = {level: use for _, level, use in engine.gate.usage.items()}
    assert uses["gold"].refused == {}
    assert uses["bronze"].refused[QuotaLimit.QUEUE_LENGTH] > 1000
    assert percentile(engine.seen.first_token["gold"], 0.99) < 1.0


def test_an_engine_that_slows_down_is_noticed() -> None:
    engine = overloaded(2, seconds=30)
    engine.speed = 0.4
    engine.run(engine.now + 10 * S, crowd(engine, 2 * REQUESTS, EVERYBODY))
    engine.seen.first_token.clear()
    engine.run(engine.now + 60 * S, crowd(engine, 2 * REQUESTS, EVERYBODY))
    assert percentile(engine.seen.first_token["gold"], 0.95) <= GOLD.ttft_seconds
    engine.speed = 1.0
    engine.run(engine.now + 20 * S, crowd(engine, 0.7 * REQUESTS, EVERYBODY))
    before = len(engine.seen.refused)
    engine.run(engine.now + 30 * S, crowd(engine, 0.7 * REQUESTS, EVERYBODY))
    assert len(engine.seen.refused) == before
