"""What the messages of ``ModelStreamInfer`` lead to, and how their responses are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from nerite.core.errors import NeriteError
from nerite.core.internal_errors import report
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer
from nerite.core.text import mistake_in
from nerite.core.trace_context import TraceContext
from nerite.transports import refusals
from nerite.transports.grpc import infer_response, infer_wire
from nerite.transports.grpc.infer_request import Read
from nerite.transports.grpc.message import Opened
from nerite.transports.grpc.stream import StreamCall
from nerite.wire import fields
from nerite.wire.grpc_service import ModelInferResponse, ModelStreamInferResponse

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_now = time.monotonic_ns
_PREFIX = 5


def _marker(final: bool) -> bytes:
    message = ModelInferResponse()
    message.parameters["triton_final_response"].bool_param = final
    return message.SerializeToString()


_FINAL: Final = {final: _marker(final) for final in (False, True)}
"""The response parameter that every response on a stream has, serialized."""


class Messages(Protocol):
    """How messages of a call are packed, and what they say."""

    head: bytes
    max_message: int

    def too_large(self, size: int) -> NeriteError:
        """Count a message that is too large, and return its refusal."""

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return memory for a message of ``size`` bytes that begins with ``beginning``."""

    def read(self, framed: memoryview) -> Read | None:
        """Return what a message says; None if that is to be read aside. Raises ``NeriteError``."""

    def read_aside(self, framed: memoryview, then: Callable[[Opened], None]) -> None:
        """Call ``then`` with what a message says, when that was read in a thread."""

    def beginning(self, framed: memoryview) -> memoryview:
        """Return a message, of which something is wrong, as far as it is to be had at once."""

    def packed(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return a message with its length, compressed if the client wants it."""


class StreamInference:
    """The target of a stream."""

    def __init__(
        self,
        server: InferenceServer,
        messages: Messages,
        errors_end_it: bool,
        outer_span: TraceContext | None,
    ) -> None:
        self.head = messages.head
        self.errors_end_it = errors_end_it
        self.outer_span = outer_span
        self.max_message = messages.max_message
        self._server = server
        self._messages = messages

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return memory of the model's for a large request."""
        return self._messages.receive_buffer(beginning, size)

    def too_large(self, size: int) -> NeriteError:
        """Count a message that is too large, and return its refusal."""
        return self._messages.too_large(size)

    def infer(self, call: StreamCall, framed: memoryview) -> bool:
        """Begin an inference, or tell the client why there is none; False if that takes a while."""
        try:
            said = self._messages.read(framed)
        except NeriteError as error:
            self._refuse(call, self._messages.beginning(framed), error)
            return True
        if said is None:
            self._messages.read_aside(framed, partial(self._go_on, call))
            return False
        self._begin(call, said)
        return True

    def _go_on(self, call: StreamCall, opened: Opened) -> None:
        """Begin an inference whose message was read in a thread, if it is still wanted."""
        if not call.go_on(opened.share):
            return
        try:
            if isinstance(opened.said, NeriteError):
                self._refuse(call, opened.message, opened.said)
            else:
                self._begin(call, opened.said)
            call.proceed()
        except Exception as error:
            call.abandon(report("grpc", error, "in a call"))

    def _begin(self, call: StreamCall, said: Read) -> None:
        header, request_id, data = said
        try:
            request = self._server.request(header, data, call, _now(), request_id)
            version = self._server.version_of(request)
        except NeriteError as error:
            call.refuse(request_id, error)
            return
        call.begin(request, version.decoupled)
        version.submit(request)

    def _refuse(self, call: StreamCall, message: memoryview, error: NeriteError) -> None:
        call.refuse(infer_wire.id_of(message), error)

    def write(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> Sequence[Buffer]:
        """Return a response as a message; nothing for an empty one that the client did not ask for."""
        if response.error is not None:
            return self._failed(request, response.error, final)
        if response.empty:
            version = self._server.went_to(request)
            if not (request.header.empty_final and version.decoupled):
                return ()
            response = InferenceResponse(ResponseHeader(version.name, "", ()))
        try:
            parts = infer_response.write(request, response, self._server.signature_of)
        except NeriteError as error:
            return self._failed(request, error, final)
        except Exception as error:
            failure = report("grpc", error, f"in an answer of '{request.header.model_name}'", request.id)
            return self._failed(request, failure, final)
        size = len(_FINAL[final]) + sum(map(len, parts)) - _PREFIX
        before = b"\x12" + fields.varint(size) + _FINAL[final]
        framed = b"\0" + (len(before) + size - len(_FINAL[final])).to_bytes(4) + before + parts[0][_PREFIX:]
        return self._messages.packed([framed, *parts[1:]])

    def write_refusal(self, request_id: str, error: NeriteError) -> Sequence[Buffer]:
        """Return the message that says why there is no inference."""
        refusals.note(request_id, error)
        message = ModelStreamInferResponse(error_message=error.message)
        if mistake_in(request_id) is None:
            message.infer_response.id = request_id
        return self._framed(message)

    def _failed(self, request: InferenceRequest, error: NeriteError, final: bool) -> Sequence[Buffer]:
        refusals.note(request.id, error)
        message = ModelStreamInferResponse(error_message=error.message)
        message.infer_response.model_name = request.header.model_name
        message.infer_response.id = request.id
        message.infer_response.parameters["triton_final_response"].bool_param = final
        return self._framed(message)

    def _framed(self, message: ModelStreamInferResponse) -> Sequence[Buffer]:
        raw = message.SerializeToString()
        return self._messages.packed([b"\0" + len(raw).to_bytes(4) + raw])
