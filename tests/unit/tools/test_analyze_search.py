"""The search finds what exhaustive search finds, with a quarter of the measurements, on models that are formulas."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nerite.config.model_config import ModelConfig, ModelInstanceGroup, ModelSequenceBatching
from nerite.core.errors import InvalidArgument
from nerite.tools.analyze.finding import AGAIN, TURNS, Figure, Finding, Goal, Measure, findings, settled
from nerite.tools.analyze.search import OFF, Method, Space, Subject, Subjects, Value, budget, search, space_of

CONCURRENCIES = (1, 8, 32)
AGAIN_POINTS = -(-AGAIN // len(CONCURRENCIES))
ONNX = ModelConfig(
    name="m", backend="onnxruntime", max_batch_size=8, instance_group=(ModelInstanceGroup(count=1, kind="KIND_CPU"),)
)
Surface = Callable[[int, int, int, int, int], Figure]
"""Of largest batch, delay (-1: off), instances, threads, concurrency."""
CORES = 8


def formula(base: float, each: float, *, parallel: float, alike: float) -> Surface:
    """Return how a model behaves: an execution takes ``base`` and ``each`` for an element, in milliseconds.

    ``parallel`` is the part that threads share; ``alike`` the part of an instance's speed that a second one adds.
    """

    def figure(largest: int, delay: int, instances: int, threads: int, concurrency: int) -> Figure:
        threads = threads or max(1, CORES // instances)
        batch = 1 if delay < 0 else max(1, min(largest, concurrency / instances))
        crowd = max(1.0, instances * threads / CORES)
        alone = (base + each * batch) * (1 - parallel + parallel / threads)
        execution = alone * crowd**1.2
        busy = min(instances, concurrency / batch)
        together = 1 + (busy - 1) * alike
        wait = delay / 1000 if delay > 0 and concurrency < largest * instances else 0.0
        rate = together * batch / (execution + wait) * 1000
        mean = concurrency / rate * 1000
        return Figure(concurrency, rate, mean, mean * 1.3 + wait)

    return figure


MODELS = {
    "batches": (formula(4.0, 0.05, parallel=0.3, alike=0.1), Goal()),
    "instances": (formula(0.2, 1.0, parallel=0.4, alike=1.0), Goal()),
    "in a hurry": (formula(1.0, 0.4, parallel=0.7, alike=0.8), Goal(p99=12.0, memory=500e6)),
}


def subjects(*configs: ModelConfig) -> Subjects:
    path = Path("config.pbtxt")
    return Subjects(tuple(Subject(path, "", config, config) for config in configs), prefixed=len(configs) > 1)


def space_for(config: ModelConfig, cores: int, **wanted: Sequence[Value]) -> Space:
    return space_of(subjects(config), cores, [("", name, values) for name, values in wanted.items()])


class Measuring:
    """Measures formulas, with a noise that is never the same."""

    def __init__(self, space: Space, surface: Surface, noise: float = 0.0, seed: int = 0) -> None:
        self._space = space
        self._surface = surface
        self._noise = noise
        self._random = random.Random(seed)
        self.levels = 0

    def __call__(self, changes: Mapping[str, Value], turn: int = 0, levels: Sequence[int] = CONCURRENCIES) -> Finding:
        now = dict(zip(self._space.axes, self._space.present, strict=True)) | changes
        delay = -1 if now["delay"] == OFF else int(now["delay"])
        largest, instances, threads = int(now["max_batch"]), int(now["instances"]), int(now["threads"])
        levels = levels or CONCURRENCIES
        self.levels += len(levels)
        figures = (self._blurred(self._surface(largest, delay, instances, threads, each)) for each in levels)
        return Finding(changes, tuple(figures), int(instances * (100e6 + largest * 1e6)))

    def _blurred(self, figure: Figure) -> Figure:
        factor = 1 + self._random.gauss(0, self._noise)
        return replace(figure, rate=figure.rate * factor, p99=figure.p99 / factor)


def surveyed(space: Space, method: Method, surface: Surface, goal: Goal) -> list[Finding]:
    return searched(space, method, Measuring(space, surface), goal)


def searched(space: Space, method: Method, measure: Measure, goal: Goal, most: int | None = None) -> list[Finding]:
    points = budget(method, space, AGAIN_POINTS, most)
    return list(findings(space, search(method, space, points), measure, goal))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cores", [2, 8, 16])
def test_guided_is_nearly_as_good_as_exhaustive(model: str, cores: int) -> None:
    surface, goal = MODELS[model]
    space = space_for(ONNX, cores)
    all_of_them = surveyed(space, "brute", surface, goal)
    assert len(all_of_them) == space.size
    some = surveyed(space, "guided", surface, goal)
    assert len(some) <= space.size / 4
    best, found = goal.ranked(all_of_them)[0], goal.ranked(some)[0]
    assert goal.kept(best) and goal.kept(found)
    assert goal.score(found)[1] >= 0.95 * goal.score(best)[1]
    # There was something to find.
    assert goal.score(found) > goal.score(some[0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("model", ["batches", "instances"])
@pytest.mark.parametrize("cores", [2, 8])
def test_guided_is_so_where_measurements_are_not_exact(model: str, cores: int, seed: int) -> None:
    surface, goal = MODELS[model]
    space = space_for(ONNX, cores)
    measure = Measuring(space, surface, 0.04, seed)
    winner = goal.winners(settled(searched(space, "guided", measure, goal), measure, goal))[0]
    assert winner.turns == TURNS
    assert measure.levels <= space.size * len(CONCURRENCIES) / 4
    exactly = Measuring(space, surface)
    best = goal.ranked(surveyed(space, "brute", surface, goal))[0]
    assert goal.score(exactly(winner.changes))[1] >= 0.95 * goal.score(best)[1]


def test_those_near_the_best_are_measured_again_in_turns() -> None:
    asked: list[tuple[object, int]] = []

    def measure(changes: Mapping[str, Value], turn: int = 0, levels: Sequence[int] = ()) -> Finding:
        asked.append((dict(changes), turn))
        assert levels == (8,)
        rate = {1: 90.0, 2: 100.0}[int(changes.get("instances", 1))]
        return Finding(changes, (Figure(8, rate, 1.0, 1.0),))

    def once(rate: float, **changes: Value) -> Finding:
        return Finding(changes, (Figure(1, rate / 2, 1.0, 1.0), Figure(8, rate, 1.0, 1.0)))

    found = [once(50.0), once(101.0, delay=0), once(99.0, instances=2), once(80.0, delay=500)]
    after = settled(found, measure, Goal())
    assert asked == [
        ({"delay": 0}, 1),
        ({"instances": 2}, 1),
        ({}, 1),
        ({"delay": 0}, 2),
        ({"instances": 2}, 2),
        ({}, 2),
    ]
    assert [each.turns for each in after] == [3, 3, 3, 1]
    assert [dict(each.changes) for each in after] == [dict(each.changes) for each in found]
    assert Goal().winners(after)[0].changes == {"instances": 2}
    # Nothing is near the present configuration: it is the best as it is.
    asked.clear()
    assert settled([once(500.0), *found[1:]], measure, Goal())[0].turns == 1
    assert asked == []


@pytest.mark.parametrize("model", MODELS)
def test_quick_measures_less_and_makes_it_better(model: str) -> None:
    surface, goal = MODELS[model]
    space = space_for(ONNX, 8)
    quick = surveyed(space, "quick", surface, goal)
    assert len(quick) < len(surveyed(space, "guided", surface, goal))
    assert goal.score(goal.ranked(quick)[0]) > goal.score(quick[0])


@pytest.mark.parametrize("method", ["quick", "guided", "brute"])
@pytest.mark.parametrize("most", [None, 7])
def test_nothing_is_asked_twice_and_the_present_first(method: Method, most: int | None) -> None:
    surface, goal = MODELS["in a hurry"]
    space = space_for(ONNX, 4)
    found = list(
        findings(
            space, search(method, space, budget(method, space, AGAIN_POINTS, most)), Measuring(space, surface), goal
        )
    )
    assert not found[0].changes
    asked = [tuple(sorted(each.changes.items())) for each in found]
    assert len(set(asked)) == len(asked) <= budget(method, space, AGAIN_POINTS, most)
    assert most is None or len(asked) == most


def test_values_that_are_named_and_the_present_one() -> None:
    space = space_for(ONNX, 4, max_batch=(32, 1), preferred=(4,))
    assert space.axes["max_batch"] == (1, 8, 32)
    assert space.axes["preferred"] == (0, 4)
    assert space.axes["delay"] == (OFF, 0, 500, 2000)
    assert space.changes(space.present) == {}


def test_a_model_of_ones_own_is_not_asked_for_larger_batches() -> None:
    space = space_for(replace(ONNX, backend="python"), 4)
    assert space.axes["max_batch"] == (1, 4, 8)
    assert "threads" not in space.axes


def test_requests_of_sequences_do_not_wait_for_others() -> None:
    space = space_for(replace(ONNX, backend="python", sequence_batching=ModelSequenceBatching()), 2)
    assert set(space.axes) == {"max_batch", "instances"}


def test_the_settings_of_several_models_are_one_space() -> None:
    python = replace(ONNX, name="p", backend="python", max_batch_size=0)
    both = subjects(ONNX, python)
    space = space_of(both, 2, [("", "instances", (1, 2)), ("m", "max_batch", (8,)), ("m", "threads", (0,))])
    assert list(space.axes) == ["m.max_batch", "m.delay", "m.instances", "m.threads", "p.instances"]
    assert space.size == 1 * 4 * 2 * 1 * 2
    changes: dict[str, Value] = {"m.delay": 500, "p.instances": 2}
    assert {subject.name: values for subject, values in both.values(changes)} == {
        "m": {"delay": 500},
        "p": {"instances": 2},
    }
    assert [start[-1] for start in space.starts] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("model", "name", "says"),
    [
        ("", "threads", "'m' has no setting 'threads' that can vary"),
        ("m", "max_batch", "'m' has no setting 'max_batch'"),
        ("x", "delay", "'x' is not one of the models"),
    ],
)
def test_what_a_model_does_not_have(model: str, name: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        space_of(subjects(replace(ONNX, backend="python", max_batch_size=0)), 4, [(model, name, (1, 2))])
