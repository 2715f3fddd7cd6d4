"""A Python model in the hands of a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias

from numpy.typing import ArrayLike, NDArray

from nerite.backends.interface import Marks
from nerite.backends.python.instance import PythonInstance
from nerite.core.errors import NeriteError
from nerite.core.request import InferenceRequest, Parameter, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.testing.arrays import to_test, to_wire
from nerite.testing.own_error import own_error

Answer: TypeAlias = dict[str, NDArray[Any]]
"""The outputs of one request by name, in the model's order."""


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
        self, config: Mapping[str, Any], signature: Signature, instance: PythonInstance, release: Callable[[], None]
    ) -> None:
        self.config = config
        """The complete configuration, as the server would show it."""
        self._signature = signature
        self._instance = instance
        self._release = release

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
        return [_answer(response) for response in own_error(self._instance.execute, batch, Marks())]

    def is_ready(self) -> bool:
        """Return what the model says of its readiness."""
        return self._instance.is_ready()

    def close(self) -> None:
        """Finalize the model and forget its code."""
        self._instance.close()
        self._release()

    def __enter__(self) -> ModelUnderTest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, asked: Request) -> InferenceRequest:
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
        return InferenceRequest(header, [data for _, data in tensors], _NOBODY, time.monotonic_ns(), asked.id)


class _Nobody:
    """The sink of a test's request: its answer is what ``execute`` returns."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        raise AssertionError("a model under test answers by returning")


_NOBODY = _Nobody()


def _answer(response: InferenceResponse) -> Answer | NeriteError:
    if response.error is not None:
        return response.error
    assert response.header is not None
    return {spec.name: to_test(spec, data) for spec, data in zip(response.header.outputs, response.data, strict=True)}
