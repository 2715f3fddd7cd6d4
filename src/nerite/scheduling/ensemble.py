"""Pure model of an ensemble: the graph of its steps, memoized progress of its requests, and in-flight limits.

``nerite.ensembles`` executes it in the server, and ``nerite.workers.child.fused`` executes chains of steps in a worker.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeAlias, TypeVar

from nerite.core import headers
from nerite.core.byte_budget import ENSEMBLES, Memo
from nerite.core.errors import NeriteError
from nerite.core.request import RequestedOutput, RequestHeader
from nerite.core.response import Parameter, ResponseHeader
from nerite.core.signature import Signature, SignatureOutput, reshaped, shape_text
from nerite.core.tensor import DataType, TensorSpec

if TYPE_CHECKING:  # workers execute plans, too, and need no configurations
    from nerite.config.model_config import ModelEnsembling

_MAX_PLANS = 64
"""Maximum number of memoized plans, one per set of requested outputs."""


class StepModel(NamedTuple):
    """Model of a step, as the ensemble was validated against it."""

    signature: Signature
    decoupled: bool = False
    device: int | None = None
    """The GPU in whose memory it takes inputs and may leave outputs; None for the host."""


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
    decoupled: bool
    """The model may send any number of responses."""
    signature: Signature
    """Signature of the model."""
    device: int | None = None
    """As in ``StepModel``."""

    @property
    def batched(self) -> bool:
        """Whether the model has a batch dimension."""
        return self.signature.max_batch_size > 0


class StepPlan:
    """Steps needed for a set of requested outputs. Compared by identity."""

    __slots__ = ("_takers", "outputs", "shared", "signature", "steps", "version")

    def __init__(
        self,
        signature: Signature,
        version: str,
        steps: Sequence[GraphStep],
        outputs: Sequence[str] = (),
        shared: frozenset[str] = frozenset(),
    ) -> None:
        """``signature`` and ``version`` are those of the ensemble."""
        self.signature = signature
        self.version = version
        self.steps = tuple(steps)
        self.outputs = tuple(outputs)
        """In the order of the response: the last declared first, as in Triton."""
        self.shared = shared
        """Tensors that have several consumers (steps, or the caller)."""
        self._takers: dict[str, list[int | None]] = {}
        """Devices of the steps that take each tensor."""
        for step in steps:
            for _, tensor in step.inputs:
                self._takers.setdefault(tensor, []).append(step.device)

    def device_outputs(self, step: GraphStep, caller: RequestHeader) -> frozenset[str]:
        """Return the outputs of a step that may stay on its GPU: all who take them do so there."""
        if step.device is None:
            return frozenset()
        found = set()
        for name, tensor in step.outputs:
            takers, answered = self._takers.get(tensor, []), tensor in self.outputs
            stays = all(device == step.device for device in takers) and (not answered or caller.takes_on_device(tensor))
            if stays and (takers or answered):
                found.add(name)
        return frozenset(found)


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
            if len(self._plans) >= _MAX_PLANS:
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
        return StepPlan(self.signature, self.version, steps, outputs, shared)


def _step(number: int, step: ModelEnsembling.Step, part: StepModel) -> GraphStep:
    return GraphStep(
        number,
        step.model_name,
        "" if step.model_version == -1 else str(step.model_version),
        step.model_namespace,
        tuple(step.input_map.items()),
        tuple(step.output_map.items()),
        part.decoupled,
        part.signature,
        part.device,
    )


class StepHeader(RequestHeader):
    """Header of a step's request, which also names the repository of the model."""

    __slots__ = ("namespace",)

    namespace: str


def explain_step_failure(
    error: NeriteError, ensemble: str, number: int, model: str, version: str, header: RequestHeader
) -> NeriteError:
    """Return the error of a step for the caller: Triton's text, followed by the location of the step."""
    tensors = ", ".join(f"{spec.name} {spec.datatype.name} {shape_text(spec.shape)}" for spec in header.inputs)
    given = tensors or "no tensors"
    return error.prefixed(
        f"in ensemble '{ensemble}', ",
        f"\n    at step {number + 1} of '{ensemble}': model '{model}', version {version}, given {given}",
    )


def fitted_inputs(shape: tuple[int, ...], batched: bool, dims: Sequence[int], wants_batch: bool) -> tuple[int, ...]:
    """Return the shape of a tensor with the batch dimension added or removed as the consuming model requires.

    As in Triton, a shape that fits neither way is left unchanged for the consumer to reject.
    """
    if batched == wants_batch:
        return shape
    if wants_batch:
        return (1, *shape) if _matches(shape, dims) else shape
    if not _matches(shape, dims) and shape[:1] == (1,) and _matches(shape[1:], dims):
        return shape[1:]
    return shape


def _matches(shape: Sequence[int], dims: Sequence[int]) -> bool:
    return len(shape) == len(dims) and all(expected in (-1, size) for size, expected in zip(shape, dims, strict=True))


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
    plan: StepPlan
    """All steps of the request."""


class EnsembleAnswer(NamedTuple):
    """Response to the caller: its header, and the locations of its tensors."""

    header: ResponseHeader
    places: tuple[Place, ...]


class StepTensor(NamedTuple):
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
        tensors: Mapping[str, StepTensor | None],
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

    def __init__(self, plan: StepPlan, header: RequestHeader) -> None:
        self.plan = plan
        self.footprint = headers.request_header_bytes(header)
        self._header = header

    def begin(self) -> EnsembleProgress:
        """Return the state before any step has answered."""
        inputs = self.plan.signature.inputs
        batched = self.plan.signature.max_batch_size > 0
        tensors: dict[str, StepTensor | None] = dict.fromkeys(inputs)
        for at, spec in enumerate(self._header.inputs):
            declared, shape = inputs[spec.name], spec.shape
            if declared.reshape is not None:
                shape = reshaped(shape, declared.dims, declared.reshape, batched=batched)
            tensors[spec.name] = StepTensor(spec.datatype, shape, batched, (0, at))
        return EnsembleProgress(self, tensors, frozenset(), 1, False)

    def resume(self, step: GraphStep, header: ResponseHeader) -> EnsembleProgress:
        """Return the state after the response of ``step``, if the header of this cache is that of the step's request.

        Nothing else is known, so only steps start that need no other tensors. The caller gets no answer.
        """
        inputs = dict(step.inputs)
        tensors: dict[str, StepTensor | None] = dict.fromkeys(inputs.values())
        for at, spec in enumerate(self._header.inputs):
            tensors[inputs[spec.name]] = StepTensor(spec.datatype, spec.shape, step.batched, (0, at))
        tensors |= _given(step, header, 1)
        return EnsembleProgress(self, tensors, frozenset((step.number,)), 2, True)

    def start(self, step: GraphStep, tensors: Mapping[str, StepTensor | None]) -> StepStart:
        """Return the request of a step: everything except the tensors is copied from the caller's header."""
        specs: list[TensorSpec] = []
        places: list[Place] = []
        shared: list[int] = []
        for name, source in step.inputs:
            tensor = tensors[source]
            if tensor is not None:
                if source in self.plan.shared:
                    shared.append(len(places))
                dims = step.signature.inputs[name].dims
                shape = fitted_inputs(tensor.shape, tensor.batched, dims, step.batched)
                specs.append(TensorSpec(name, tensor.datatype, shape))
                places.append(tensor.place)
        caller = self._header
        header = StepHeader(
            step.model,
            step.version,
            specs,
            [RequestedOutput(name) for name, _ in step.outputs],
            parameters=caller.parameters,
            forwarded=caller.parameters.keys(),
            priority=caller.priority,
            timeout_us=caller.timeout_us,
            sequence_id=caller.sequence_id,
            sequence_start=caller.sequence_start,
            sequence_end=caller.sequence_end,
            caller=caller.caller,
            device_outputs=self.plan.device_outputs(step, caller),
        )
        header.namespace = step.namespace
        return StepStart(step, header, tuple(places), tuple(shared), self.plan)

    def answer(self, tensors: Mapping[str, StepTensor | None]) -> EnsembleAnswer | None:
        """Return the response once every requested output is available or known to be missing; else None."""
        if not all(name in tensors for name in self.plan.outputs):
            return None
        signature = self.plan.signature
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
        return EnsembleAnswer(
            ResponseHeader(signature.model_name, self.plan.version, specs, sequence if specs else None), tuple(places)
        )


def _answered(tensor: StepTensor, declared: SignatureOutput, batched: bool) -> tuple[int, ...]:
    """Return the shape of a tensor in the response to the caller."""
    inside = declared.dims if declared.reshape is None else declared.reshape
    shape = fitted_inputs(tensor.shape, tensor.batched, inside, batched)
    if declared.reshape is None or len(shape) != len(inside) + batched:
        return shape
    return reshaped(shape, inside, declared.dims, batched=batched)


def _ready(step: GraphStep, tensors: Mapping[str, StepTensor | None]) -> bool:
    return all(source in tensors for _, source in step.inputs)


def _given(step: GraphStep, header: ResponseHeader, whose: int) -> dict[str, StepTensor | None]:
    """Return the tensors in the response of a step; None for those that it omits."""
    brought = {spec.name: (at, spec) for at, spec in enumerate(header.outputs)}
    tensors: dict[str, StepTensor | None] = {}
    for name, tensor in step.outputs:
        if name in brought:
            at, spec = brought[name]
            tensors[tensor] = StepTensor(spec.datatype, spec.shape, step.batched, (whose, at))
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
