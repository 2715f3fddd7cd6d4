"""Requests that a model receives, and requests that it sends to other models (BLS) with their responses."""

from __future__ import annotations

import asyncio
import json
from asyncio import Future
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol, SupportsIndex, overload

from nerite.core import headers, model_calls
from nerite.core.byte_budget import MODEL_CALLS, Memo
from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.core.request import MAX_CORRELATION_ID, RequestedOutput, RequestHeader
from nerite.core.request import InferenceRequest as CoreRequest
from nerite.core.response import InferenceResponse as CoreResponse
from nerite.core.response import Parameter
from nerite.core.tensor import TensorSpec
from nerite.core.text import MAX_NAME, text_error
from triton_python_backend_utils import arguments
from triton_python_backend_utils.arguments import INT64, UINT32, UINT64, Mismatch, Text
from triton_python_backend_utils.errors import (
    ErrorCode,
    Parameters,
    TritonError,
    TritonModelException,
    checked_parameters,
    incompatible,
    incompatible_call,
    mistake_in_parameters,
)
from triton_python_backend_utils.request_options import (
    TRITONSERVER_MEMORY_CPU,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
)
from triton_python_backend_utils.response import InferenceResponse, InferenceResponseSender
from triton_python_backend_utils.tensor import ReceivedTensor, Tensor, wire_form

# Calls to other models.
#
# Request headers are interned: requests with the same names, types and shapes have the same header object, which is
# sent to the server only once.

_START: Final = 1
_END: Final = 2
_headers: Memo[tuple[Any, ...], RequestHeader] = Memo()


class ResponseIterator:
    """Responses of another model to one request, in the order in which it sends them; supports ``async for``.

    Backpressure: the called model waits while more than a few responses are unread. Dropping the iterator before its
    end cancels the request.
    """

    __slots__ = ("_call", "_over")

    def __init__(self, call: model_calls.BlsCall) -> None:
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
        await _next_arrived(self._call)
        return next(self)

    def cancel(self) -> None:
        """Cancel the request if it has not ended.

        The iteration continues with what the called model still sends, usually a response with the error ``CANCELLED``.
        Raises ``TritonModelException`` in a process forked by the model.
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
    """Send a request to another model and wait for its response. Raises ``TritonModelException``."""
    call = _start(request, decoupled)
    return ResponseIterator(call) if decoupled else _only(call)


def ask_async(
    request: InferenceRequest, *, decoupled: bool
) -> asyncio.Future[InferenceResponse] | asyncio.Future[ResponseIterator]:
    """Send a request to another model now; return a future for its response, or for the iterator once one has arrived.

    Cancelling the future cancels the request. Raises ``TritonModelException``, and ``RuntimeError`` outside of a
    coroutine.
    """
    loop = asyncio.get_running_loop()
    call = _start(request, decoupled)
    future: asyncio.Future[Any] = loop.create_future()

    def arrived() -> None:
        if not future.done():
            future.set_result(ResponseIterator(call) if decoupled else _only(call))

    def ended(future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            call.give_up()

    future.add_done_callback(ended)
    call.when_next(loop, arrived)
    return future


async def _next_arrived(call: model_calls.BlsCall) -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    call.when_next(loop, lambda: None if future.done() else future.set_result(None))
    await future


class _RejectedCall:
    """A call that is not sent; its only response is the reason. Like Triton, it responds rather than raises."""

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


def _start(request: InferenceRequest, decoupled: bool) -> model_calls.BlsCall:
    inputs = request.inputs()
    name = request.request_id()
    try:
        header = _header(request, inputs, decoupled)
        if len(name) > MAX_NAME:
            raise InvalidArgument(f"request_id {text_error(name)}")
    except NeriteError as error:
        return _RejectedCall(error.prefixed(f"Model {request.target()[0]} - Error when running inference: "))
    data = [wire_form(tensor) for tensor in inputs]
    try:
        return model_calls.current.call(header, data, name, request.trace().request, decoupled=decoupled)
    except NeriteError as error:
        raise TritonModelException(error.message) from None


def _only(call: model_calls.BlsCall) -> InferenceResponse:
    """Return the single response of a model that is not decoupled; its final flag may arrive separately."""
    response, final = call.next()
    while not final:
        _, final = call.next()
    return _received(response)


def _header(request: InferenceRequest, inputs: list[Tensor], decoupled: bool) -> RequestHeader:
    model, version = request.target()
    outputs = frozenset(request.requested_output_names())
    correlation_id, flags, timeout = request.correlation_id(), request.flags(), request.timeout()
    device = request.preferred_device()
    form: list[Any] = [model, version, decoupled, outputs, correlation_id, flags, timeout, device]
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
            preferred_device=device,
        )
        _check(header)
        MODEL_CALLS.put(_headers, key, header, headers.request_header_bytes(header))
    return header


def _check(header: RequestHeader) -> None:
    """Raise ``NeriteError`` for a header that cannot be sent, or that the server would reject from clients."""
    names = [("model_name", header.model_name)]
    names += [("the name of an input", spec.name) for spec in header.inputs]
    names += [("the name of a requested output", output.name) for output in header.outputs]
    for what, name in names:
        if (mistake := text_error(name)) is not None:
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


TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

_DEFAULT_MEMORY = PreferredMemory(TRITONSERVER_MEMORY_CPU)
_NO_TRACE = InferenceTrace()


class InferenceRequest:
    """Inference request. Created by models that call other models, and by tests.

    Arguments may be of any type that Triton's binding converts: ``bytes`` for names, numpy integers for integers.
    Raises ``TypeError`` for other types, ``TritonModelException`` for invalid values.
    """

    __slots__ = (
        "_correlation_id",
        "_flags",
        "_inputs",
        "_model_name",
        "_model_version",
        "_parameters",
        "_preferred_memory",
        "_request_id",
        "_requested",
        "_timeout",
        "_trace",
    )

    def __init__(
        self,
        request_id: Text = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[Text] | None = None,
        model_name: Text | None = None,
        model_version: SupportsIndex = -1,
        flags: SupportsIndex = 0,
        timeout: SupportsIndex = 0,
        preferred_memory: PreferredMemory = _DEFAULT_MEMORY,
        trace: InferenceTrace = _NO_TRACE,
        parameters: Parameters | None = None,
    ) -> None:
        try:
            self._request_id = arguments.text("request_id", request_id)
            self._inputs: list[Tensor] | None = list(arguments.sequence(inputs))
            for tensor in self._inputs:
                if tensor is not None and not isinstance(tensor, Tensor):
                    raise Mismatch
            self._requested = set(arguments.texts("A name of requested_output_names", requested_output_names))
            self._model_name = arguments.text("model_name", model_name)
            self._model_version = arguments.integer("model_version", model_version, INT64)
            self._flags: int | None = arguments.integer("flags", flags, UINT32)
            self._timeout = arguments.integer("timeout", timeout, UINT64)
            self._preferred_memory = arguments.instance(preferred_memory, PreferredMemory)
            self._trace = arguments.instance(trace, InferenceTrace)
            if correlation_id is None:
                raise Mismatch
        except Mismatch as mismatch:
            raise _incompatible(
                mismatch,
                request_id=request_id,
                correlation_id=correlation_id,
                inputs=inputs,
                requested_output_names=requested_output_names,
                model_name=model_name,
                model_version=model_version,
                flags=flags,
                timeout=timeout,
                preferred_memory=preferred_memory,
                trace=trace,
                parameters=parameters,
            ) from None
        self._correlation_id = _sequence_id(correlation_id)
        of = f"request with id '{self._request_id}' and model name '{self._model_name}'"
        if None in self._inputs:
            raise TritonModelException(f"Input tensor for {of} should not be empty.")
        if "" in self._requested:
            raise TritonModelException(f"Requested output name for {of} should not be empty.")
        self._parameters = checked_parameters(parameters)

    def inputs(self) -> list[Tensor]:
        """Return the input tensors."""
        assert self._inputs is not None
        return self._inputs

    def request_id(self) -> str:
        """Return the id given by the caller, or an empty string."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the id of the sequence, 0 for a request that belongs to none."""
        return self._correlation_id

    def flags(self) -> int:
        """Return the sequence flags."""
        return self._flags or 0

    def set_flags(self, flags: SupportsIndex) -> None:
        """Set the sequence flags."""
        self._flags = self._unsigned("set_flags", flags)

    def timeout(self) -> int:
        """Return the timeout in microseconds, 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """Return the custom parameters as a JSON object."""
        return json.dumps(self._parameters)

    def trace(self) -> InferenceTrace:
        """Return the trace of this request."""
        return self._trace

    def requested_output_names(self) -> set[str]:
        """Return the names of the requested outputs."""
        return set(self._requested)

    def is_cancelled(self) -> bool:
        """Return whether the request has been cancelled, so that the model may stop working on it."""
        return False

    def set_release_flags(self, flags: SupportsIndex) -> None:
        """Set whether the request is rescheduled when ``execute`` returns; no effect on requests to other models."""
        self._unsigned("set_release_flags", flags)

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the sender for several or late responses. Only requests passed to ``execute`` have one."""
        raise TritonModelException("get_response_sender() is only available for requests passed to execute().")

    @overload
    def exec(self, decoupled: Literal[False] = False) -> InferenceResponse: ...

    @overload
    def exec(self, decoupled: Literal[True]) -> ResponseIterator: ...

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Send the request to the model that it names and wait for the response, which may be an error.

        With ``decoupled`` return an iterator over any number of responses, as decoupled models require. Raises
        ``TritonModelException`` outside of ``execute``.
        """
        return ask(self, decoupled=self._flag("exec", decoupled))

    @overload
    def async_exec(self, decoupled: Literal[False] = False) -> Future[InferenceResponse]: ...

    @overload
    def async_exec(self, decoupled: Literal[True]) -> Future[ResponseIterator]: ...

    def async_exec(self, decoupled: bool = False) -> Future[InferenceResponse] | Future[ResponseIterator]:
        """Send the request now and return an awaitable with the result of ``exec``.

        Raises as ``exec`` does, and ``RuntimeError`` outside of a coroutine.
        """
        return ask_async(self, decoupled=self._flag("async_exec", decoupled))

    def target(self) -> tuple[str, int]:
        """Return model and version, -1 for the latest. For the server; not part of Triton's interface."""
        return self._model_name, self._model_version

    def custom(self) -> dict[str, Parameter]:
        """Return the custom parameters. For the server; not part of Triton's interface."""
        return self._parameters

    def preferred_device(self) -> int:
        """Return the GPU that outputs are wanted on, -1 for the host. For the server, and not for models."""
        memory = self._preferred_memory
        return max(memory.device_id, 0) if memory.memory_type is MemoryType.TRITONSERVER_MEMORY_GPU else -1

    def _flag(self, method: str, decoupled: object) -> bool:
        try:
            return arguments.flag(decoupled)
        except Mismatch as mismatch:
            signature = "(self: c_python_backend_utils.InferenceRequest, decoupled: bool = False) -> object"
            raise incompatible_call(method, signature, mismatch, self, decoupled=decoupled) from None

    def _unsigned(self, method: str, flags: object) -> int:
        try:
            return arguments.integer("flags", flags, UINT32)
        except Mismatch as mismatch:
            signature = "(self: c_python_backend_utils.InferenceRequest, arg0: int) -> None"
            raise incompatible_call(method, signature, mismatch, self, flags) from None


class Reshaping(Protocol):
    """The ``reshape`` of a configuration."""

    def inputs(self, header: RequestHeader) -> Sequence[TensorSpec]:
        """Return the inputs of a request in the model's shapes."""


class Answering(Protocol):
    """Properties of a model, and the conversion of its responses."""

    declared: frozenset[str]
    """The names of all its outputs."""
    decoupled: bool
    again: set[Any]
    """The requests that the model reschedules."""

    @property
    def reshape(self) -> Reshaping | None:
        """The conversion of input shapes, or None."""

    def reply(self, request: CoreRequest, returned: InferenceResponse) -> CoreResponse:
        """Convert a response of the model to the server's."""


class ServedRequest(InferenceRequest):
    """Request that ``execute`` receives. All fields are looked up lazily in the server's request."""

    __slots__ = ("_answering", "_sender", "core")

    def __init__(self, core: CoreRequest, answering: Answering) -> None:
        self.core = core
        """The server's request. Not part of Triton's interface."""
        self._answering = answering
        self._inputs = None
        self._flags = None
        self._sender: InferenceResponseSender | None = None

    def inputs(self) -> list[Tensor]:
        """Return the input tensors, in the order in which the caller sent them."""
        inputs = self._inputs
        if inputs is None:
            core = self.core
            reshape = self._answering.reshape
            specs = core.header.inputs if reshape is None else reshape.inputs(core.header)
            inputs = self._inputs = list(map(ReceivedTensor, specs, core.data))
        return inputs

    def request_id(self) -> str:
        """Return the id given by the caller, or an empty string."""
        return self.core.id

    def correlation_id(self) -> int | str:
        """Return the id of the sequence, 0 for a request that belongs to none."""
        return self.core.header.sequence_id

    def flags(self) -> int:
        """Return the sequence flags."""
        if self._flags is not None:
            return self._flags
        header = self.core.header
        return (
            header.sequence_start * TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
            | header.sequence_end * TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
        )

    def tenant(self) -> str:
        """Return whose request it is; empty if no policy is in force. Not part of Triton's interface."""
        caller = self.core.header.caller
        return "" if caller is None else caller.tenant

    def target(self) -> tuple[str, int]:
        """Return the model that received the request, and the version that the caller named."""
        header = self.core.header
        return header.model_name, int(header.model_version or -1)

    def custom(self) -> dict[str, Parameter]:
        """Return the custom parameters."""
        return self.core.header.parameters

    def preferred_device(self) -> int:
        """Return -1: outputs of a request that is passed on are wanted on the host."""
        return -1

    def timeout(self) -> int:
        """Return the timeout in microseconds, 0 for none."""
        return self.core.header.timeout_us

    def parameters(self) -> str:
        """Return the custom parameters as a JSON object."""
        return json.dumps(self.core.header.parameters, separators=(",", ":"))

    def trace(self) -> InferenceTrace:
        """Return the trace of this request."""
        return InferenceTrace(None, self.core)

    def requested_output_names(self) -> set[str]:
        """Return the names of the requested outputs; all outputs of the model if the caller named none."""
        return set(self.core.header.wanted or self._answering.declared)

    def is_cancelled(self) -> bool:
        """Return whether the request has been cancelled, so that the model may stop working on it.

        Raises ``TritonModelException`` in a process forked by the model.
        """
        try:
            return self.core.is_cancelled()
        except NeriteError as error:
            raise TritonModelException(error.message) from None

    def set_release_flags(self, flags: SupportsIndex) -> None:
        """Set whether the request is released or rescheduled when ``execute`` returns.

        With ``TRITONSERVER_REQUEST_RELEASE_RESCHEDULE`` the model gets it again, if its sequences are iterative.
        """
        if self._unsigned("set_release_flags", flags) & TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            self._answering.again.add(self)
        else:
            self._answering.again.discard(self)

    @property
    def has_sender(self) -> bool:
        """True if the model has requested the sender. For the server; not part of Triton's interface."""
        return self._sender is not None

    def get_response_sender(self) -> InferenceResponseSender:
        """Return the sender for several or late responses, always the same object."""
        if self._sender is None:
            if not self.core.streams:
                raise TritonModelException(
                    "get_response_sender() requires a model in a worker process: remove EXECUTION_MODE in_process from "
                    "its configuration."
                )
            answering = self._answering
            self._sender = InferenceResponseSender(self.core, answering.reply, single=not answering.decoupled)
        return self._sender


def _sequence_id(value: object) -> int | str:
    """Validate a correlation id. Triton takes it as a Python object, so other types are not converted."""
    what = "Correlation ID must be integer or string"
    if not isinstance(value, int | str):
        raise TritonModelException(what)
    try:
        if isinstance(value, int):
            return arguments.integer("The ID", int(value), UINT64)
        return arguments.text("The ID", value)
    except Mismatch as mismatch:
        raise TritonModelException(f"{what}. {mismatch}") from None


_DEFAULTS: dict[str, object] = {
    "request_id": "",
    "correlation_id": 0,
    "model_version": -1,
    "flags": 0,
    "timeout": 0,
    "preferred_memory": _DEFAULT_MEMORY,
    "trace": _NO_TRACE,
}


def _incompatible(mismatch: Mismatch, **given: object) -> TypeError:
    return incompatible(
        "InferenceRequest(request_id: str = '', correlation_id: object = 0, "
        "inputs: List[triton::backend::python::PbTensor], requested_output_names: List[str], model_name: str, "
        "model_version: int = -1, flags: int = 0, timeout: int = 0, "
        "preferred_memory: c_python_backend_utils.PreferredMemory = <default>, "
        "trace: c_python_backend_utils.InferenceTrace = <default>, parameters: object = None)",
        mismatch,
        **{name: value for name, value in given.items() if value is not _DEFAULTS.get(name)},
    )
