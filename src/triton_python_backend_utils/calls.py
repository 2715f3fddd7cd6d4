"""A model's request to another model, on its way to the server, and what comes back.

Request headers are shared: as long as a model asks with the same names, types and shapes, all its requests have the
same header object, which crosses to the server once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from nerite.core import footprint, host
from nerite.core.byte_budget import MODEL_CALLS, Memo
from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.core.request import MAX_CORRELATION_ID, RequestedOutput, RequestHeader
from nerite.core.response import InferenceResponse as CoreResponse
from nerite.core.tensor import TensorSpec
from nerite.core.text import MAX_NAME, mistake_in
from triton_python_backend_utils.arguments import INT64
from triton_python_backend_utils.errors import ErrorCode, TritonError, TritonModelException
from triton_python_backend_utils.parameters import mistake_in_parameters
from triton_python_backend_utils.response import InferenceResponse
from triton_python_backend_utils.tensor import ReceivedTensor, Tensor, wire_form

if TYPE_CHECKING:
    from triton_python_backend_utils.request import InferenceRequest

_START: Final = 1
_END: Final = 2
_headers: Memo[tuple[Any, ...], RequestHeader] = Memo()


class ResponseIterator:
    """The responses of another model to one request, in the order in which it sends them; ``async for`` works too.

    The called model waits while more than a few are not read. An iterator that is dropped before its end cancels the
    request.
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
        try:
            response, self._over = self._call.next()
        except NeriteError as error:
            raise TritonModelException(error.message) from None
        return _received(response)

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._over:
            raise StopAsyncIteration
        await _here(self._call)
        return next(self)

    def cancel(self) -> None:
        """Cancel the request, if it has not ended.

        The iteration goes on with what the called model still sends: mostly a response with the error ``CANCELLED``.
        Raises ``TritonModelException`` in a process that the model has forked.
        """
        if self._over:
            return
        try:
            self._call.cancel()
        except NeriteError as error:
            raise TritonModelException(error.message) from None

    def __del__(self) -> None:
        if not self._over:
            self._over = True
            self._call.give_up()


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
            call.give_up()

    future.add_done_callback(ended)
    call.when_next(loop, here)
    return future


async def _here(call: host.Call) -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    call.when_next(loop, lambda: None if future.done() else future.set_result(None))
    await future


class _Refused:
    """A call that is not sent: its only answer says why. Triton answers with an error, too, rather than to raise it."""

    __slots__ = ("_error", "final")

    def __init__(self, error: NeriteError) -> None:
        self._error = error
        self.final = False

    def next(self) -> tuple[CoreResponse, bool]:
        self.final = True
        return CoreResponse.failed(self._error), True

    def when_next(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        loop.call_soon(call)

    def cancel(self) -> None:
        pass

    def give_up(self) -> None:
        pass


def _start(request: InferenceRequest, decoupled: bool) -> host.Call:
    inputs = request.inputs()
    name = request.request_id()
    try:
        header = _header(request, inputs, decoupled)
        if len(name) > MAX_NAME:
            raise InvalidArgument(f"request_id {mistake_in(name)}")
    except NeriteError as error:
        return _Refused(error.prefixed(f"Model {request.target()[0]} - Error when running inference: "))
    data = [wire_form(tensor) for tensor in inputs]
    try:
        return host.current.call(header, data, name, request.trace().request, decoupled=decoupled)
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
        header = RequestHeader(
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
        _check(header)
        MODEL_CALLS.put(_headers, key, header, footprint.of_request_header(header))
    return header


def _check(header: RequestHeader) -> None:
    """Raise ``NeriteError`` for a header that could not be sent, or that the server refuses from clients."""
    names = [("model_name", header.model_name)]
    names += [("the name of an input", spec.name) for spec in header.inputs]
    names += [("the name of a requested output", output.name) for output in header.outputs]
    for what, name in names:
        if (mistake := mistake_in(name)) is not None:
            raise InvalidArgument(f"{what} {mistake}")
    if isinstance(header.sequence_id, str) and len(header.sequence_id.encode()) > MAX_CORRELATION_ID:
        raise Unsupported("string correlation ID cannot be longer than 128 characters")
    if (mistake := mistake_in_parameters(header.parameters, INT64)) is not None:
        raise InvalidArgument(f"Unsupported value type on parameters\n{mistake}")


def _received(response: CoreResponse) -> InferenceResponse:
    if response.error is not None:
        return InferenceResponse(error=TritonError(response.error.message, ErrorCode[response.error.code]))
    if response.header is None:
        return InferenceResponse([])
    received = InferenceResponse(list(map(ReceivedTensor, response.header.outputs, response.data)))
    received._parameters = response.header.parameters
    return received
