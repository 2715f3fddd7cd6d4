"""Plans of loads: what is drawn has the distribution that was asked for, and is the same whoever draws it."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nerite.tools.bench.planning import (
    ONE,
    CancelPlan,
    Distribution,
    Workload,
    constant,
    gamma,
    ramped,
    scheduled,
)

MANY = 4_000


def drawn(text: str) -> np.ndarray:
    generator = np.random.default_rng(1)
    distribution = Distribution.parse(text)
    return np.array([distribution.draw(generator) for _ in range(MANY)])


@pytest.mark.parametrize(
    "text, mean, deviation",
    [
        ("7", 7, 0),
        ("fixed:7", 7, 0),
        ("normal:100,10", 100, 10),
        ("lognormal:100,50", 100, 50),
        ("uniform:10,30", 20, 20 / 12**0.5),
        ("exponential:5", 5, 5),
    ],
)
def test_mean_and_deviation_are_those_asked_for(text: str, mean: float, deviation: float) -> None:
    values = drawn(text)
    assert values.mean() == pytest.approx(mean, rel=0.05)
    assert values.std() == pytest.approx(deviation, rel=0.15)


def test_what_is_drawn_has_bounds() -> None:
    assert drawn("normal:1,100").min() == 0
    assert drawn("lognormal:100000,1000000").max() <= 1_000_000
    generator = np.random.default_rng(0)
    assert min(Distribution.parse("normal:1,100").count(generator) for _ in range(100)) == 1


def test_lengths_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("10\n\n20\n")
    assert set(drawn(f"file:{file}")) == {10, 20}
    for text, said in (("ten\n", "line 1: 'ten' is not a number"), ("\n", "has no numbers")):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            Distribution.parse(f"file:{file}")


@pytest.mark.parametrize(
    "text, said",
    [
        ("x", "write N,"),
        ("normal:1", "write normal:MEAN,DEVIATION"),
        ("uniform:3,1", "least value is greater"),
        ("lognormal:0,1", "greater than 0"),
        ("-1", "from 0 to 1e6"),
        ("zipf:1", "is not a distribution: write N, normal:"),
    ],
)
def test_what_is_no_distribution(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Distribution.parse(text)


WORKLOAD = Workload(
    Distribution.parse("uniform:10,90"),
    Distribution.parse("uniform:1,9"),
    turns=Distribution.parse("uniform:1,5"),
    think=Distribution.parse("exponential:2"),
    shared_system=0.25,
    models={"base": 1.0, "poet": 3.0},
    cancel=CancelPlan(0.2, Distribution.parse("uniform:0.5,1.5")),
)


def test_a_plan_is_that_of_its_seed_and_number() -> None:
    plans = [WORKLOAD.conversation(number) for number in range(20)]
    assert plans == [WORKLOAD.conversation(number) for number in range(20)]
    assert len(set(plans)) == 20
    other = Workload(Distribution.parse("uniform:10,90"), seed=1)
    assert other.conversation(0) != Workload(Distribution.parse("uniform:10,90"), seed=2).conversation(0)


def test_another_run_has_the_same_lengths_and_other_words() -> None:
    one, other = WORKLOAD.conversation(3, run=1), WORKLOAD.conversation(3, run=2)
    assert [turn._replace(place=0) for turn in one.turns] == [turn._replace(place=0) for turn in other.turns]
    assert all(mine.place != its.place for mine, its in zip(one.turns, other.turns, strict=True))


def test_parts_of_a_workload_are_those_asked_for() -> None:
    plans = [WORKLOAD.conversation(number) for number in range(MANY)]
    turns = [turn for plan in plans for turn in plan.turns]
    assert Counter(plan.model for plan in plans)[1] / MANY == pytest.approx(0.75, abs=0.03)
    assert sum(not plan.system_place for plan in plans) / MANY == pytest.approx(0.25, abs=0.03)
    assert len(turns) / MANY == pytest.approx(WORKLOAD.mean_turns, rel=0.05) == pytest.approx(3, rel=0.1)
    cancelled = [turn.cancel_after for turn in turns if turn.cancel_after is not None]
    assert len(cancelled) / len(turns) == pytest.approx(0.2, abs=0.02)
    assert min(cancelled) >= 0.5 and max(cancelled) <= 1.5
    assert all(not plan.turns[0].think for plan in plans)
    later = [turn.think for plan in plans for turn in plan.turns[1:]]
    assert np.mean(later) == pytest.approx(2, rel=0.1)
    assert {len(turn.lengths) for turn in turns} == {1}
    assert min(turn.output for turn in turns) == 1 and max(turn.output for turn in turns) == 9


def test_several_texts_and_a_query() -> None:
    workload = Workload(Distribution.parse("30"), texts=Distribution.parse("4"), query=Distribution.parse("8"))
    (turn,) = workload.conversation(0).turns
    assert turn.lengths == (8, 30, 30, 30, 30)
    assert turn.output == 0 and turn.cancel_after is None


def test_constant_arrivals_of_several_generators_are_those_of_one() -> None:
    one = list(itertools.islice(constant(10), 6))
    assert one == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    shares = [list(itertools.islice(constant(10, share, 2), 3)) for share in range(2)]
    assert sorted(itertools.chain(*shares)) == one


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_arrivals_of_several_generators_are_those_of_one(burstiness: float) -> None:
    one = list(itertools.islice(gamma(100, burstiness), 10_000))
    shares = [list(itertools.islice(gamma(100, burstiness, share, 2), 5_000)) for share in range(2)]
    assert sorted(itertools.chain(*shares)) == one
    gaps = np.diff(one)
    assert gaps.mean() == pytest.approx(0.01, rel=0.1)
    # Of an exponential distribution (1) the deviation is the mean.
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert one != list(itertools.islice(gamma(100, burstiness, seed=1), 10_000))


def test_a_ramp_grows_linearly() -> None:
    times = list(itertools.islice(ramped(constant(100), 10), 2_000))
    assert times == sorted(times)
    # Half of the requests of the time come in a ramp, of these a quarter in its first half; then the rate is full.
    assert sum(time < 10 for time in times) == pytest.approx(500, abs=1)
    assert sum(time < 5 for time in times) == pytest.approx(125, abs=1)
    assert sum(10 <= time < 15 for time in times) == pytest.approx(500, abs=1)
    assert list(itertools.islice(ramped(constant(100), 0), 3)) == [0, 0.01, 0.02]


def test_recorded_times_begin_at_once_and_end() -> None:
    recorded = (100.0, 101.0, 104.0)
    assert list(scheduled(recorded, 2.0)) == [0, 0.5, 2]
    assert list(scheduled(recorded, 1.0, share=1, shares=2)) == [1]


def test_one_turn_is_one_request() -> None:
    assert Workload(ONE).mean_turns == 1
