"""Implicit state: tensors that one request of a sequence leaves, in the server, for the next.

A state is a tensor that the model gives as an output and takes as an input. The buffer that came is the buffer that
goes: nothing is copied, but for what is so small that a view would hold more memory than it is worth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from nerite.config.initial_states import initial_dims, read_initial_state
from nerite.config.scheduling_choice import ModelSequenceBatching
from nerite.core import dtype as dtypes
from nerite.core import footprint
from nerite.core.byte_budget import SEQUENCES, Memo
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer, TensorSpec

SMALL: Final = 4096
"""Bytes up to which a state is copied, instead of holding what it lies in: a whole message, or a whole batch."""


class StateForm:
    """Types and shapes of a model's states between two requests. Equal ones are mostly the same object."""

    __slots__ = ("specs", "varies")

    def __init__(self, specs: tuple[TensorSpec, ...], *, varies: bool) -> None:
        self.specs = specs
        """Of the inputs, in the order of the configuration."""
        self.varies = varies
        """Another request may come with another form: the two cannot share a batch."""


class Kept(NamedTuple):
    """What a sequence keeps between two requests."""

    form: StateForm
    data: list[Buffer]


class _Split(NamedTuple):
    """How the outputs of responses with one header are dealt out."""

    header: ResponseHeader | None
    """What the caller gets; None if that is nothing, and he gets it only if it is the last he gets."""
    returned: tuple[int, ...]
    """The positions of its outputs."""
    states: tuple[int | None, ...]
    """The position of each state; None for one that the model left out, which stays as it is."""
    specs: tuple[TensorSpec | None, ...]


class States:
    """The states of one model, from a configuration that has been validated."""

    def __init__(
        self, batching: ModelSequenceBatching, batching_dims: tuple[int, ...], directory: Path, *, decoupled: bool
    ) -> None:
        """``batching_dims``: what stands before the shape of each tensor, 1 where there is a batch dimension.

        Reads files in the model's ``directory``; blocks. Raises ``NeriteError`` where they are not as they were.
        """
        self._decoupled = decoupled
        self.outputs = tuple(state.output_name for state in batching.state)
        """Their names as outputs."""
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

    def first(self) -> Kept:
        """Return what the first request of a sequence finds, in memory of its own: models may work in place."""
        form, data = self._first
        return Kept(form, [bytearray(each) for each in data])

    def settled(
        self, response: InferenceResponse, before: Kept, returned: frozenset[str]
    ) -> tuple[Kept, InferenceResponse]:
        """Return the states after a response, and the response without those that are not among ``returned``."""
        header = response.header
        if header is None:
            return before, response
        split = self._splits.get((header, returned))
        if split is None:
            split = self._worked_out(header, returned)
            # The header, what the caller gets of it with what transports leave there, and the states.
            SEQUENCES.put(self._splits, (header, returned), split, 4 * footprint.of_response_header(header))
        data = response.data
        kept = [old if at is None else _held(data[at]) for at, old in zip(split.states, before.data, strict=True)]
        specs = tuple([new or old for new, old in zip(split.specs, before.form.specs, strict=True)])
        if split.header is None:
            return Kept(self._form(specs), kept), EMPTY
        return Kept(self._form(specs), kept), InferenceResponse(split.header, [data[at] for at in split.returned])

    def _form(self, specs: tuple[TensorSpec, ...]) -> StateForm:
        form = self._forms.get(specs)
        if form is None:
            form = StateForm(specs, varies=self._varies)
            SEQUENCES.put(self._forms, specs, form, footprint.of_specs(specs))
        return form

    def _worked_out(self, header: ResponseHeader, returned: frozenset[str]) -> _Split:
        positions = {spec.name: at for at, spec in enumerate(header.outputs)}
        theirs = tuple(at for name, at in positions.items() if name not in self._inputs or name in returned)
        states = tuple(positions.get(name) for name in self.outputs)
        # What a decoupled model sends to leave a state, and nothing else, is no response.
        nothing = self._decoupled and not theirs and not header.parameters and bool(positions)
        rest = ResponseHeader(
            header.model_name, header.model_version, [header.outputs[at] for at in theirs], header.parameters
        )
        return _Split(
            None if nothing else rest,
            theirs,
            states,
            tuple(
                None if at is None else _renamed(header.outputs[at], self._inputs[name])
                for name, at in zip(self.outputs, states, strict=True)
            ),
        )


def zeros(spec: TensorSpec) -> bytes:
    """Return the data of a tensor of zeros, or of strings without length."""
    return bytes(4 * spec.elements if spec.datatype is dtypes.BYTES else spec.byte_size)


def _renamed(spec: TensorSpec, name: str) -> TensorSpec:
    return TensorSpec(name, spec.datatype, spec.shape)


def _held(data: Buffer) -> Buffer:
    return bytearray(data) if len(data) <= SMALL else data
