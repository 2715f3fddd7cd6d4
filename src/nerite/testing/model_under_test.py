"""A Python model in the hands of a test."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from numpy.typing import ArrayLike

from nerite.backends.interface import Marks
from nerite.backends.python.instance import PythonInstance
from nerite.core.errors import Internal, NeriteError
from nerite.core.request import InferenceRequest, Parameter, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.execution.roster import SelectiveRoster
from nerite.testing.arrays import Answer, to_test, to_wire
from nerite.testing.own_error import own_error
from nerite.testing.sequences import SequencesUnderTest

_PATIENCE = 30.0


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


class ModelUnderTest:
    """A model that is loaded. Made by ``load_model``; a context manager that closes it."""

    def __init__(
        self,
        config: Mapping[str, Any],
        signature: Signature,
        instance: PythonInstance,
        release: Callable[[], None],
        roster: SelectiveRoster | None = None,
    ) -> None:
        """``roster`` is that of a model with sequences."""
        self.config = config
        """The complete configuration, as the server would show it."""
        self._signature = signature
        self._instance = instance
        self._sequences = None if roster is None else SequencesUnderTest(roster, self._execute)
        self.on_close = [release]
        """Called when the model is finalized."""

    @property
    def model(self) -> Any:
        """The ``TritonPythonModel`` object itself."""
        return self._instance.model

    def infer(self, inputs: Mapping[str, ArrayLike], **request_fields: Any) -> Answer:
        """Send one request; ``request_fields`` are those of ``Request``.

        Raises what the model raises, and ``NeriteError`` if the model answers with an error, if its answer is none, or
        if a server would have refused the request.
        """
        __tracebackhide__ = True
        (answer,) = self.execute([Request(inputs, **request_fields)])
        if isinstance(answer, NeriteError):
            raise answer
        return answer

    def execute(self, requests: Sequence[Request | Mapping[str, ArrayLike]]) -> list[Answer | NeriteError]:
        """Send a batch; return one answer for each request, an error where the model answered with one.

        Raises as ``infer`` does if the batch fails as a whole.
        """
        __tracebackhide__ = True
        batch = [self._request(one if isinstance(one, Request) else Request(one)) for one in requests]
        responses = self._run(batch)
        return [
            request.only() if response is None else _answer(response)
            for request, response in zip(batch, responses, strict=True)
        ]

    def stream(self, inputs: Mapping[str, ArrayLike], **request_fields: Any) -> list[Answer | NeriteError]:
        """Send one request; return all that the model sends by its response sender, once it has sent the last.

        Raises as ``infer`` does if the request fails before that, ``TimeoutError`` if the model falls silent.
        """
        __tracebackhide__ = True
        request = self._request(Request(inputs, **request_fields))
        (response,) = self._run([request])
        return request.all() if response is None else [_answer(response)]

    def sequence(self, sequence_id: int | str = 1) -> SequenceUnderTest:
        """Return what sends requests of one sequence; the first begins it."""
        return SequenceUnderTest(self, sequence_id)

    def is_ready(self) -> bool:
        """Return what the model says of its readiness."""
        return self._instance.is_ready()

    def close(self) -> None:
        """Finalize the model and forget its code."""
        self._instance.close()
        for call in self.on_close:
            call()

    def __enter__(self) -> ModelUnderTest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, batch: Sequence[_TestRequest]) -> Sequence[InferenceResponse | None]:
        """Return the answers to a batch; None where they are given to the request."""
        __tracebackhide__ = True
        if self._sequences is None:
            return self._execute(batch)
        self._sequences.run(batch)
        return [None] * len(batch)

    def _execute(self, batch: Sequence[InferenceRequest]) -> Sequence[InferenceResponse | None]:
        __tracebackhide__ = True
        return own_error(self._instance.execute, batch, Marks())

    def _request(self, asked: Request) -> _TestRequest:
        declared = self._signature.inputs
        tensors = [
            to_wire(name, value, declared[name].datatype if name in declared else None)
            for name, value in asked.inputs.items()
        ]
        header = RequestHeader(
            self._signature.model_name,
            "",
            [spec for spec, _ in tensors],
            [RequestedOutput(name) for name in asked.outputs],
            parameters=dict(asked.parameters),
            priority=asked.priority,
            timeout_us=asked.timeout_us,
            sequence_id=asked.sequence_id,
            sequence_start=asked.sequence_start,
            sequence_end=asked.sequence_end,
        )
        self._signature.bind(header, asked.id)
        return _TestRequest(header, [data for _, data in tensors], _Sent(), time.monotonic_ns(), asked.id)


class SequenceUnderTest:
    """One sequence of requests. Made by ``ModelUnderTest.sequence``."""

    def __init__(self, model: ModelUnderTest, sequence_id: int | str) -> None:
        self._model = model
        self._id = sequence_id
        self._begun = False

    def infer(self, inputs: Mapping[str, ArrayLike], *, end: bool = False, **request_fields: Any) -> Answer:
        """Send the next request, as ``ModelUnderTest.infer`` does; ``end``: it is the last."""
        __tracebackhide__ = True
        return self._model.infer(inputs, **self._place(end), **request_fields)

    def stream(
        self, inputs: Mapping[str, ArrayLike], *, end: bool = False, **request_fields: Any
    ) -> list[Answer | NeriteError]:
        """Send the next request, as ``ModelUnderTest.stream`` does; ``end``: it is the last."""
        __tracebackhide__ = True
        return self._model.stream(inputs, **self._place(end), **request_fields)

    def _place(self, end: bool) -> dict[str, Any]:
        """Return what the next request says of its place; after the last one comes a first."""
        place = {"sequence_id": self._id, "sequence_start": not self._begun, "sequence_end": end}
        self._begun = not end
        return place


class _Sent:
    """The sink of a test's request: keeps what the model sends, from whichever thread."""

    def __init__(self) -> None:
        self.responses: queue.SimpleQueue[tuple[InferenceResponse, bool]] = queue.SimpleQueue()

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        self.responses.put((response, final))


class _TestRequest(InferenceRequest):
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
                answers.append(_answer(response))
        return answers

    def only(self) -> Answer | NeriteError:
        """Return the one response that a request to a model that is not decoupled has."""
        answers = self.all()
        if len(answers) != 1:
            return Internal(f"the model sent {len(answers)} responses, where one is expected. See ``stream``")
        return answers[0]


def _answer(response: InferenceResponse) -> Answer | NeriteError:
    if response.error is not None:
        return response.error
    assert response.header is not None
    return {spec.name: to_test(spec, data) for spec, data in zip(response.header.outputs, response.data, strict=True)}
