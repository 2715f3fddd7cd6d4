"""Ensembles: whatever the graph, and in whatever order steps answer, the answer is what a plain interpreter says."""

from __future__ import annotations

import gc
import json
import tracemalloc
import weakref
from collections.abc import Collection, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.config.model_config import ModelEnsembling
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ByteBudget, Memo
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import NOBODY, Caller, InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import Buffer, TensorSpec
from nerite.ensembles.ensemble import StepRequest
from nerite.scheduling import ensemble as module
from nerite.scheduling.ensemble import (
    EnsembleGraph,
    EnsembleProgress,
    EnsembleProgressCache,
    StepModel,
    StepStart,
    fitted_inputs,
)
from nerite.workers.child.fused import FusedSteps, runs_to_bytes
from nerite.workers.child.hosted_model import HostedModel
from nerite.workers.host.fused import FusedPath, FusedPaths


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


def graph_of(drawn: Drawn, *, decoupled: Sequence[int] = ()) -> EnsembleGraph:
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
        parts.append(StepModel(signature(f"m{number}", inputs, ["a", "b"]), number in decoupled))
    made = [f"{number}{letter}" for number in range(len(drawn.steps)) for letter in "ab"]
    return EnsembleGraph(signature("e", drawn.inputs, made), "1", steps, parts)


def progress(graph: EnsembleGraph, header: RequestHeader) -> EnsembleProgressCache:
    return EnsembleProgressCache(graph.plan(header.wanted), header)


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
    beginning = progress(graph_of(drawn), asking(drawn)).begin()
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


class Computes:
    """Instance of a step's model."""

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn

    def execute(self, requests: Sequence[InferenceRequest], timings: ExecutionTimes) -> list[InferenceResponse]:
        return [self._answer(request.header, request.data) for request in requests]

    def _answer(self, header: RequestHeader, data: Sequence[Buffer]) -> InferenceResponse:
        number = int(header.model_name[1:])
        came = {spec.name: bytes(each).decode() for spec, each in zip(header.inputs, data, strict=True)}
        values = ",".join(came.get(f"i{at}", "-") for at in range(len(self._drawn.steps[number])))
        return InferenceResponse(ANSWER, [f"{letter}{number}({values})".encode() for letter in "ab"])


class Fusing:
    """A worker in which some steps may follow each other, and the server's view of it."""

    def __init__(self, drawn: Drawn, fusible: Collection[int]) -> None:
        """The models of the steps ``fusible`` are in the worker; their seats are the numbers of the steps."""
        self.followed: list[int] = []
        self.loaded: dict[int, Any] = {}
        for number in fusible:
            hosted: Any = HostedModel(number, cast(Any, None), cast(Any, None))
            hosted.instance = Computes(drawn)
            self.loaded[number] = hosted
        self.hosted: dict[int, Any] = dict(self.loaded)
        self._chains = FusedSteps(self.hosted)
        self._paths = FusedPaths(cast(Any, self), lambda version: cast(Any, version).seat, self._introduce)
        self._fusible = fusible
        self._computes = Computes(drawn)
        self._run = SimpleNamespace(request=InferenceRequest(asking(drawn), [], NOBODY, 0), fusible=True, add=id)

    def find(self, model: str, _version: str, _decoupled: str, _namespace: str) -> Any:
        number = int(model[1:])

        def followed(batch: Sequence[StepRequest], rows: int, timings: ExecutionTimes) -> None:
            self.followed.append(number)

        seat = number if number in self._fusible else None
        return SimpleNamespace(
            name=model,
            seat=seat,
            fusible=True,
            label="1",
            max_rows=0,
            traced=False,
            routed=False,
            followed=followed,
        )

    def _introduce(self, number: int, chain: dict[str, Any]) -> None:
        self._chains.add(number, json.loads(json.dumps(chain)))

    def path(self, start: StepStart, data: Sequence[Sequence[bytes]] = ()) -> tuple[StepRequest, FusedPath | None]:
        wave = SimpleNamespace(data=data or [[b""] * 9] * 9)
        request = StepRequest(cast(Any, self._run), cast(Any, wave), start)
        return request, self._paths.of([request])

    def ran(self, start: StepStart, data: Sequence[Sequence[bytes]]) -> tuple[StepRequest, InferenceResponse]:
        """Execute a step, and those that follow it in the worker."""
        request, path = self.path(start, data)
        timings = ExecutionTimes()
        responses: Sequence[InferenceResponse | None] = self._computes.execute([request], timings)
        if path is not None:
            batch: Any = SimpleNamespace(requests=[request])
            given = list(responses)
            runs = self._chains.run(path.number, batch, given, self.loaded[start.step.number])
            responses = path.finish([request], given, timings, memoryview(runs_to_bytes(runs)))
        (response,) = responses
        assert response is not None
        return request, response


@given(ensembles(), st.sets(st.integers(0, 5)), st.randoms())
def test_steps_that_follow_each_other_in_a_worker_lead_to_the_same(
    drawn: Drawn, fusible: set[int], random: Random
) -> None:
    worker = Fusing(drawn, fusible)
    situation = progress(graph_of(drawn), asking(drawn)).begin()
    data: list[Sequence[Any]] = [[name.encode() for name in drawn.given]]
    running = list(situation.starts)
    ran: list[int] = []
    answers = []
    while running:
        start = running.pop(random.randrange(len(running)))
        worker.hosted.clear()  # any may be busy or gone
        worker.hosted.update((seat, each) for seat, each in worker.loaded.items() if random.random() < 0.8)
        request, response = worker.ran(start, data)
        ran += [start.step.number, *worker.followed]
        assert request.reached.number == ran[-1] and (not worker.followed or set(worker.followed) < fusible)
        worker.followed.clear()
        assert response.header is not None
        situation = situation.after(request.reached, response.header)
        data.append(response.data)
        running += situation.starts
        if situation.answer is not None:
            answers.append(situation.answer)
    assert sorted(ran) == sorted(needed(drawn))
    (answer,) = answers
    said = {
        spec.name: bytes(data[whose][which]).decode()
        for spec, (whose, which) in zip(answer.header.outputs, answer.places, strict=True)
    }
    assert said == {tensor: expected(drawn, tensor) for tensor in drawn.wanted}


def test_what_follows_in_a_worker() -> None:
    row = Drawn(["in0"], [["in0"], ["0a"], ["1a", "in0"], ["2a"]], ["3a"], ["in0"])

    def after(start: int, drawn: Drawn = row, fusible: Collection[int] = range(9)) -> list[int]:
        worker = Fusing(drawn, fusible)
        situation = progress(graph_of(drawn), asking(drawn)).begin()
        while start not in {each.step.number for each in situation.starts}:
            situation = situation.after(situation.starts[0].step, ANSWER)
        (first,) = (each for each in situation.starts if each.step.number == start)
        _, path = worker.path(first)
        return [] if path is None else [step.number for step in path.steps]

    assert after(0) == [1, 2, 3]
    assert after(1) == []  # the third takes something that the second was never given
    assert after(2) == [3]
    assert after(0, row, [0, 1]) == [1]
    assert after(0, row, [1, 2, 3]) == []
    assert after(0, row, []) == []
    assert after(0, Drawn(["in0"], [["in0"], ["0a"], ["0b"]], ["1a", "2a"], ["in0"])) == []  # two take what it gives
    assert after(0, Drawn(["in0"], [["in0"], ["0a"]], ["0a", "1a"], ["in0"])) == []  # and here the caller does
    assert after(0, Drawn(["in0"], [["in0"], ["0a"]], ["0b", "1a"], ["in0"])) == []


def test_each_step_is_asked_for_the_caller_of_the_ensemble() -> None:
    row = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    acme = Caller("acme", "batch", 5)
    beginning = progress(graph_of(row), asking(row).changed(caller=acme)).begin()
    (first,) = beginning.starts
    (second,) = beginning.after(first.step, ANSWER).starts
    assert first.header.caller == second.header.caller == acme


def test_equal_ways_are_one_object() -> None:
    drawn = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    beginning = progress(graph_of(drawn), asking(drawn)).begin()
    (first,) = beginning.starts
    one, other = (beginning.after(first.step, ANSWER) for _ in range(2))
    assert one is other
    assert one.starts[0].header is other.starts[0].header


def test_ways_on_are_remembered_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 128 * 1024)
    monkeypatch.setattr(module, "ENSEMBLES", budget)
    drawn = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    beginning = progress(graph_of(drawn), asking(drawn)).begin()
    (first,) = beginning.starts
    for number in range(300):
        header = ResponseHeader("m", "1", [TensorSpec("a", dtypes.INT32, (number,))])
        after = beginning.after(first.step, header)
        assert after is beginning.after(first.step, header)
        assert after.starts[0].header.inputs == (TensorSpec("i0", dtypes.INT32, (number,)),)
    assert budget.evictions > 240
    assert budget.used <= budget.limit


def test_what_a_large_request_leads_to_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the last situation, which is small itself: it keeps the caller's header."""
    budget = ByteBudget("test", 1024 * 1024)
    monkeypatch.setattr(module, "ENSEMBLES", budget)
    drawn = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    caller = RequestHeader("e", "", [TensorSpec("in0", dtypes.INT32, (1,))], parameters={"a": "x" * 200_000})
    now = progress(graph_of(drawn), caller).begin()
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
        now = progress(graph, caller).begin()
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
        of = progress(graph_of(drawn), caller)
        now = of.begin()
        course = weakref.ref(of)
        del of, now
        assert course() is None
    finally:
        gc.enable()


def test_each_response_of_a_decoupled_step_is_a_beginning() -> None:
    drawn = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    beginning = progress(graph_of(drawn, decoupled=[0]), asking(drawn)).begin()
    (first,) = beginning.starts
    one = beginning.after(first.step, ANSWER)
    (second,) = one.starts
    assert second.places == ((0, 0),)
    done = one.after(second.step, ANSWER)
    assert done.answer is not None and done.answer.places == ((1, 0),)
    assert beginning.after(first.step, ANSWER) is one


def test_an_output_that_a_step_leaves_out_does_not_come() -> None:
    drawn = Drawn(["in0"], [["in0"], ["0a"]], ["1a"], ["in0"])
    beginning = progress(graph_of(drawn), asking(drawn)).begin()
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
    (start,) = progress(graph_of(drawn), header).begin().starts
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
