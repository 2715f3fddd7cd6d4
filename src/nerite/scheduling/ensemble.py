"""Pure model of an ensemble: the graph of its steps, memoized progress of its requests, and in-flight limits.

``nerite.ensembles`` executes it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from nerite.config.model_config import ModelEnsembling
from nerite.core import headers
from nerite.core.byte_budget import ENSEMBLES, Memo
from nerite.core.request import RequestHeader
from nerite.core.response import Parameter, ResponseHeader
from nerite.core.signature import Signature, SignatureOutput, reshaped
from nerite.core.tensor import DataType, TensorSpec
from nerite.scheduling.fused_steps import FusedLink, TensorSource, fitted_inputs, step_inputs

_MOST_PLANS = 64
"""Maximum number of memoized plans, one per set of requested outputs."""


class StepModel(NamedTuple):
    """Model of a step, as the ensemble was validated against it."""

    signature: Signature
    decoupled: bool = False
    worker: str = ""
    """Name of the worker shared with other models, in which fused steps can run; empty if there is none."""


class GraphStep(NamedTuple):
    """Step of an ensemble: a request to one model."""

    number: int
    """Index of the step, from 0."""
    model: str
    version: str
    """Empty for the latest version."""
    namespace: str
    """Repository of the model if names are unique only within a repository; else empty."""
    inputs: tuple[tuple[str, str], ...]
    """Pairs of an input of the model and the ensemble tensor it consumes."""
    outputs: tuple[tuple[str, str], ...]
    """Pairs of a used output of the model and the ensemble tensor it produces."""
    dims: Mapping[str, tuple[int, ...]]
    """Declared shapes of the model's inputs without the batch dimension."""
    batched: bool
    """The model has a batch dimension."""
    decoupled: bool
    """The model may send any number of responses."""
    worker: str
    """See ``StepModel.worker``."""
    signature: Signature
    """Signature of the model."""


class FusedSegment:
    """Chain of steps that can run one after the other in the worker of the first one.

    No other step consumes the tensors that they pass on, and they consume nothing else but inputs of the first step. So
    the chain can be left after any step, and execution continues from there as without fusion.
    """

    __slots__ = ("links", "steps")

    def __init__(self, steps: Sequence[GraphStep], links: Sequence[FusedLink]) -> None:
        """``steps`` are all steps of the chain; ``links`` has one element for each step after the first."""
        self.steps = tuple(steps)
        self.links = tuple(links)


class StepPlan(NamedTuple):
    """Steps needed for a set of requested outputs."""

    steps: tuple[GraphStep, ...]
    outputs: tuple[str, ...]
    """In the order of the response: the last declared first, as in Triton."""
    shared: frozenset[str]
    """Tensors that have several consumers (steps, or the caller)."""
    fused_segments: Mapping[int, FusedSegment]
    """By number of the first step."""


class EnsembleGraph:
    """Graph of the steps of an ensemble. ``signature`` is the ensemble's own."""

    def __init__(
        self, signature: Signature, version: str, steps: Sequence[ModelEnsembling.Step], parts: Sequence[StepModel]
    ) -> None:
        """``parts`` are the models of ``steps``, against which the ensemble has been validated."""
        self.signature = signature
        self.version = version
        self.steps = tuple(_step(number, *each) for number, each in enumerate(zip(steps, parts, strict=True)))
        self._plans: dict[frozenset[str], StepPlan] = {}

    def plan(self, wanted: frozenset[str]) -> StepPlan:
        """Return the steps needed for the requested outputs; an empty set means all outputs."""
        plan = self._plans.get(wanted)
        if plan is None:
            plan = self._planned(wanted or frozenset(self.signature.outputs))
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[wanted] = plan
        return plan

    def _planned(self, wanted: frozenset[str]) -> StepPlan:
        """Traverse the graph backwards from the requested outputs."""
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
        """Yield the chains of steps in shared workers. Tensors ``elsewhere`` have other consumers, too."""
        after = {step.number: _next(step, steps, elsewhere) for step in steps}
        for first in steps:
            chain, links = [first], []
            while (step := after[chain[-1].number]) is not None:
                sources = _sources(step, chain[-1], first)
                if sources is None:
                    break
                links.append(self._link(step, sources, chain[-1], first))
                chain.append(step)
            if links:
                yield FusedSegment(chain, links)

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


def _step(number: int, step: ModelEnsembling.Step, part: StepModel) -> GraphStep:
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
    """Return the step that is the only consumer of ``step``'s outputs and shares its worker; None if there is none."""
    given = {tensor for _, tensor in step.outputs}
    takers = [each for each in steps if any(tensor in given for _, tensor in each.inputs)]
    if not step.worker or given & elsewhere or len(takers) != 1 or takers[0].worker != step.worker:
        return None
    return takers[0]


def _sources(step: GraphStep, before: GraphStep, first: GraphStep) -> tuple[TensorSource, ...] | None:
    """Return the sources of a step's inputs: the previous step or the first one's inputs. None if there are others."""
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


# Progress of requests. Requests with equal headers whose steps answer with equal headers take the same path, and equal
# headers are one interned object. So each state is computed once and shared by all requests that reach it; a request
# holds only its state and the bytes of its tensors. The response of a step leads to the next state by a lookup.

_SITUATION: Final = 1280
_TENSOR: Final = 320
_START: Final = 384
"""Bytes of memory of a state, of each tensor in it, and of each step that starts, without its header."""

Place: TypeAlias = tuple[int, int]
"""Location of a tensor's bytes: index of its message (0 is the caller's request), and index of the tensor in it."""


class StepStart(NamedTuple):
    """Step that starts: the header of its request, and the locations of its inputs."""

    step: GraphStep
    header: RequestHeader
    places: tuple[Place, ...]
    shared: tuple[int, ...]
    """Indices of inputs that have other consumers, too, and must be read-only."""
    fused_segment: FusedSegment | None
    """Chain of steps that may continue in the worker of the model, if any."""


class EnsembleAnswer(NamedTuple):
    """Response to the caller: its header, and the locations of its tensors."""

    header: ResponseHeader
    places: tuple[Place, ...]


class _Tensor(NamedTuple):
    """Available tensor."""

    datatype: DataType
    shape: tuple[int, ...]
    batched: bool
    """Its producer has a batch dimension."""
    place: Place


class EnsembleProgress:
    """State of a request: the steps that start now (``starts``), and the response if it is complete (``answer``)."""

    __slots__ = ("_begun", "_came", "_next", "_progress_cache", "_tensors", "answer", "starts")

    def __init__(
        self,
        progress_cache: EnsembleProgressCache,
        tensors: Mapping[str, _Tensor | None],
        begun: frozenset[int],
        came: int,
        answered: bool,
    ) -> None:
        """``came``: number of messages with tensors so far. A tensor that is None will never be available."""
        self._progress_cache = progress_cache
        self._tensors = tensors
        self._came = came
        self._next: Memo[tuple[int, ResponseHeader], EnsembleProgress] = Memo()
        steps = [step for step in progress_cache.plan.steps if step.number not in begun and _ready(step, tensors)]
        self.starts = tuple(progress_cache.start(step, tensors) for step in steps)
        self._begun = begun.union(step.number for step in steps)
        self.answer = None if answered else progress_cache.answer(tensors)

    @property
    def footprint(self) -> int:
        """Bytes of memory that it takes, including the caller's header."""
        size = _SITUATION + self._progress_cache.footprint
        for tensor in self._tensors.values():
            size += _TENSOR if tensor is None else _TENSOR + headers.DIMENSION * len(tensor.shape)
        for start in self.starts:
            size += _START + headers.request_header_bytes(start.header)
        return size if self.answer is None else size + 2 * headers.response_header_bytes(self.answer.header)

    def after(self, step: GraphStep, header: ResponseHeader) -> EnsembleProgress:
        """Return the state after the response of a step, whose tensors are appended to the list of messages.

        Each response of a decoupled model starts an independent state that contains no other tensors.
        """
        key = step.number, header
        found = self._next.get(key)
        if found is None:
            if step.decoupled:
                found = EnsembleProgress(
                    self._progress_cache, _given(step, header, 0), frozenset((step.number,)), 1, False
                )
            else:
                tensors = {**self._tensors, **_given(step, header, self._came)}
                answered = self.answer is not None
                found = EnsembleProgress(self._progress_cache, tensors, self._begun, self._came + 1, answered)
            ENSEMBLES.put(self._next, key, found, found.footprint + headers.response_header_bytes(header))
        return found


class EnsembleProgressCache:
    """Progress of all requests with one header."""

    def __init__(self, graph: EnsembleGraph, header: RequestHeader) -> None:
        self.plan: StepPlan = graph.plan(header.wanted)
        self.footprint = headers.request_header_bytes(header)
        self._graph = graph
        self._header = header

    def begin(self) -> EnsembleProgress:
        """Return the state before any step has answered."""
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
        """Return the request of a step: everything except the tensors is copied from the caller's header."""
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
        """Return the response once every requested output is available or known to be missing; else None."""
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
    """Return the shape of a tensor in the response to the caller."""
    inside = declared.dims if declared.reshape is None else declared.reshape
    shape = fitted_inputs(tensor.shape, tensor.batched, inside, batched)
    if declared.reshape is None or len(shape) != len(inside) + batched:
        return shape
    return reshaped(shape, inside, declared.dims, batched=batched)


def _ready(step: GraphStep, tensors: Mapping[str, _Tensor | None]) -> bool:
    return all(source in tensors for _, source in step.inputs)


def _given(step: GraphStep, header: ResponseHeader, whose: int) -> dict[str, _Tensor | None]:
    """Return the tensors in the response of a step; None for those that it omits."""
    brought = {spec.name: (at, spec) for at, spec in enumerate(header.outputs)}
    tensors: dict[str, _Tensor | None] = {}
    for name, tensor in step.outputs:
        if name in brought:
            at, spec = brought[name]
            tensors[tensor] = _Tensor(spec.datatype, spec.shape, step.batched, (whose, at))
        else:
            tensors[tensor] = None
    return tensors


GIVES_WAY_NS: Final = 300 * 1_000_000_000
"""Maximum wait for the limit: after it a step starts anyway, as in Triton, so that a hung model does not block all."""

_T = TypeVar("_T")


class InflightLimit(Generic[_T]):
    """Limits the concurrent requests of one step over all requests to the ensemble; the excess waits in FIFO order."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._under_way = 0
        self._waiting: deque[tuple[_T, int]] = deque()

    @property
    def waiting(self) -> int:
        """Number of waiting entries."""
        return len(self._waiting)

    def enter(self, who: _T, now: int) -> bool:
        """Return True if ``who`` may start now; else enqueue it."""
        if self._under_way < self._most and not self._waiting:
            self._under_way += 1
            return True
        self._waiting.append((who, now))
        return False

    def leave(self) -> _T | None:
        """Record that a request is done; return the entry that starts in its place, if any."""
        self._under_way -= 1
        if self._waiting and self._under_way < self._most:
            return self._begin()
        return None

    def overdue(self, now: int) -> list[_T]:
        """Remove and return the entries that waited too long and start now."""
        late = []
        while self._waiting and self._waiting[0][1] + GIVES_WAY_NS <= now:
            late.append(self._begin())
        return late

    def wake_at(self) -> int | None:
        """Return when to call ``overdue``; None while none waits."""
        return self._waiting[0][1] + GIVES_WAY_NS if self._waiting else None

    def withdraw(self, gave_up: Callable[[_T], bool]) -> None:
        """Remove the entries for which ``gave_up`` returns True."""
        self._waiting = deque(entry for entry in self._waiting if not gave_up(entry[0]))

    def _begin(self) -> _T:
        who, _ = self._waiting.popleft()
        self._under_way += 1
        return who
