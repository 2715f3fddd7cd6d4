"""Requests and responses of the in-process interface."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nerite.core.request import RequestHeader
from nerite.core.response import InferenceResponse as CoreResponse
from nerite.core.tensor import Buffer, TensorSpec
from nerite.tritonserver.errors import InvalidArgumentError, TritonError, as_triton_error
from nerite.tritonserver.tensor import MemoryType, Tensor

if TYPE_CHECKING:
    from nerite.functions.embedded import InferenceCall

_START, _END = 1, 2


class NamedModel:
    """What a request says of its model."""

    name: str
    version: int


@dataclass
class InferenceRequest:
    """A request to a model. ``inputs`` are tensors, arrays, or lists of numbers, text or bytes, by name."""

    model: NamedModel
    request_id: str | None = None
    flags: int = 0
    correlation_id: int | str | None = None
    priority: int = 0
    timeout: int = 0
    inputs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, str | int | bool] = field(default_factory=dict)
    output_memory_type: str | MemoryType | None = None
    output_memory_allocator: Any = None
    response_queue: queue.SimpleQueue[Any] | asyncio.Queue[Any] | None = None

    def header(self) -> tuple[RequestHeader, list[Buffer]]:
        """Return the header and the data for the server. Raises ``InvalidArgumentError``."""
        if self.output_memory_allocator is not None or str(self.output_memory_type or "cpu").lower() not in (
            "cpu",
            "memorytype.cpu",
        ):
            raise InvalidArgumentError("outputs are in host memory: leave out output_memory_type and the allocator")
        if not isinstance(self.inputs, Mapping):
            raise InvalidArgumentError(f"inputs are {type(self.inputs)}: pass a dict")
        specs: list[TensorSpec] = []
        data: list[Buffer] = []
        for name, value in self.inputs.items():
            spec, buffer = Tensor.from_object(value).sendable(name)
            specs.append(spec)
            data.append(buffer)
        header = RequestHeader(
            self.model.name,
            "" if self.model.version < 0 else str(self.model.version),
            specs,
            parameters=dict(self.parameters),
            priority=self.priority,
            timeout_us=self.timeout,
            sequence_id=self.correlation_id or 0,
            sequence_start=bool(self.flags & _START),
            sequence_end=bool(self.flags & _END),
        )
        return header, data


@dataclass
class InferenceResponse:
    """A response: outputs by name, or an error. ``final`` marks the last of its request."""

    model: NamedModel
    request_id: str | None = None
    parameters: dict[str, str | int | bool | float] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    error: TritonError | None = None
    classification_label: str | None = None
    final: bool = False

    @classmethod
    def received(cls, request: InferenceRequest, response: CoreResponse, final: bool) -> InferenceResponse:
        """Return a response of the server."""
        found = cls(request.model, request.request_id, final=final)
        if response.error is not None:
            found.error = as_triton_error(response.error)
        if response.header is not None:
            found.parameters = dict(response.header.parameters)
            found.outputs = {
                spec.name: Tensor.received(spec, data)
                for spec, data in zip(response.header.outputs, response.buffers, strict=True)
            }
        return found


class ResponseIterator:
    """Responses to a request, for ``for`` and for ``async for``. A response without outputs ends a stream."""

    def __init__(self, call: InferenceCall, request: InferenceRequest, raise_on_error: bool) -> None:
        self._call = call
        self._request = request
        self._raise = raise_on_error
        self._over = False

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        if self._over:
            raise StopIteration
        return self._taken(*self._call.next())

    def __aiter__(self) -> ResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._over:
            raise StopAsyncIteration
        return self._taken(*await self._call.next_async())

    def cancel(self) -> None:
        """Cancel the request, if it has not ended."""
        self._call.cancel()

    def __del__(self) -> None:
        if not self._over:
            self._call.abandon()

    def _taken(self, response: CoreResponse, final: bool) -> InferenceResponse:
        self._over = final
        found = InferenceResponse.received(self._request, response, final)
        if self._request.response_queue is not None:
            put = getattr(self._request.response_queue, "put_nowait", self._request.response_queue.put)
            put(found)
        if found.error is not None and self._raise:
            raise found.error
        return found
