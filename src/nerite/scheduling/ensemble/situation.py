"""How far a request to an ensemble is: which tensors it has, which steps begin now, and what the answer is.

Requests with one header whose steps answer with the same headers go the same way, and a header is one object however
often it comes. So a situation is worked out once and shared by all requests that get there; a request itself carries
nothing but its situation and the bytes of its tensors. From a situation one gets to the next by the answer of a step:
a look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

from nerite.core import footprint
from nerite.core.byte_budget import ENSEMBLES, Memo
from nerite.core.dtype import DataType
from nerite.core.request import RequestHeader
from nerite.core.response import Parameter, ResponseHeader
from nerite.core.signature import Output, reshaped
from nerite.core.tensor import TensorSpec
from nerite.scheduling.ensemble.graph import Graph, Plan, Step, Stretch
from nerite.scheduling.ensemble.link import asked, fitted

_SITUATION: Final = 1280
_TENSOR: Final = 320
_START: Final = 384
"""Bytes that a situation takes in memory, each tensor in it, and each step that begins, without its header."""

Place: TypeAlias = tuple[int, int]
"""Where the bytes of a tensor are: whose (a place in the list of what came, first the caller's), and which of them."""


class Start(NamedTuple):
    """A step that begins: what its model is asked, and where the bytes are."""

    step: Step
    header: RequestHeader
    places: tuple[Place, ...]
    shared: tuple[int, ...]
    """Which of the tensors others take, too: nobody may write there."""
    stretch: Stretch | None
    """What may follow in the worker of the model, if anything."""


class Answer(NamedTuple):
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


class Situation:
    """One point on the way. ``starts`` begin now; ``answer`` is complete now, if there is one."""

    __slots__ = ("_begun", "_came", "_course", "_next", "_tensors", "answer", "starts")

    def __init__(
        self, course: Course, tensors: Mapping[str, _Tensor | None], begun: frozenset[int], came: int, answered: bool
    ) -> None:
        """``came``: how many brought tensors so far. A tensor that is None will not come any more."""
        self._course = course
        self._tensors = tensors
        self._came = came
        self._next: Memo[tuple[int, ResponseHeader], Situation] = Memo()
        steps = [step for step in course.plan.steps if step.number not in begun and _ready(step, tensors)]
        self.starts = tuple(course.start(step, tensors) for step in steps)
        self._begun = begun.union(step.number for step in steps)
        self.answer = None if answered else course.answer(tensors)

    @property
    def footprint(self) -> int:
        """The bytes that it takes in memory, with the caller's header, which it keeps."""
        size = _SITUATION + self._course.footprint
        for tensor in self._tensors.values():
            size += _TENSOR if tensor is None else _TENSOR + footprint.DIMENSION * len(tensor.shape)
        for start in self.starts:
            size += _START + footprint.of_request_header(start.header)
        return size if self.answer is None else size + 2 * footprint.of_response_header(self.answer.header)

    def after(self, step: Step, header: ResponseHeader) -> Situation:
        """Return where the answer of a step leads to: its tensors come last in the list of those who brought some.

        Each response of a decoupled model is a beginning of its own, of which nothing else is part.
        """
        key = step.number, header
        found = self._next.get(key)
        if found is None:
            if step.decoupled:
                found = Situation(self._course, _given(step, header, 0), frozenset((step.number,)), 1, False)
            else:
                tensors = {**self._tensors, **_given(step, header, self._came)}
                answered = self.answer is not None
                found = Situation(self._course, tensors, self._begun, self._came + 1, answered)
            ENSEMBLES.put(self._next, key, found, found.footprint + footprint.of_response_header(header))
        return found


class Course:
    """The way of all requests with one header."""

    def __init__(self, graph: Graph, header: RequestHeader) -> None:
        self.plan: Plan = graph.plan(header.wanted)
        self.footprint = footprint.of_request_header(header)
        self._graph = graph
        self._header = header

    def begin(self) -> Situation:
        """Return the situation before any step has answered."""
        inputs = self._graph.signature.inputs
        batched = self._graph.signature.max_batch_size > 0
        tensors: dict[str, _Tensor | None] = dict.fromkeys(inputs)
        for at, spec in enumerate(self._header.inputs):
            declared, shape = inputs[spec.name], spec.shape
            if declared.reshape is not None:
                shape = reshaped(shape, declared.dims, declared.reshape, batched=batched)
            tensors[spec.name] = _Tensor(spec.datatype, shape, batched, (0, at))
        return Situation(self, tensors, frozenset(), 1, False)

    def start(self, step: Step, tensors: Mapping[str, _Tensor | None]) -> Start:
        """Return what the model of a step is asked: everything but the tensors is as the caller said it."""
        specs: list[TensorSpec] = []
        places: list[Place] = []
        shared: list[int] = []
        for name, source in step.inputs:
            tensor = tensors[source]
            if tensor is not None:
                if source in self.plan.shared:
                    shared.append(len(places))
                shape = fitted(tensor.shape, tensor.batched, step.dims[name], step.batched)
                specs.append(TensorSpec(name, tensor.datatype, shape))
                places.append(tensor.place)
        outputs = [name for name, _ in step.outputs]
        header = asked(step.model, step.version, step.namespace, specs, outputs, self._header)
        stretch = self.plan.stretches.get(step.number)
        return Start(step, header, tuple(places), tuple(shared), stretch)

    def answer(self, tensors: Mapping[str, _Tensor | None]) -> Answer | None:
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
        return Answer(ResponseHeader(signature.model_name, version, specs, sequence if specs else None), tuple(places))


def _answered(tensor: _Tensor, declared: Output, batched: bool) -> tuple[int, ...]:
    """Return the shape in which the caller gets a tensor."""
    inside = declared.dims if declared.reshape is None else declared.reshape
    shape = fitted(tensor.shape, tensor.batched, inside, batched)
    if declared.reshape is None or len(shape) != len(inside) + batched:
        return shape
    return reshaped(shape, inside, declared.dims, batched=batched)


def _ready(step: Step, tensors: Mapping[str, _Tensor | None]) -> bool:
    return all(source in tensors for _, source in step.inputs)


def _given(step: Step, header: ResponseHeader, whose: int) -> dict[str, _Tensor | None]:
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
