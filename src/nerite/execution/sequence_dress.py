"""What a request of a sequence carries on its way to a model, and what is taken out of the answer on its way back.

Control inputs and states are inputs like any other by the time a backend sees them, and states are outputs: nothing
between here and the model knows what a sequence is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from nerite.config.model_config import ModelConfig
from nerite.core import footprint
from nerite.core.byte_budget import SEQUENCES, Memo
from nerite.core.request import NOBODY, InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, TensorSpec
from nerite.execution.sequence_controls import Controls
from nerite.execution.sequence_states import StateForm, States, zeros
from nerite.scheduling.sequence import Sequence

Said: TypeAlias = Mapping[str, tuple[TensorSpec, Buffer]]
"""Controls and states that a sample for warming up says itself, by name."""


class DressedHeader(RequestHeader):
    """The header of a request with controls and states."""

    __slots__ = ("null", "returned")

    def __init__(self, *arguments: Any, returned: frozenset[str] = frozenset(), **keywords: Any) -> None:
        """``returned``: the states that the caller gets, too, as he may ask for them, and did."""
        super().__init__(*arguments, **keywords)
        self.returned = returned
        self.null: RequestHeader | None = None
        """The header of a request that stands for none, in a batch with those that have this one."""

    def with_inputs(self, inputs: Iterable[TensorSpec]) -> DressedHeader:
        """Return a header that says this of other inputs."""
        other = DressedHeader(
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


class SequenceDress:
    """The controls and states of one model version. For the loop's thread only, once it is made."""

    def __init__(self, config: ModelConfig, directory: Path) -> None:
        """``config`` is complete, valid, and chooses sequence batching. Blocks: reads what states begin with.

        Raises ``NeriteError`` if a file in the model's ``directory`` is not what it was when it was checked.
        """
        batching = config.sequence_batching
        assert batching is not None
        self._iterative = batching.iterative_sequence
        dims = (1,) if config.max_batch_size > 0 else ()
        self._controls = Controls(batching, dims)
        policy = config.model_transaction_policy
        self._states = (
            States(batching, dims, directory, decoupled=policy is not None and policy.decoupled)
            if batching.state
            else None
        )
        self._returnable = frozenset(output.name for output in config.output).intersection(
            state.output_name for state in batching.state
        )
        self._headers: Memo[tuple[RequestHeader, int | str, bool, bool, StateForm | None], DressedHeader] = Memo()

    def dress(
        self, request: InferenceRequest, sequence: Sequence, *, start: bool, end: bool, ready: bool = True
    ) -> None:
        """Give a request, whose header and data are the caller's, what the model is to know of its sequence.

        A request that is to run again gets the caller's header and data back first.
        """
        # A model that works in place must not find what it left there when it gets a request once more.
        own = (memoryview(each).toreadonly() for each in request.data) if self._iterative else request.data
        data = [*own, *self._controls.data(start, end, ready, sequence.id)]
        form = None
        if self._states is not None:
            if start or sequence.state is None:
                sequence.state = self._states.first()
            form = sequence.state.form
            data += sequence.state.data
        request.header = self._header(request.header, sequence.id, start, end, form)
        request.data = data

    def overrule(self, request: InferenceRequest, said: Said) -> None:
        """Give a dressed ``request`` the controls and states that somebody chose, in place of the server's."""
        header = request.header
        assert isinstance(header, DressedHeader)
        made = zip(header.inputs, request.data, strict=True)
        inputs = [said.get(spec.name, (spec, data)) for spec, data in made]
        request.header = header.with_inputs([spec for spec, _ in inputs])
        request.data = [bytearray(data) for _, data in inputs]

    def null(self, like: InferenceRequest) -> InferenceRequest:
        """Return a request that stands in a batch for a slot without one; ``like``, which is dressed, is another."""
        header = like.header
        assert isinstance(header, DressedHeader)
        false = dict(zip(self._controls.names, self._controls.data(False, False, False, 0), strict=True))
        data = [bytearray(false.get(spec.name) or zeros(spec)) for spec in header.inputs]
        if header.null is None:
            header.null = RequestHeader(header.model_name, header.model_version, header.inputs, header.outputs)
            header.null.batch_size, header.null.batch_key = header.batch_size, header.batch_key
        return InferenceRequest(header.null, data, NOBODY, time.monotonic_ns())

    def settle(self, request: InferenceRequest, response: InferenceResponse, sequence: Sequence) -> InferenceResponse:
        """Keep the states that a response to a dressed ``request`` has; return what the caller gets of it.

        What says nothing of a state (an error, say) leaves it as it was. Of several responses one may be for the state
        alone: then the caller gets nothing of it, and what is returned is ``empty``.
        """
        if self._states is None:
            return response
        assert isinstance(request.header, DressedHeader)
        # A decoupled model may answer when its sequence is over, and nothing of that is left.
        before = sequence.state or self._states.first()
        sequence.state, rest = self._states.settled(response, before, request.header.returned)
        return rest

    def _header(
        self, header: RequestHeader, sequence_id: int | str, start: bool, end: bool, form: StateForm | None
    ) -> DressedHeader:
        """Return what becomes of a caller's header."""
        key = (header, sequence_id, start, end, form)
        dressed = self._headers.get(key)
        if dressed is None:
            dressed = self._made(*key)
            size = footprint.of_request_header(header) + footprint.of_request_header(dressed)
            SEQUENCES.put(self._headers, key, dressed, size)
        return dressed

    def _made(
        self, header: RequestHeader, sequence_id: int | str, start: bool, end: bool, form: StateForm | None
    ) -> DressedHeader:
        states = () if self._states is None else self._states.outputs
        dressed = DressedHeader(
            header.model_name,
            header.model_version,
            [*header.inputs, *self._controls.specs, *(() if form is None else form.specs)],
            [
                *header.outputs,
                # Without any, all outputs are meant, states among them.
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
        dressed.batch_size = header.batch_size
        dressed.batch_key = header.batch_key if form is None or not form.varies else (header.batch_key, form)
        return dressed
