"""The steps of an ensemble, and the tensors that connect them: what the configuration says, ready to be followed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from nerite.config.model_config import EnsembleStep
from nerite.core import headers
from nerite.core.byte_budget import ENSEMBLES, Memo
from nerite.core.request import RequestHeader
from nerite.core.response import Parameter, ResponseHeader
from nerite.core.signature import Signature, SignatureOutput, reshaped
from nerite.core.tensor import DataType, TensorSpec
from nerite.scheduling.fused_steps import FusedLink, TensorSource, fitted_inputs, step_inputs

_MOST_PLANS = 64
"""Sets of wanted outputs whose steps are remembered."""


class StepModel(NamedTuple):
    """The model of a step, as the ensemble was checked against it."""

    signature: Signature
    decoupled: bool = False
    worker: str = ""
    """The worker that it shares with other models, where a request can go on from one to the other; or nothing."""


class GraphStep(NamedTuple):
    """A model to be asked."""

    number: int
    """Its place among the steps; from 0."""
    model: str
    version: str
    """Empty for the latest."""
    namespace: str
    """The repository that the model is of, where models of one name are told apart by it; else empty."""
    inputs: tuple[tuple[str, str], ...]
    """Each input of the model with the tensor of the ensemble that it takes."""
    outputs: tuple[tuple[str, str], ...]
    """Each output of the model that is used, with the tensor that it gives."""
    dims: Mapping[str, tuple[int, ...]]
    """What the model declares of its inputs, without the batch dimension."""
    batched: bool
    """The model has a batch dimension."""
    decoupled: bool
    """The model may have any number of responses."""
    worker: str
    """As ``StepModel`` has it."""
    signature: Signature
    """Of the model."""


class FusedSegment:
    """Steps that may follow a first one in its worker, each as soon as the one before has its answer.

    Nobody else takes what they give each other, and they take nothing else but what the first was given. So it can end
    after any of them, and go on from there as if it had never been one.
    """

    __slots__ = ("links", "steps")

    def __init__(self, steps: Sequence[GraphStep], links: Sequence[FusedLink]) -> None:
        """``steps`` begin with the first; there is a link for each of the others."""
        self.steps = tuple(steps)
        self.links = tuple(links)


class StepPlan(NamedTuple):
    """What a request needs that wants certain outputs."""

    steps: tuple[GraphStep, ...]
    outputs: tuple[str, ...]
    """In the order in which they are answered: the last declared first, as with Triton."""
    shared: frozenset[str]
    """Tensors that have several takers: steps, and the caller."""
    fused_segments: Mapping[int, FusedSegment]
    """By the number of the first step."""


class EnsembleGraph:
    """An ensemble. ``signature`` is its own."""

    def __init__(
        self, signature: Signature, version: str, steps: Sequence[EnsembleStep], parts: Sequence[StepModel]
    ) -> None:
        """``parts`` are the models of ``steps``, which say their namespace; the ensemble was checked against them."""
        self.signature = signature
        self.version = version
        self.steps = tuple(_step(number, *each) for number, each in enumerate(zip(steps, parts, strict=True)))
        self._plans: dict[frozenset[str], StepPlan] = {}

    def plan(self, wanted: frozenset[str]) -> StepPlan:
        """Return which steps a request needs that wants these outputs; none means all."""
        plan = self._plans.get(wanted)
        if plan is None:
            plan = self._planned(wanted or frozenset(self.signature.outputs))
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[wanted] = plan
        return plan

    def _planned(self, wanted: frozenset[str]) -> StepPlan:
        """Go from the outputs back to what they are made from."""
        givers = {tensor: step for step in self.steps for _, tensor in step.outputs}
        needed: set[int] = set()
        todo = list(wanted)
        while todo:
            step = givers.get(todo.pop())
            if step is not None and step.number not in needed:
                needed.add(step.number)
                todo += [tensor for _, tensor in step.inputs]
        outputs = tuple(name for name in reversed(self.signature.outputs) if name in wanted)
        steps = tuple(step for step in self.steps if step.number in needed)
        takers = Counter([*outputs, *(tensor for step in steps for _, tensor in step.inputs)])
        shared = frozenset(name for name, count in takers.items() if count > 1)
        fused_segments = self._fused_segments(steps, shared.union(outputs))
        return StepPlan(
            steps, outputs, shared, {fused_segment.steps[0].number: fused_segment for fused_segment in fused_segments}
        )

    def _fused_segments(self, steps: Sequence[GraphStep], elsewhere: frozenset[str]) -> Iterator[FusedSegment]:
        """Yield what the steps form where they live together. Tensors ``elsewhere`` are not just for the next step."""
        after = {step.number: _next(step, steps, elsewhere) for step in steps}
        for first in steps:
            way, links = [first], []
            while (step := after[way[-1].number]) is not None:
                sources = _sources(step, way[-1], first)
                if sources is None:
                    break
                links.append(self._link(step, sources, way[-1], first))
                way.append(step)
            if links:
                yield FusedSegment(way, links)

    def _link(
        self, step: GraphStep, sources: tuple[TensorSource, ...], before: GraphStep, first: GraphStep
    ) -> FusedLink:
        ensemble = self.signature.model_name
        outputs = tuple(name for name, _ in step.outputs)
        return FusedLink(
            ensemble,
            step.number,
            step.version,
            step.namespace,
            step.signature,
            sources,
            outputs,
            before.batched,
            first.batched,
        )


def _step(number: int, step: EnsembleStep, part: StepModel) -> GraphStep:
    signature = part.signature
    return GraphStep(
        number,
        step.model_name,
        "" if step.model_version == -1 else str(step.model_version),
        step.model_namespace,
        tuple(step.input_map.items()),
        tuple(step.output_map.items()),
        {name: declared.dims for name, declared in signature.inputs.items()},
        signature.max_batch_size > 0,
        part.decoupled,
        part.worker,
        signature,
    )


def _next(step: GraphStep, steps: Sequence[GraphStep], elsewhere: frozenset[str]) -> GraphStep | None:
    """Return the step that takes everything that is taken of what ``step`` gives, if one does, and lives with it."""
    given = {tensor for _, tensor in step.outputs}
    takers = [each for each in steps if any(tensor in given for _, tensor in each.inputs)]
    if not step.worker or given & elsewhere or len(takers) != 1 or takers[0].worker != step.worker:
        return None
    return takers[0]


def _sources(step: GraphStep, before: GraphStep, first: GraphStep) -> tuple[TensorSource, ...] | None:
    """Return where a step takes its inputs from: the step before, and what the first was given. None if elsewhere."""
    given = {tensor: name for name, tensor in before.outputs}
    had = {tensor: name for name, tensor in first.inputs}
    sources: list[TensorSource] = []
    for name, tensor in step.inputs:
        if tensor in given:
            sources.append(TensorSource(name, given[tensor], True))
        elif tensor in had:
            sources.append(TensorSource(name, had[tensor], False))
        else:
            return None
    return tuple(sources)


# How far a request to an ensemble is: which tensors it has, which steps begin now, and what the answer is.
#
# Requests with one header whose steps answer with the same headers go the same way, and a header is one object
# however often it comes. So a situation is worked out once and shared by all requests that get there; a request
# itself carries nothing but its situation and the bytes of its tensors. From a situation one gets to the next by the
# answer of a step: a look-up.

_SITUATION: Final = 1280
_TENSOR: Final = 320
_START: Final = 384
"""Bytes that a situation takes in memory, each tensor in it, and each step that begins, without its header."""

Place: TypeAlias = tuple[int, int]
"""Where the bytes of a tensor are: whose (a place in the list of what came, first the caller's), and which of them."""


class StepStart(NamedTuple):
    """A step that begins: what its model is asked, and where the bytes are."""

    step: GraphStep
    header: RequestHeader
    places: tuple[Place, ...]
    shared: tuple[int, ...]
    """Which of the tensors others take, too: nobody may write there."""
    fused_segment: FusedSegment | None
    """What may follow in the worker of the model, if anything."""


class EnsembleAnswer(NamedTuple):
    """What the caller gets."""

    header: ResponseHeader
    places: tuple[Place, ...]


class _Tensor(NamedTuple):
    """A tensor that has come."""

    datatype: DataType
    shape: tuple[int, ...]
    batched: bool
    """It is from a model with a batch dimension."""
    place: Place


class EnsembleProgress:
    """One point on the way. ``starts`` begin now; ``answer`` is complete now, if there is one."""

    __slots__ = ("_begun", "_came", "_course", "_next", "_tensors", "answer", "starts")

    def __init__(
        self,
        course: EnsembleProgressCache,
        tensors: Mapping[str, _Tensor | None],
        begun: frozenset[int],
        came: int,
        answered: bool,
    ) -> None:
        """``came``: how many brought tensors so far. A tensor that is None will not come any more."""
        self._course = course
        self._tensors = tensors
        self._came = came
        self._next: Memo[tuple[int, ResponseHeader], EnsembleProgress] = Memo()
        steps = [step for step in course.plan.steps if step.number not in begun and _ready(step, tensors)]
        self.starts = tuple(course.start(step, tensors) for step in steps)
        self._begun = begun.union(step.number for step in steps)
        self.answer = None if answered else course.answer(tensors)

    @property
    def footprint(self) -> int:
        """The bytes that it takes in memory, with the caller's header, which it keeps."""
        size = _SITUATION + self._course.footprint
        for tensor in self._tensors.values():
            size += _TENSOR if tensor is None else _TENSOR + headers.DIMENSION * len(tensor.shape)
        for start in self.starts:
            size += _START + headers.request_header_bytes(start.header)
        return size if self.answer is None else size + 2 * headers.response_header_bytes(self.answer.header)

    def after(self, step: GraphStep, header: ResponseHeader) -> EnsembleProgress:
        """Return where the answer of a step leads to: its tensors come last in the list of those who brought some.

        Each response of a decoupled model is a beginning of its own, of which nothing else is part.
        """
        key = step.number, header
        found = self._next.get(key)
        if found is None:
            if step.decoupled:
                found = EnsembleProgress(self._course, _given(step, header, 0), frozenset((step.number,)), 1, False)
            else:
                tensors = {**self._tensors, **_given(step, header, self._came)}
                answered = self.answer is not None
                found = EnsembleProgress(self._course, tensors, self._begun, self._came + 1, answered)
            ENSEMBLES.put(self._next, key, found, found.footprint + headers.response_header_bytes(header))
        return found


class EnsembleProgressCache:
    """The way of all requests with one header."""

    def __init__(self, graph: EnsembleGraph, header: RequestHeader) -> None:
        self.plan: StepPlan = graph.plan(header.wanted)
        self.footprint = headers.request_header_bytes(header)
        self._graph = graph
        self._header = header

    def begin(self) -> EnsembleProgress:
        """Return the situation before any step has answered."""
        inputs = self._graph.signature.inputs
        batched = self._graph.signature.max_batch_size > 0
        tensors: dict[str, _Tensor | None] = dict.fromkeys(inputs)
        for at, spec in enumerate(self._header.inputs):
            declared, shape = inputs[spec.name], spec.shape
            if declared.reshape is not None:
                shape = reshaped(shape, declared.dims, declared.reshape, batched=batched)
            tensors[spec.name] = _Tensor(spec.datatype, shape, batched, (0, at))
        return EnsembleProgress(self, tensors, frozenset(), 1, False)

    def start(self, step: GraphStep, tensors: Mapping[str, _Tensor | None]) -> StepStart:
        """Return what the model of a step is asked: everything but the tensors is as the caller said it."""
        specs: list[TensorSpec] = []
        places: list[Place] = []
        shared: list[int] = []
        for name, source in step.inputs:
            tensor = tensors[source]
            if tensor is not None:
                if source in self.plan.shared:
                    shared.append(len(places))
                shape = fitted_inputs(tensor.shape, tensor.batched, step.dims[name], step.batched)
                specs.append(TensorSpec(name, tensor.datatype, shape))
                places.append(tensor.place)
        outputs = [name for name, _ in step.outputs]
        header = step_inputs(step.model, step.version, step.namespace, specs, outputs, self._header)
        fused_segment = self.plan.fused_segments.get(step.number)
        return StepStart(step, header, tuple(places), tuple(shared), fused_segment)

    def answer(self, tensors: Mapping[str, _Tensor | None]) -> EnsembleAnswer | None:
        """Return what the caller gets, once every output it wants has come or will not come."""
        if not all(name in tensors for name in self.plan.outputs):
            return None
        signature = self._graph.signature
        batched = signature.max_batch_size > 0
        specs: list[TensorSpec] = []
        places: list[Place] = []
        for name in self.plan.outputs:
            tensor = tensors[name]
            if tensor is not None:
                specs.append(TensorSpec(name, tensor.datatype, _answered(tensor, signature.outputs[name], batched)))
                places.append(tensor.place)
        header = self._header
        sequence: dict[str, Parameter] = {
            "sequence_id": header.sequence_id,
            "sequence_start": header.sequence_start,
            "sequence_end": header.sequence_end,
        }
        version = self._graph.version
        return EnsembleAnswer(
            ResponseHeader(signature.model_name, version, specs, sequence if specs else None), tuple(places)
        )


def _answered(tensor: _Tensor, declared: SignatureOutput, batched: bool) -> tuple[int, ...]:
    """Return the shape in which the caller gets a tensor."""
    inside = declared.dims if declared.reshape is None else declared.reshape
    shape = fitted_inputs(tensor.shape, tensor.batched, inside, batched)
    if declared.reshape is None or len(shape) != len(inside) + batched:
        return shape
    return reshaped(shape, inside, declared.dims, batched=batched)


def _ready(step: GraphStep, tensors: Mapping[str, _Tensor | None]) -> bool:
    return all(source in tensors for _, source in step.inputs)


def _given(step: GraphStep, header: ResponseHeader, whose: int) -> dict[str, _Tensor | None]:
    """Return the tensors that the answer of a step brings; one that it leaves out will not come."""
    brought = {spec.name: (at, spec) for at, spec in enumerate(header.outputs)}
    tensors: dict[str, _Tensor | None] = {}
    for name, tensor in step.outputs:
        if name in brought:
            at, spec = brought[name]
            tensors[tensor] = _Tensor(spec.datatype, spec.shape, step.batched, (whose, at))
        else:
            tensors[tensor] = None
    return tensors


# How many requests of one step may be under way at once, over all requests to the ensemble.

GIVES_WAY_NS: Final = 300 * 1_000_000_000
"""Who waits longer than this begins all the same, as with Triton: a model that hangs must not hang the ensemble."""

_T = TypeVar("_T")


class InflightLimit(Generic[_T]):
    """Those who want to begin wait here, first come first served, while the step has as much to do as it may have."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._under_way = 0
        self._waiting: deque[tuple[_T, int]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(self, who: _T, now: int) -> bool:
        """Return whether ``who`` may begin now; if not, it waits."""
        if self._under_way < self._most and not self._waiting:
            self._under_way += 1
            return True
        self._waiting.append((who, now))
        return False

    def leave(self) -> _T | None:
        """Note that one is done; return who begins in its place."""
        self._under_way -= 1
        if self._waiting and self._under_way < self._most:
            return self._begin()
        return None

    def overdue(self, now: int) -> list[_T]:
        """Return those who waited too long: they begin now."""
        late = []
        while self._waiting and self._waiting[0][1] + GIVES_WAY_NS <= now:
            late.append(self._begin())
        return late

    def wake_at(self) -> int | None:
        """Return when to ask for ``overdue``; None while nobody waits."""
        return self._waiting[0][1] + GIVES_WAY_NS if self._waiting else None

    def withdraw(self, gave_up: Callable[[_T], bool]) -> None:
        """Let those wait no longer who gave up."""
        self._waiting = deque(entry for entry in self._waiting if not gave_up(entry[0]))

    def _begin(self) -> _T:
        who, _ = self._waiting.popleft()
        self._under_way += 1
        return who
