"""Sequence inputs: what is attached to a request of a sequence for the model, and taken out of the response.

When a backend sees them, control inputs and states are inputs like any other, and states are outputs like any other:
nothing between here and the model knows about sequences.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from nerite.config.model_config import ModelConfig, ModelSequenceBatching
from nerite.config.signature import initial_dims, read_initial_state
from nerite.core import headers
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import SEQUENCES, Memo
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.request import NOBODY, InferenceRequest, RequestedOutput, RequestHeader, with_request_id
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer, DataType, TensorSpec, join_bytes
from nerite.scheduling.sequence import KeptState, RequestSequence, StateForm

# Control inputs tell a model which sequence it works on. The server makes them, with one element each.

_FORMS: Final = {dtypes.INT32: "<i", dtypes.FP32: "<f", dtypes.BOOL: "<?"}


class SequenceControls:
    """The control inputs of one model, from a validated configuration."""

    def __init__(self, batching: ModelSequenceBatching, batching_dims: tuple[int, ...]) -> None:
        """``batching_dims``: the dimensions before the shape of each tensor; 1 for a batch dimension."""
        shape = (*batching_dims, 1)
        self.specs: list[TensorSpec] = []
        """In the order of the configuration."""
        self._makers: list[Callable[[bool, bool, bool, int | str], Buffer]] = []
        for tensor in batching.control_input:
            for control in tensor.control:
                datatype = _datatype(control)
                self.specs.append(TensorSpec(tensor.name, datatype, shape))
                self._makers.append(_maker(control, datatype))
        self.names = [spec.name for spec in self.specs]

    def data(self, start: bool, end: bool, ready: bool, sequence_id: int | str) -> list[Buffer]:
        """Return the data of each control input."""
        return [make(start, end, ready, sequence_id) for make in self._makers]


def _datatype(control: ModelSequenceBatching.Control) -> DataType:
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        return dtypes.BY_CONFIG_NAME[control.data_type]
    if control.int32_false_true:
        return dtypes.INT32
    return dtypes.FP32 if control.fp32_false_true else dtypes.BOOL


def _maker(
    control: ModelSequenceBatching.Control, datatype: DataType
) -> Callable[[bool, bool, bool, int | str], Buffer]:
    if control.kind == "CONTROL_SEQUENCE_CORRID":
        if datatype is dtypes.BYTES:
            return lambda _start, _end, _ready, id: join_bytes([id or ""])
        size = datatype.size
        return lambda _start, _end, _ready, id: _number(id, size)
    values = control.int32_false_true or control.fp32_false_true or control.bool_false_true
    false, true = (struct.pack(_FORMS[datatype], value) for value in values)
    if control.kind == "CONTROL_SEQUENCE_START":
        return lambda start, _end, _ready, _id: true if start else false
    if control.kind == "CONTROL_SEQUENCE_END":
        return lambda _start, end, _ready, _id: true if end else false
    return lambda _start, _end, ready, _id: true if ready else false


def _number(sequence_id: int | str, size: int) -> bytes:
    """Return the lowest bytes of an id. Never called with text, which ``SequenceRequirements`` refuses."""
    assert isinstance(sequence_id, int)
    return (sequence_id & ((1 << 8 * size) - 1)).to_bytes(size, "little")


# Requirements on requests to a model with sequences.


class SequenceRequirements:
    """The requirements of one model, whose configuration is complete, valid, and has sequence batching."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._control = _id_control(config)

    def refusal(self, header: RequestHeader, sequence_id: int | str, request_id: str) -> NeriteError | None:
        """Return the error if a request cannot be part of a sequence.

        ``sequence_id`` is that of ``header``, or one that the server has generated.
        """
        if self._control is not None and (header.sequence_id or not sequence_id):
            name, expected = self._control
            given = dtypes.BYTES if isinstance(header.sequence_id, str) else dtypes.UINT64
            if (given is dtypes.BYTES) is not (expected is dtypes.BYTES):
                send = "a string" if expected is dtypes.BYTES else "a number"
                refusal = InvalidArgument(
                    f"sequence batching control '{name}' data-type is '{given.name}', but model '{self._model}' "
                    f"expects '{expected.name}' (send {send} as sequence_id, or change data_type of the control)"
                )
                return with_request_id(refusal, request_id)
        if header.batch_size > 1:
            return InvalidArgument(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                "batcher"
            )
        if not sequence_id:
            return InvalidArgument(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
            )
        return None


def _id_control(config: ModelConfig) -> tuple[str, DataType] | None:
    """Return name and type of the control for the correlation id; None if the model has none."""
    assert config.sequence_batching is not None
    for tensor in config.sequence_batching.control_input:
        for control in tensor.control:
            if control.kind == "CONTROL_SEQUENCE_CORRID":
                return tensor.name, dtypes.BY_CONFIG_NAME[control.data_type]
    return None


# Implicit state: tensors that the server keeps from one request of a sequence to the next.
#
# A state is a tensor that the model returns as an output and takes as an input. The output buffer becomes the input
# buffer without a copy, except for buffers so small that a view would retain more memory than it is worth.

SMALL: Final = 4096
"""States up to this many bytes are copied, so as not to retain the whole message or batch that contains them."""


class _Split(NamedTuple):
    """How the outputs of responses with one header are divided."""

    header: ResponseHeader | None
    """Header of the response for the caller; None if that is empty, so that it is only sent if it is the last one."""
    returned: tuple[int, ...]
    """Indices of the outputs for the caller."""
    states: tuple[int | None, ...]
    """Index of the output for each state; None for a state that the model left out, which stays unchanged."""
    specs: tuple[TensorSpec | None, ...]


class SequenceStates:
    """The states of one model, from a validated configuration."""

    def __init__(
        self, batching: ModelSequenceBatching, batching_dims: tuple[int, ...], directory: Path, *, decoupled: bool
    ) -> None:
        """``batching_dims``: the dimensions before the shape of each tensor; 1 for a batch dimension.

        Reads files in the model's ``directory``; blocks. Raises ``NeriteError`` if they have changed since validation.
        """
        self._decoupled = decoupled
        self.outputs = tuple(state.output_name for state in batching.state)
        """Names of the state outputs."""
        self._inputs = {state.output_name: state.input_name for state in batching.state}
        self._varies = any(-1 in state.dims for state in batching.state)
        self._forms: Memo[tuple[TensorSpec, ...], StateForm] = Memo()
        self._splits: Memo[tuple[ResponseHeader, frozenset[str]], _Split] = Memo()
        specs, data = [], []
        for state in batching.state:
            shape = (*batching_dims, *initial_dims(state))
            specs.append(TensorSpec(state.input_name, dtypes.BY_CONFIG_NAME[state.data_type], shape))
            data.append(read_initial_state(state, directory))
        self._first = self._form(tuple(specs)), data

    def first(self) -> KeptState:
        """Return the initial states, in new buffers, because models may modify them in place."""
        form, data = self._first
        return KeptState(form, [bytearray(each) for each in data])

    def settled(
        self, response: InferenceResponse, before: KeptState, returned: frozenset[str]
    ) -> tuple[KeptState, InferenceResponse]:
        """Return the states after a response, and the response without the states that are not among ``returned``."""
        header = response.header
        if header is None:
            return before, response
        split = self._splits.get((header, returned))
        if split is None:
            split = self._worked_out(header, returned)
            # The header, the caller's header with what transports cache in it, and the states.
            SEQUENCES.put(self._splits, (header, returned), split, 4 * headers.response_header_bytes(header))
        data = response.buffers
        kept = [old if at is None else _held(data[at]) for at, old in zip(split.states, before.data, strict=True)]
        specs = tuple([new or old for new, old in zip(split.specs, before.form.specs, strict=True)])
        if split.header is None:
            return KeptState(self._form(specs), kept), EMPTY
        return KeptState(self._form(specs), kept), InferenceResponse(split.header, [data[at] for at in split.returned])

    def _form(self, specs: tuple[TensorSpec, ...]) -> StateForm:
        form = self._forms.get(specs)
        if form is None:
            form = StateForm(specs, varies=self._varies)
            SEQUENCES.put(self._forms, specs, form, headers.tensor_specs_bytes(specs))
        return form

    def _worked_out(self, header: ResponseHeader, returned: frozenset[str]) -> _Split:
        positions = {spec.name: at for at, spec in enumerate(header.outputs)}
        returned_at = tuple(at for name, at in positions.items() if name not in self._inputs or name in returned)
        states = tuple(positions.get(name) for name in self.outputs)
        # A response of a decoupled model that contains only states is not sent to the caller.
        nothing = self._decoupled and not returned_at and not header.parameters and bool(positions)
        rest = ResponseHeader(
            header.model_name, header.model_version, [header.outputs[at] for at in returned_at], header.parameters
        )
        return _Split(
            None if nothing else rest,
            returned_at,
            states,
            tuple(
                None if at is None else _renamed(header.outputs[at], self._inputs[name])
                for name, at in zip(self.outputs, states, strict=True)
            ),
        )


def zeros(spec: TensorSpec) -> bytes:
    """Return the data of a tensor of zeros, or of empty strings."""
    return bytes(4 * spec.elements if spec.datatype is dtypes.BYTES else spec.byte_size)


def _renamed(spec: TensorSpec, name: str) -> TensorSpec:
    return TensorSpec(name, spec.datatype, spec.shape)


def _held(data: Buffer) -> Buffer:
    return bytearray(data) if len(data) <= SMALL else data


Said: TypeAlias = Mapping[str, tuple[TensorSpec, Buffer]]
"""Controls and states that a warm-up sample sets explicitly, by name."""


class SequenceHeader(RequestHeader):
    """The header of a request with controls and states attached."""

    __slots__ = ("null", "returned")

    def __init__(self, *arguments: Any, returned: frozenset[str] = frozenset(), **keywords: Any) -> None:
        """``returned``: the states that the caller has requested and may get."""
        super().__init__(*arguments, **keywords)
        self.returned = returned
        self.null: RequestHeader | None = None
        """Header of the null request for an empty slot, in a batch with requests that have this header."""

    def with_inputs(self, inputs: Iterable[TensorSpec]) -> SequenceHeader:
        """Return a copy of this header with other inputs."""
        other = SequenceHeader(
            self.model_name,
            self.model_version,
            [*inputs],
            self.outputs,
            parameters=self.parameters,
            priority=self.priority,
            timeout_us=self.timeout_us,
            sequence_id=self.sequence_id,
            sequence_start=self.sequence_start,
            sequence_end=self.sequence_end,
            caller=self.caller,
            returned=self.returned,
        )
        other.batch_size, other.batch_key = self.batch_size, self.batch_key
        return other


class SequenceInputs:
    """The controls and states of one model version. For the loop's thread only, once it is made."""

    def __init__(self, config: ModelConfig, directory: Path) -> None:
        """``config`` is complete, valid, and has sequence batching. Blocks: reads the initial states.

        Raises ``NeriteError`` if a file in the model's ``directory`` has changed since it was validated.
        """
        batching = config.sequence_batching
        assert batching is not None
        self._iterative = batching.iterative_sequence
        dims = (1,) if config.max_batch_size > 0 else ()
        self._controls = SequenceControls(batching, dims)
        policy = config.model_transaction_policy
        self._states = (
            SequenceStates(batching, dims, directory, decoupled=policy is not None and policy.decoupled)
            if batching.state
            else None
        )
        self._returnable = frozenset(output.name for output in config.output).intersection(
            state.output_name for state in batching.state
        )
        self._headers: Memo[tuple[RequestHeader, int | str, bool, bool, StateForm | None], SequenceHeader] = Memo()

    def attach(self, request: InferenceRequest, sequence: RequestSequence, *, start: bool, end: bool) -> None:
        """Attach controls and states to a request, whose header and data are the caller's.

        The header and data of a request that is to run again must be restored first.
        """
        # A model that works in place must not find its own changes when it gets a request again.
        own = (memoryview(each).toreadonly() for each in request.buffers) if self._iterative else request.buffers
        data = [*own, *self._controls.data(start, end, True, sequence.id)]
        form = None
        if self._states is not None:
            if start or sequence.state is None:
                sequence.state = self._states.first()
            form = sequence.state.form
            data += sequence.state.data
        request.header = self._header(request.header, sequence.id, start, end, form)
        request.data = data

    def overrule(self, request: InferenceRequest, said: Said) -> None:
        """Replace controls and states of a request from ``attach`` by those of a warm-up sample."""
        header = request.header
        assert isinstance(header, SequenceHeader)
        made = zip(header.inputs, request.buffers, strict=True)
        inputs = [said.get(spec.name, (spec, data)) for spec, data in made]
        request.header = header.with_inputs([spec for spec, _ in inputs])
        request.data = [bytearray(data) for _, data in inputs]

    def null(self, like: InferenceRequest) -> InferenceRequest:
        """Return a null request for an empty slot; ``like`` is another request of the batch, from ``attach``."""
        header = like.header
        assert isinstance(header, SequenceHeader)
        false = dict(zip(self._controls.names, self._controls.data(False, False, False, 0), strict=True))
        data = [bytearray(false.get(spec.name) or zeros(spec)) for spec in header.inputs]
        if header.null is None:
            header.null = RequestHeader(header.model_name, header.model_version, header.inputs, header.outputs)
            header.null.batch_size, header.null.batch_key = header.batch_size, header.batch_key
        return InferenceRequest(header.null, data, NOBODY, time.monotonic_ns())

    def settle(
        self, request: InferenceRequest, response: InferenceResponse, sequence: RequestSequence
    ) -> InferenceResponse:
        """Keep the states in a response to a request from ``attach``; return the response for the caller.

        A response without a state, such as an error, leaves the state unchanged. If one of several responses contains
        only states, the caller does not get it: the returned response is ``empty``.
        """
        if self._states is None:
            return response
        assert isinstance(request.header, SequenceHeader)
        # A decoupled model may respond after its sequence has ended and its state is gone.
        before = sequence.state or self._states.first()
        sequence.state, rest = self._states.settled(response, before, request.header.returned)
        return rest

    def _header(
        self, header: RequestHeader, sequence_id: int | str, start: bool, end: bool, form: StateForm | None
    ) -> SequenceHeader:
        """Return the header with controls and states for a caller's header."""
        key = (header, sequence_id, start, end, form)
        attached = self._headers.get(key)
        if attached is None:
            attached = self._made(*key)
            size = headers.request_header_bytes(header) + headers.request_header_bytes(attached)
            SEQUENCES.put(self._headers, key, attached, size)
        return attached

    def _made(
        self, header: RequestHeader, sequence_id: int | str, start: bool, end: bool, form: StateForm | None
    ) -> SequenceHeader:
        states = () if self._states is None else self._states.outputs
        attached = SequenceHeader(
            header.model_name,
            header.model_version,
            [*header.inputs, *self._controls.specs, *(() if form is None else form.specs)],
            [
                *header.outputs,
                # A header without outputs requests all outputs, including states.
                *(RequestedOutput(name) for name in states if header.outputs and name not in header.wanted),
            ],
            parameters=header.parameters,
            priority=header.priority,
            timeout_us=header.timeout_us,
            sequence_id=sequence_id,
            sequence_start=start,
            sequence_end=end,
            caller=header.caller,
            returned=self._returnable & header.wanted if header.outputs else self._returnable,
        )
        attached.batch_size = header.batch_size
        attached.batch_key = header.batch_key if form is None or not form.varies else (header.batch_key, form)
        return attached
