"""Requests and sequences of a test, and the conversion between its arrays and the buffers of requests."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, NeriteError, Unavailable
from nerite.core.request import InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse, Parameter
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, DataType, TensorSpec, from_array, to_array
from nerite.dispatch.interface import SelectivePicker
from nerite.instances.instance import Batch, ModelInstance
from nerite.scheduling.sequence import SequenceRequest

Execute: TypeAlias = Callable[[Sequence[InferenceRequest]], Sequence[InferenceResponse | None]]

_LATER: Final = 1 << 62
"""Nanoseconds in the future at which no batch waits for further requests."""


class SequencesUnderTest:
    """Runs the sequences of a model with one instance, without delays, with the server's own instance picker.

    The picker batches requests, adds controls and states, and repeats a request as often as its model reschedules it.
    """

    def __init__(self, picker: SelectivePicker, execute: Execute) -> None:
        self._picker = picker
        self._execute = execute
        picker.add_instance(cast(ModelInstance, self))  # the picker accepts any object as an instance

    def run(self, requests: Sequence[InferenceRequest]) -> None:
        """Run the model until nothing is left to do; responses go to the sinks of ``requests``.

        Raises what the model raises.
        """
        __tracebackhide__ = True
        waiting = [_Streaming(request, self._picker) for request in requests]
        try:
            for request in waiting:
                refusal = self._picker.offer(request, time.monotonic_ns())
                if refusal is not None:
                    request.outer.respond(InferenceResponse.failed(refusal))
            while (chosen := self._picker.choose(time.monotonic_ns() + _LATER)) is not None:
                instance, batch = chosen
                self._run(instance, batch)
        finally:
            self._give_up(waiting)

    def _run(self, instance: ModelInstance, batch: Batch) -> None:
        __tracebackhide__ = True
        batch = [request if isinstance(request, SequenceRequest) else _streaming_null(request) for request in batch]
        failed = InferenceResponse.failed(Internal("the model raised an exception"))
        responses: Sequence[InferenceResponse | None] = [failed] * len(batch)
        try:
            responses = self._execute(batch)
        finally:
            answered, answers, _ = self._picker.ended(instance, batch, responses, 0)
        for request, answer in zip(answered, answers, strict=True):
            if answer is not None:
                assert isinstance(request, SequenceRequest)
                request.outer.respond(answer)

    def _give_up(self, requests: Sequence[_Streaming]) -> None:
        """Reject requests that still wait: nothing can release them before the test continues."""
        for request in requests:
            if self._picker.withdraw(request):
                full = Unavailable(
                    f"sequence {request.sequence_id} waits for a slot: max_batch_size or max_candidate_sequences "
                    "limits the number of concurrent sequences of an instance, and others have not ended"
                )
                request.outer.respond(InferenceResponse.failed(full))


class _Streaming(SequenceRequest):
    """A request whose model may use the response sender, and send states with it."""

    __slots__ = ("_picker",)

    streams = True

    def __init__(self, outer: InferenceRequest, picker: SelectivePicker) -> None:
        super().__init__(outer)
        self._picker = picker

    def respond(self, response: InferenceResponse, final: bool = True) -> None:
        """Pass a response to the test, without the states for the next request of the sequence."""
        rest = self._picker.settle(self, response)
        if rest is not None and (final or not rest.empty):
            super().respond(rest, final)


class _Null(InferenceRequest):
    """Placeholder in a batch for a slot without a request."""

    __slots__ = ()

    streams = True


def _streaming_null(null: InferenceRequest) -> _Null:
    return _Null(null.header, null.data, null.sink, null.arrived_ns)


Answer: TypeAlias = dict[str, NDArray[Any]]
"""Tensors by name: the outputs of one request, in the model's order."""


def to_wire(name: str, value: ArrayLike, declared: DataType | None) -> tuple[TensorSpec, Buffer]:
    """Convert a test's value to a tensor specification and bytes; the bytes are a copy, which the model may modify.

    An array keeps its type. Anything else (lists, numbers, strings) is converted to the declared type, if known. BF16
    is given as UINT16, the 16-bit words of the numbers.
    """
    if not isinstance(value, np.ndarray):
        value = np.asarray(value, None if declared is None else declared.numpy)
    if value.dtype.kind == "U":
        value = value.astype(object)
    spec, data = from_array(name, value)
    if declared is dtypes.BF16 and spec.datatype is dtypes.UINT16:
        spec = TensorSpec(name, dtypes.BF16, spec.shape)
    return spec, bytearray(data)


def to_test(spec: TensorSpec, data: Buffer) -> NDArray[Any]:
    """Copy an output into an array; BYTES as an object array of ``bytes``, BF16 as UINT16 words."""
    return to_array(spec, bytearray(data))


_RESPONSE_TIMEOUT: Final = 30.0
"""Seconds to wait for the next response of a model."""


@dataclass(frozen=True)
class Request:
    """One request: inputs by name, and the other fields that a client can set."""

    inputs: Mapping[str, ArrayLike]
    id: str = ""
    outputs: Sequence[str] = ()
    """The requested outputs; empty means all."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False

    def sent_to(self, signature: Signature) -> SentRequest:
        """Build the request that the server would pass to a model. Raises ``NeriteError`` if it would be rejected."""
        declared = signature.inputs
        tensors = [
            to_wire(name, value, declared[name].datatype if name in declared else None)
            for name, value in self.inputs.items()
        ]
        header = RequestHeader(
            signature.model_name,
            "",
            [spec for spec, _ in tensors],
            [RequestedOutput(name) for name in self.outputs],
            parameters=dict(self.parameters),
            priority=self.priority,
            timeout_us=self.timeout_us,
            sequence_id=self.sequence_id,
            sequence_start=self.sequence_start,
            sequence_end=self.sequence_end,
        )
        signature.bind(header, self.id)
        return SentRequest(header, [data for _, data in tensors], _Sent(), time.monotonic_ns(), self.id)


class _Sent:
    """Thread-safe sink of a test's request: keeps the responses that the model sends."""

    def __init__(self) -> None:
        self.responses: queue.SimpleQueue[tuple[InferenceResponse, bool]] = queue.SimpleQueue()

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        self.responses.put((response, final))


class SentRequest(InferenceRequest):
    """A request whose model may use the response sender."""

    __slots__ = ()

    streams = True

    def all(self) -> list[Answer | NeriteError]:
        """Wait for the last response and return all of them."""
        assert isinstance(self.sink, _Sent)
        answers: list[Answer | NeriteError] = []
        final = False
        while not final:
            try:
                response, final = self.sink.responses.get(timeout=_RESPONSE_TIMEOUT)
            except queue.Empty:
                raise TimeoutError(
                    f"the model sent {len(answers)} responses and then nothing for {_RESPONSE_TIMEOUT:.0f} s; the "
                    "last one needs flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL"
                ) from None
            if not response.empty:
                answers.append(answer_of(response))
        return answers

    def only(self) -> Answer | NeriteError:
        """Return the single response of a model that is not decoupled."""
        answers = self.all()
        if len(answers) != 1:
            return Internal(f"the model sent {len(answers)} responses, but one is expected. See ``stream``")
        return answers[0]


def answer_of(response: InferenceResponse) -> Answer | NeriteError:
    """Return the outputs of a response as copies in arrays, or its error."""
    if response.error is not None:
        return response.error
    assert response.header is not None
    outputs = zip(response.header.outputs, response.buffers, strict=True)
    return {spec.name: to_test(spec, data) for spec, data in outputs}
