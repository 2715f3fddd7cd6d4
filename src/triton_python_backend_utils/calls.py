"""A model's request to another model, on its way to the server, and what comes back.

Request headers are shared: as long as a model asks with the same names, types and shapes, all its requests have the
same header object, which crosses to the server once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Final

from nerite.core import host
from nerite.core.errors import NeriteError
from nerite.core.request import RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse as CoreResponse
from nerite.core.tensor import TensorSpec
from triton_python_backend_utils.errors import ErrorCode, TritonError, TritonModelException
from triton_python_backend_utils.response import InferenceResponse
from triton_python_backend_utils.tensor import ReceivedTensor, Tensor, wire_form

if TYPE_CHECKING:
    from triton_python_backend_utils.request import InferenceRequest

_MOST_HEADERS: Final = 1024
_START: Final = 1
_END: Final = 2
_headers: dict[tuple[Any, ...], RequestHeader] = {}


class ResponseIterator:
    """The responses of another model to one request, in the order in which it sends them; ``async for`` works too.

    The called model waits while more than a few are not read. One that is dropped before its end cancels the request.
    """

    __slots__ = ("_call", "_over")

    def __init__(self, call: host.Call) -> None:
        self._call = call
        self._over = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._over:
            raise StopIteration("Iteration is done for the responses.")
        response, self._over = self._call.next()
        return _received(response)

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._over:
            raise StopAsyncIteration
        await _here(self._call)
        return next(self)

    def cancel(self) -> None:
        """Say that no more responses are wanted: the iteration is over."""
        self._over = True
        if not self._call.final:
            self._call.cancel()

    def __del__(self) -> None:
        if not self._over:
            self.cancel()


def ask(request: InferenceRequest, *, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """Send a request to another model, and wait for its response. Raises ``TritonModelException``."""
    call = _start(request, decoupled)
    return ResponseIterator(call) if decoupled else _only(call)


def ask_async(
    request: InferenceRequest, *, decoupled: bool
) -> asyncio.Future[InferenceResponse] | asyncio.Future[ResponseIterator]:
    """Send a request to another model at once; the future has its response, or the iterator once there is a first.

    Cancelling the future cancels the request. Raises ``TritonModelException``, and ``RuntimeError`` outside of a
    coroutine.
    """
    loop = asyncio.get_running_loop()
    call = _start(request, decoupled)
    future: asyncio.Future[Any] = loop.create_future()

    def here() -> None:
        if not future.done():
            future.set_result(ResponseIterator(call) if decoupled else _only(call))

    def ended(future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            call.cancel()

    future.add_done_callback(ended)
    call.when_next(loop, here)
    return future


async def _here(call: host.Call) -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    call.when_next(loop, lambda: None if future.done() else future.set_result(None))
    await future


def _start(request: InferenceRequest, decoupled: bool) -> host.Call:
    inputs = request.inputs()
    header = _header(request, inputs, decoupled)
    data = [wire_form(tensor) for tensor in inputs]
    try:
        return host.current.call(header, data, request.request_id(), request.trace().request, decoupled=decoupled)
    except NeriteError as error:
        raise TritonModelException(error.message) from None


def _only(call: host.Call) -> InferenceResponse:
    """Return the one response of a model that is not decoupled; that it was the last may be said apart."""
    response, final = call.next()
    while not final:
        _, final = call.next()
    return _received(response)


def _header(request: InferenceRequest, inputs: list[Tensor], decoupled: bool) -> RequestHeader:
    model, version = request.target()
    outputs = frozenset(request.requested_output_names())
    correlation_id, flags, timeout = request.correlation_id(), request.flags(), request.timeout()
    form: list[Any] = [model, version, decoupled, outputs, correlation_id, flags, timeout]
    for tensor in inputs:
        form += (tensor._name, tensor._datatype, tensor._shape)
    parameters = request.custom()
    if parameters:
        form += sorted((name, repr(value)) for name, value in parameters.items())
    key = tuple(form)
    header = _headers.get(key)
    if header is None:
        if len(_headers) >= _MOST_HEADERS:
            _headers.clear()
        header = _headers[key] = RequestHeader(
            model,
            "" if version == -1 else str(version),
            [TensorSpec(tensor._name, tensor._datatype, tensor._shape) for tensor in inputs],
            [RequestedOutput(name) for name in sorted(outputs)],
            parameters=parameters,
            timeout_us=timeout,
            sequence_id=correlation_id,
            sequence_start=bool(flags & _START),
            sequence_end=bool(flags & _END),
        )
    return header


def _received(response: CoreResponse) -> InferenceResponse:
    if response.error is not None:
        return InferenceResponse(error=TritonError(response.error.message, ErrorCode[response.error.code]))
    if response.header is None:
        return InferenceResponse([])
    received = InferenceResponse(list(map(ReceivedTensor, response.header.outputs, response.data)))
    received._parameters = response.header.parameters
    return received
