"""Requests of a test, and what comes back for them."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from numpy.typing import ArrayLike

from nerite.core.errors import Internal, NeriteError
from nerite.core.request import InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse, Parameter
from nerite.core.signature import Signature
from nerite.testing.arrays import Answer, to_test, to_wire

_PATIENCE: Final = 30.0


@dataclass(frozen=True)
class Request:
    """One request: inputs by name, and what else a client may say."""

    inputs: Mapping[str, ArrayLike]
    id: str = ""
    outputs: Sequence[str] = ()
    """The outputs that are wanted; empty means all."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False

    def sent_to(self, signature: Signature) -> SentRequest:
        """Return it as the server would give it to a model. Raises ``NeriteError`` where the server would refuse it."""
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
    """The sink of a test's request: keeps what the model sends, from whichever thread."""

    def __init__(self) -> None:
        self.responses: queue.SimpleQueue[tuple[InferenceResponse, bool]] = queue.SimpleQueue()

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        self.responses.put((response, final))


class SentRequest(InferenceRequest):
    """A request whose model may use the response sender."""

    __slots__ = ()

    streams = True

    def all(self) -> list[Answer | NeriteError]:
        """Wait for the last response, and return them all."""
        assert isinstance(self.sink, _Sent)
        answers: list[Answer | NeriteError] = []
        final = False
        while not final:
            try:
                response, final = self.sink.responses.get(timeout=_PATIENCE)
            except queue.Empty:
                raise TimeoutError(
                    f"the model has sent {len(answers)} responses and then nothing for {_PATIENCE:.0f} s; the last "
                    "one needs flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL"
                ) from None
            if not response.empty:
                answers.append(answer_of(response))
        return answers

    def only(self) -> Answer | NeriteError:
        """Return the one response that a request to a model that is not decoupled has."""
        answers = self.all()
        if len(answers) != 1:
            return Internal(f"the model sent {len(answers)} responses, where one is expected. See ``stream``")
        return answers[0]


def answer_of(response: InferenceResponse) -> Answer | NeriteError:
    """Return the outputs of a response as arrays of their own, or its error."""
    if response.error is not None:
        return response.error
    assert response.header is not None
    return {spec.name: to_test(spec, data) for spec, data in zip(response.header.outputs, response.data, strict=True)}
