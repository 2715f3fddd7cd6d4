"""Ensembles: whatever the graph, and in whatever order steps answer, the answer is what a plain interpreter says."""

from __future__ import annotations

import gc
import json
import tracemalloc
import weakref
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.config.model_config import ModelEnsembling
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ByteBudget, Memo
from nerite.core.request import Caller, RequestedOutput, RequestHeader
from nerite.core.response import ResponseHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import TensorSpec
from nerite.scheduling import ensemble as module
from nerite.scheduling import fused_steps
from nerite.scheduling.ensemble import (
    EnsembleGraph,
    EnsembleProgress,
    EnsembleProgressCache,
    GraphStep,
    StepModel,
    StepStart,
)
from nerite.scheduling.fused_steps import fitted_inputs


class Drawn(NamedTuple):
    """An ensemble as plain data: for each step the tensors that it takes; it gives ``<number>a`` and ``<number>b``."""

    inputs: list[str]
    steps: list[list[str]]
    wanted: list[str]
    given: list[str]


@st.composite
def ensembles(draw: st.DrawFn) -> Drawn:
    inputs = [f"in{number}" for number in range(draw(st.integers(1, 3)))]
    tensors = list(inputs)
    steps = []
    for number in range(draw(st.integers(1, 6))):
        steps.append(draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3)))
        tensors += [f"{number}a", f"{number}b"]
    made = tensors[len(inputs) :]
    wanted = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    return Drawn(inputs, steps, wanted, draw(st.lists(st.sampled_from(inputs), unique=True)))


def signature(name: str, inputs: Sequence[str], outputs: Sequence[str], batch: int = 0) -> Signature:
    return Signature(
        name,
        batch,
        [SignatureInput(each, dtypes.INT32, (1,), optional=True) for each in inputs],
        [SignatureOutput(each, dtypes.INT32, (1,)) for each in outputs],
    )


def graph_of(drawn: Drawn, *, decoupled: Sequence[int] = (), workers: Sequence[str] = ()) -> EnsembleGraph:
    steps, parts = [], []
    for number, taken in enumerate(drawn.steps):
        inputs = [f"i{at}" for at in range(len(taken))]
        steps.append(
            ModelEnsembling.Step(
                model_name=f"m{number}",
                model_version=-1,
                input_map=dict(zip(inputs, taken, strict=True)),
                output_map={"a": f"{number}a", "b": f"{number}b"},
            )
        )
        worker = workers[number % len(workers)] if workers else ""
        parts.append(StepModel(signature(f"m{number}", inputs, ["a", "b"]), number in decoupled, worker=worker))
    made = [f"{number}{letter}" for number in range(len(drawn.steps)) for letter in "ab"]
    return EnsembleGraph(signature("e", drawn.inputs, made), "1", steps, parts)


def asking(drawn: Drawn) -> RequestHeader:
    specs = [TensorSpec(name, dtypes.INT32, (1,)) for name in drawn.given]
    return RequestHeader("e", "", specs, [RequestedOutput(name) for name in drawn.wanted])


def expected(drawn: Drawn, tensor: str) -> str:
    """What a tensor is, said by what it is made from. An input that was not given is nothing."""
    if tensor.startswith("in"):
        return tensor if tensor in drawn.given else "-"
    number, letter = int(tensor[:-1]), tensor[-1]
    return f"{letter}{number}({','.join(expected(drawn, each) for each in drawn.steps[number])})"


def needed(drawn: Drawn) -> set[int]:
    found: set[int] = set()
    todo = [tensor for tensor in drawn.wanted if not tensor.startswith("in")]
    while todo:
        number = int(todo.pop()[:-1])
        found.add(number)
        todo += [tensor for tensor in drawn.steps[number] if not tensor.startswith("in")]
    return found


ANSWER = ResponseHeader("m", "1", [TensorSpec("a", dtypes.INT32, (1,)), TensorSpec("b", dtypes.INT32, (1,))])


def computed(start: StepStart, data: list[list[str]]) -> list[str]:
    """What the model of a step answers."""
    came = dict(
        zip((s.name for s in start.header.inputs), (data[whose][which] for whose, which in start.places), strict=True)
    )
    values = ",".join(came.get(name, "-") for name, _ in start.step.inputs)
    return [f"{letter}{start.step.number}({values})" for letter in "ab"]


@given(ensembles(), st.randoms(use_true_random=False))
def test_like_a_plain_interpreter(drawn: Drawn, random: object) -> None:
    beginning = EnsembleProgressCache(graph_of(drawn), asking(drawn)).begin()
    for _ in range(2):  # the second time everything is remembered
        situation = beginning
        data: list[list[str]] = [list(drawn.given)]
        running = list(situation.starts)
        ran = []
        answers = []
        while running:
            start = running.pop(random.randrange(len(running)))  # type: ignore[attr-defined]
            ran.append(start.step.number)
            data_of_step = computed(start, data)
            situation = situation.after(start.step, ANSWER)
            data.append(data_of_step)
            running += situation.starts
            if situation.answer is not None:
                answers.append(situation.answer)
        assert sorted(ran) == sorted(needed(drawn))
        (answer,) = answers
        said = {
            spec.name: data[whose][which]
            for spec, (whose, which) in zip(answer.header.outputs, answer.places, strict=True)
        }
        assert said == {tensor: expected(drawn, tensor) for tensor in drawn.wanted}


def gone_along(
    drawn: Drawn, start: StepStart, data: list[list[str]], random: Random
) -> tuple[GraphStep, list[str], list[int]]:
    """Go as a worker does from the answer of a step, as far as it likes; return where that ends, what is there, and
    which steps that took."""
    fused_segment = start.fused_segment
    assert fused_segment is not None and fused_segment.steps[0] == start.step
    had = [data[whose][which] for whose, which in start.places]
    came = computed(start, data)
    reached, took = start.step, [start.step.number]
    for link in fused_segment.links[: random.randint(0, len(fused_segment.links))]:
        question = fused_steps.link_from_json(json.loads(json.dumps(fused_steps.link_to_json(link)))).question(
            start.header, ANSWER
        )
        assert question is not None
        asked = question.header
        assert asked.model_name == f"m{link.number}" and asked.wanted == set(link.outputs)
        told = [came[at] if before else had[at] for before, at in question.places]
        by_name = dict(zip((spec.name for spec in asked.inputs), told, strict=True))
        values = ",".join(by_name.get(f"i{at}", "-") for at in range(len(drawn.steps[link.number])))
        came = [f"{letter}{link.number}({values})" for letter in "ab"]
        took.append(link.number)
        reached = fused_segment.steps[len(took) - 1]
        assert reached.number == link.number
    return reached, came, took


@given(ensembles(), st.lists(st.sampled_from(("one", "other", "")), min_size=1, max_size=3), st.randoms())
def test_steps_that_follow_each_other_in_a_worker_lead_to_the_same(
    drawn: Drawn, workers: list[str], random: Random
) -> None:
    beginning = EnsembleProgressCache(graph_of(drawn, workers=workers), asking(drawn)).begin()
    situation = beginning
    data: list[list[str]] = [list(drawn.given)]
    running = list(situation.starts)
    ran: list[int] = []
    answers = []
    while running:
        start = running.pop(random.randrange(len(running)))
        if start.fused_segment is None:
            reached, came, took = start.step, computed(start, data), [start.step.number]
        else:
            assert len({step.worker for step in start.fused_segment.steps}) == 1 and start.step.worker
            reached, came, took = gone_along(drawn, start, data, random)
        ran += took
        situation = situation.after(reached, ANSWER)
        data.append(came)
        running += situation.starts
        if situation.answer is not None:
            answers.append(situation.answer)
    assert sorted(ran) == sorted(needed(drawn))
    (answer,) = answers
    said = {
        spec.name: data[whose][which] for spec, (whose, which) in zip(answer.header.outputs, answer.places, strict=True)
    }
    assert said == {tensor: expected(drawn, tensor) for tensor in drawn.wanted}


def test_what_follows_in_a_worker() -> None:
    row = Drawn(["in0"], [["in0"], ["0a"], ["1a", "in0"], ["2a"]], ["3a"], ["in0"])

    def after(start: int, drawn: Drawn = row, *workers: str) -> list[int]:
        fused_segment = (
            graph_of(drawn, workers=workers or ["w"]).plan(frozenset(drawn.wanted)).fused_segments.get(start)
        )
        return [] if fused_segment is None else [step.number for step in fused_segment.steps[1:]]

    assert after(0) == [1, 2, 3]
    assert after(1) == []  # the third takes something that the second was never given
    assert after(2) == [3]
    assert after(0, row, "w", "w", "v", "v") == [1]
    assert after(0, row, "") == []
    assert after(0, Drawn(["in0"], [["in0"], ["0a"], ["0b"]], ["1a", "2a"], ["in0"])) == []  # two take what it gives
    assert after(0, Drawn(["in0"], [["in0"], ["0a"]], ["0a", "1a"], ["in0"])) == []  # and here the caller does
    assert after(0, Drawn(["in0"], [["in0"], ["0a"]], ["0b", "1a"], ["in0"])) == []


def test_what_does_not_fit_the_next_model_is_not_asked() -> None:
    row = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    (start,) = EnsembleProgressCache(graph_of(row, workers=["w"]), asking(row)).begin().starts
    assert start.fused_segment is not None
    (link,) = start.fused_segment.links
    for datatype, shape in ((dtypes.FP32, (1,)), (dtypes.INT32, (2,)), (dtypes.INT32, ())):
        wrong = ResponseHeader("m0", "1", [TensorSpec("a", datatype, shape)])
        assert link.question(start.header, wrong) is None
    assert link.question(start.header, ANSWER) is not None


def test_each_step_is_asked_for_the_caller_of_the_ensemble() -> None:
    row = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    acme = Caller("acme", "batch", 5)
    beginning = EnsembleProgressCache(graph_of(row, workers=["w"]), asking(row).changed(caller=acme)).begin()
    (first,) = beginning.starts
    (second,) = beginning.after(first.step, ANSWER).starts
    assert first.header.caller == second.header.caller == acme
    assert first.fused_segment is not None
    (link,) = first.fused_segment.links
    question = link.question(first.header, ANSWER)
    assert question is not None and question.header.caller == acme


def test_equal_ways_are_one_object() -> None:
    drawn = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    beginning = EnsembleProgressCache(graph_of(drawn), asking(drawn)).begin()
    (first,) = beginning.starts
    one, other = (beginning.after(first.step, ANSWER) for _ in range(2))
    assert one is other
    assert one.starts[0].header is other.starts[0].header


def test_ways_on_are_remembered_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 128 * 1024)
    monkeypatch.setattr(module, "ENSEMBLES", budget)
    drawn = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    beginning = EnsembleProgressCache(graph_of(drawn), asking(drawn)).begin()
    (first,) = beginning.starts
    for number in range(300):
        header = ResponseHeader("m", "1", [TensorSpec("a", dtypes.INT32, (number,))])
        after = beginning.after(first.step, header)
        assert after is beginning.after(first.step, header)
        assert after.starts[0].header.inputs == (TensorSpec("i0", dtypes.INT32, (number,)),)
    assert 5 < len(beginning._next) < 50
    assert budget.used <= budget.limit


def test_what_a_large_request_leads_to_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the last situation, which is small itself: it keeps the caller's header."""
    budget = ByteBudget("test", 1024 * 1024)
    monkeypatch.setattr(module, "ENSEMBLES", budget)
    drawn = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    caller = RequestHeader("e", "", [TensorSpec("in0", dtypes.INT32, (1,))], parameters={"a": "x" * 200_000})
    now = EnsembleProgressCache(graph_of(drawn), caller).begin()
    while now.starts:
        now = now.after(now.starts[0].step, ANSWER)
    assert now.answer is not None
    assert budget.used == 0


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize("parameters", [0, 20])
def test_what_a_way_takes_in_memory_is_not_more_than_it_counts(
    monkeypatch: pytest.MonkeyPatch, steps: int, parameters: int
) -> None:
    budget = ByteBudget("test", 1 << 30, 1 << 20)
    monkeypatch.setattr(module, "ENSEMBLES", budget)
    drawn = Drawn(["in0"], [["in0"], *([f"{number}a"] for number in range(steps - 1))], [f"{steps - 1}a"], ["in0"])
    graph = graph_of(drawn)
    known: Memo[RequestHeader, EnsembleProgress] = Memo()

    def go(number: int) -> None:
        said = {f"parameter {at}": f"{number} {at}" for at in range(parameters)}
        caller = RequestHeader("e", "", [TensorSpec("in0", dtypes.INT32, (300 + number,))], parameters={**said})
        now = EnsembleProgressCache(graph, caller).begin()
        budget.put(known, caller, now, now.footprint)
        while now.starts:
            specs = [TensorSpec(name, dtypes.INT32, (300 + number,)) for name in "ab"]
            now = now.after(now.starts[0].step, ResponseHeader("m", "1", specs))

    for number in range(10):
        go(number)
    gc.collect()
    before = budget.used
    tracemalloc.start()
    try:
        for number in range(10, 110):
            go(number)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    counted = budget.used - before
    assert counted / 10 <= taken <= counted


def test_a_way_is_freed_without_the_collector() -> None:
    drawn = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    caller = RequestHeader("e", "", [TensorSpec("in0", dtypes.INT32, (1,))], parameters={"a": "x" * 200_000})
    gc.disable()
    try:
        now = EnsembleProgressCache(graph_of(drawn), caller).begin()
        course = weakref.ref(now._progress_cache)
        del now
        assert course() is None
    finally:
        gc.enable()


def test_each_response_of_a_decoupled_step_is_a_beginning() -> None:
    drawn = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    beginning = EnsembleProgressCache(graph_of(drawn, decoupled=[0]), asking(drawn)).begin()
    (first,) = beginning.starts
    one = beginning.after(first.step, ANSWER)
    (second,) = one.starts
    assert second.places == ((0, 0),)
    done = one.after(second.step, ANSWER)
    assert done.answer is not None and done.answer.places == ((1, 0),)
    assert beginning.after(first.step, ANSWER) is one


def test_an_output_that_a_step_leaves_out_does_not_come() -> None:
    drawn = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    beginning = EnsembleProgressCache(graph_of(drawn), asking(drawn)).begin()
    nothing = ResponseHeader("m", "1", [])
    (first,) = beginning.starts
    after = beginning.after(first.step, nothing)
    assert after.starts[0].header.inputs == ()
    end = after.after(after.starts[0].step, nothing)
    assert end.answer is not None and end.answer.header.outputs == () and end.answer.header.parameters == {}


def test_what_the_caller_says_goes_to_every_step() -> None:
    drawn = Drawn(["in0"], [["in0"]], ["0a"], ["in0"])
    spec = TensorSpec("in0", dtypes.INT32, (1,))
    header = RequestHeader(
        "e", "", [spec], parameters={"a": 1}, priority=2, timeout_us=3, sequence_id="s", sequence_start=True
    )
    (start,) = EnsembleProgressCache(graph_of(drawn), header).begin().starts
    asked = start.header
    assert (asked.model_name, asked.model_version) == ("m0", "")
    assert (asked.parameters, asked.priority, asked.timeout_us) == ({"a": 1}, 2, 3)
    assert (asked.sequence_id, asked.sequence_start, asked.sequence_end) == ("s", True, False)
    assert asked.wanted == {"a", "b"}


@pytest.mark.parametrize(
    ("shape", "batched", "dims", "wants", "fits"),
    [
        ((3, 2), True, (2,), True, (3, 2)),
        ((2,), False, (2,), True, (1, 2)),
        ((1, 2), False, (2,), True, (1, 2)),
        ((3,), False, (2,), True, (3,)),
        ((5,), False, (-1,), True, (1, 5)),
        ((1, 2), True, (2,), False, (2,)),
        ((3, 2), True, (2,), False, (3, 2)),
        ((1, 2), True, (-1, 2), False, (1, 2)),
        ((), False, (2,), True, ()),
        ((), True, (2,), False, ()),
    ],
)
def test_shapes_between_models_with_and_without_a_batch_dimension(
    shape: tuple[int, ...], batched: bool, dims: tuple[int, ...], wants: bool, fits: tuple[int, ...]
) -> None:
    assert fitted_inputs(shape, batched, dims, wants) == fits
