"""The search finds what exhaustive search finds, with a quarter of the measurements, on models that are formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from nerite.analyze.analysis import findings
from nerite.analyze.finding import Figure, Finding
from nerite.analyze.ranking import Limits, kept, ranked, score
from nerite.analyze.search import Method, budget, search
from nerite.analyze.settings import OFF, Value
from nerite.analyze.space import Space, space_of
from nerite.config.model_config import ModelConfig, ModelInstanceGroup
from nerite.core.errors import InvalidArgument

CONCURRENCIES = (1, 8, 32)
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
    "batches": (formula(4.0, 0.05, parallel=0.3, alike=0.1), Limits()),
    "instances": (formula(0.2, 1.0, parallel=0.4, alike=1.0), Limits()),
    "in a hurry": (formula(1.0, 0.4, parallel=0.7, alike=0.8), Limits(p99=12.0, memory=500e6)),
}


def surveyed(space: Space, method: Method, surface: Surface, limits: Limits) -> list[Finding]:
    def measure(changes: Mapping[str, Value]) -> Finding:
        now = dict(zip(space.axes, space.present, strict=True)) | changes
        delay = -1 if now["delay"] == OFF else int(now["delay"])
        largest, instances, threads = int(now["max_batch"]), int(now["instances"]), int(now["threads"])
        figures = tuple(surface(largest, delay, instances, threads, each) for each in CONCURRENCIES)
        return Finding(changes, figures, int(instances * (100e6 + largest * 1e6)))

    return list(findings(space, search(method, space), measure, lambda each: score(each, limits)))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cores", [2, 8, 16])
def test_guided_is_nearly_as_good_as_exhaustive(model: str, cores: int) -> None:
    surface, limits = MODELS[model]
    space = space_of(ONNX, cores, {})
    all_of_them = surveyed(space, "brute", surface, limits)
    assert len(all_of_them) == space.size
    some = surveyed(space, "guided", surface, limits)
    assert len(some) <= space.size / 4
    best, found = ranked(all_of_them, limits)[0], ranked(some, limits)[0]
    assert kept(best, limits) and kept(found, limits)
    assert score(found, limits)[1] >= 0.95 * score(best, limits)[1]
    # There was something to find.
    assert score(found, limits) > score(some[0], limits)


@pytest.mark.parametrize("model", MODELS)
def test_quick_measures_less_and_makes_it_better(model: str) -> None:
    surface, limits = MODELS[model]
    space = space_of(ONNX, 8, {})
    quick = surveyed(space, "quick", surface, limits)
    assert len(quick) < len(surveyed(space, "guided", surface, limits))
    assert score(ranked(quick, limits)[0], limits) > score(quick[0], limits)


@pytest.mark.parametrize("method", ["quick", "guided", "brute"])
def test_nothing_is_asked_twice_and_the_present_first(method: Method) -> None:
    surface, limits = MODELS["in a hurry"]
    found = surveyed(space_of(ONNX, 4, {}), method, surface, limits)
    assert not found[0].changes
    asked = [tuple(sorted(each.changes.items())) for each in found]
    assert len(set(asked)) == len(asked) <= budget(method, space_of(ONNX, 4, {}))


def test_values_that_are_named_and_the_present_one() -> None:
    space = space_of(ONNX, 4, {"max_batch": (32, 1), "preferred": (4,)})
    assert space.axes["max_batch"] == (1, 8, 32)
    assert space.axes["preferred"] == (0, 4)
    assert space.axes["delay"] == (OFF, 0, 500, 2000)
    assert space.changes(space.present) == {}


def test_a_model_of_ones_own_is_not_asked_for_larger_batches() -> None:
    space = space_of(replace(ONNX, backend="python"), 4, {})
    assert space.axes["max_batch"] == (1, 4, 8)
    assert "threads" not in space.axes


@pytest.mark.parametrize(("name", "says"), [("threads", "has no threads to vary"), ("max_batch", "has no max_batch")])
def test_what_a_model_does_not_have(name: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        space_of(replace(ONNX, backend="python", max_batch_size=0), 4, {name: (1, 2)})
