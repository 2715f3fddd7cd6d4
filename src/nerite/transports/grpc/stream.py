"""``ModelStreamInfer``: many requests on one call, and their responses as they become available.

Responses are ordered as in Triton: the single response of each request to a model that is not decoupled leaves in
request order; responses of decoupled models leave at once. If a client reads slowly, its stream is blocked and the
models are paused; if it sends without limit, reading stops at a maximum number of requests in progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final, Protocol

from nerite.core.errors import NeriteError, NotLoaded
from nerite.core.failures import report
from nerite.core.request import CancelReason, InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.text import name_error
from nerite.scheduling.request_queue import ResponseOrder
from nerite.transports import access_log
from nerite.transports.grpc import messages, wire
from nerite.transports.grpc.call import hold_message
from nerite.transports.limits import COUNTED, ByteReservation, TransportLimits
from nerite.wire import fields
from nerite.wire.grpc_service import ModelInferResponse, ModelStreamInferResponse

if TYPE_CHECKING:
    from nerite.core.execution_observer import TraceContext
    from nerite.core.tensor import Buffer
    from nerite.http2 import Http2Connection
    from nerite.inference_entry import TransportEntry
    from nerite.transports.grpc.infer_request import Read
    from nerite.transports.grpc.messages import OpenedMessage

_PREFIX_SIZE = 5
_STREAM_BYTES = 2048
"""Memory of an open stream without any message, in bytes."""
_HIGH_WATER = 1024 * 1024
"""Bytes of buffered responses above which the models of a stream are paused."""
_MAX_REQUESTS = 1024
"""Requests in progress on one stream at which reading is paused."""


class StreamConnection(Protocol):
    """Connection of a stream, as the stream sees it."""

    bounds: TransportLimits
    http2: Http2Connection
    calls: dict[int, Any]
    """Calls in progress by stream id."""
    congested: bool
    """The client has not read what was written."""
    streamed: int
    """Number of requests on streams."""

    @property
    def full(self) -> bool:
        """Whether the write buffer is at its limit."""

    def answered(self) -> None:
        """Flush a reply: at once if no other call is pending, otherwise batched with the others of this loop turn."""


class StreamTarget(Protocol):
    """Handles the messages of a stream."""

    head: bytes
    errors_end_it: bool
    """The client requested that the first error of a model ends the stream."""
    outer_span: TraceContext | None
    """Parent span named by the metadata of the stream, if any."""
    max_message: int
    """Maximum size of a message in bytes."""

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return the buffer for a message of ``size`` bytes that starts with ``beginning``."""

    def infer(self, call: StreamCall, framed: memoryview) -> bool:
        """Begin the inference of a message through ``call.begin``, or reject it through ``call.refuse``.

        Return False if the message is parsed in a thread, or waits for its model; ``call.go_on`` is called after the
        thread, and ``call.proceed`` when done.
        """

    def too_large(self, size: int) -> NeriteError:
        """Count a message of more than ``max_message`` bytes, and return the error."""

    def load_trailer(self, model: str) -> bytes:
        """Return the encoded load report of the engines of a model; empty unless the client asked for it."""

    def write(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> Sequence[Buffer]:
        """Return a response as a framed message; empty if nothing is to be sent."""

    def write_refusal(self, request_id: str, error: NeriteError) -> Sequence[Buffer]:
        """Return the framed message that reports why a request was rejected."""


class StreamCall:
    """One call of ``ModelStreamInfer``."""

    protocol = "GRPC"
    waits = True
    """Always true: an open stream counts towards the bytes in flight."""

    __slots__ = (
        "_blocked",
        "_buffered_end",
        "_buffered_input",
        "_filled",
        "_half_closed",
        "_headers_sent",
        "_message",
        "_message_share",
        "_model",
        "_order",
        "_prefix",
        "_reading",
        "_request_shares",
        "_requests",
        "_stopping",
        "connection",
        "deadline",
        "on_end",
        "share",
        "stream_id",
        "target",
    )

    def __init__(self, connection: StreamConnection, stream_id: int, target: StreamTarget) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.target = target
        self.deadline: asyncio.TimerHandle | None = None
        self.share = ByteReservation(connection.bounds.bytes)
        """Reservation of bytes in flight for the stream itself."""
        self._prefix = b""
        self._message: memoryview | None = None
        self._filled = 0
        self._buffered_input: bytearray | None = None
        """Input that arrives while a message is parsed in a thread; None at other times."""
        self._buffered_end = False
        self._message_share: ByteReservation | None = None
        """Reservation of the message that is arriving; None while it is small and arrived in one piece."""
        self._request_shares: dict[InferenceRequest, ByteReservation] = {}
        """Reservations of requests in progress."""
        self._model = ""
        """Model of the last request."""
        self._half_closed = False
        self._headers_sent = False
        """The reply headers were sent."""
        self._blocked = False
        self._reading = True
        self._stopping = False
        """The server is shutting down: no more requests are accepted."""
        self._requests: dict[InferenceRequest, int | None] = {}
        """Requests in progress with their position in the response order; None for decoupled models."""
        self._order: ResponseOrder[Sequence[Buffer]] = ResponseOrder()
        self.on_end: Callable[[], None] | None = None

    def resumes(self) -> bool:
        """Return whether the stream has not ended."""
        return self._alive

    @property
    def outer_span(self) -> TraceContext | None:
        """Parent span of the stream."""
        return self.target.outer_span

    # Input from the client

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Handle a piece of the body: consecutive messages, split anywhere. Ignored during shutdown."""
        if self._stopping:
            return  # the final status reports the shutdown
        rest = memoryview(data)
        while len(rest) and self._alive and self._buffered_input is None:
            rest = self._take(rest)
        if self._buffered_input is not None:
            self._buffered_end = end
            if not self.share.take(len(rest)):
                self._refuse(self.connection.bounds.bytes.refusal(len(rest)))
                return
            self._buffered_input += rest
            return
        if end and self._alive:
            if self._prefix or self._message is not None:
                self._finish(messages.INTERNAL, "the last message of the stream is incomplete")
                return
            self._half_closed = True
            self._finish_if_done()

    def _take(self, rest: memoryview) -> memoryview:
        """Consume bytes of one message; return the remaining bytes."""
        message = self._message
        if message is None:
            missing = _PREFIX_SIZE - len(self._prefix)
            self._prefix += bytes(rest[:missing])
            rest = rest[missing:]
            if len(self._prefix) < _PREFIX_SIZE:
                return rest
            size = int.from_bytes(self._prefix[1:])
            if size > self.target.max_message:
                self._refuse(self.target.too_large(size))
                return rest
            bounds = self.connection.bounds.bytes
            if (size >= COUNTED or size > len(rest)) and not bounds.fits(size):
                self._refuse(bounds.refusal(size))
                return rest
            message = self._message = self.target.receive_buffer(rest, size + _PREFIX_SIZE)
            message[:_PREFIX_SIZE] = self._prefix
            self._prefix = b""
            self._filled = _PREFIX_SIZE
        stop = min(self._filled + len(rest), len(message))
        # A small message that arrived in one piece needs no reservation.
        if (stop < len(message) or stop >= COUNTED or self._message_share is not None) and not self._reserve(
            stop, len(message)
        ):
            return rest
        taken = stop - self._filled
        message[self._filled : stop] = rest[:taken]
        self._filled = stop
        if self._filled == len(message):
            self._message = None
            if not self.target.infer(self, message):
                self._buffered_input = bytearray()
                self.connection.http2.pause(self.stream_id)
            elif len(self._requests) >= _MAX_REQUESTS and self._reading:
                self._reading = False
                self.connection.http2.pause(self.stream_id)
        return rest[taken:]

    def _reserve(self, arrived: int, whole: int) -> bool:
        """Reserve the bytes of a message that have arrived, or end the stream if they exceed the limit."""
        bounds = self.connection.bounds.bytes
        if self._message_share is None:
            self._message_share = ByteReservation(bounds)
        if self._message_share.cover(arrived, whole):
            return True
        self._refuse(bounds.refusal(arrived))
        return False

    def expect(self) -> None:
        """Reserve memory for the stream itself."""
        if not self.share.take(_STREAM_BYTES):
            self._refuse(self.connection.bounds.bytes.refusal(_STREAM_BYTES))

    @property
    def arriving(self) -> int | None:
        """Bytes received of an incomplete message; None if no message is arriving or reading is paused."""
        if self._buffered_input is not None or not self._reading:
            return None
        if self._message is not None:
            return self._filled
        return len(self._prefix) or None

    def stall(self, seconds: float) -> None:
        """End the stream because a message made no progress for ``seconds``."""
        self._finish(messages.DEADLINE_EXCEEDED, messages.stalled_text(seconds))

    def go_on(self, share: ByteReservation) -> bool:
        """Take over the reservation of background work; if the stream has ended, release it and return False.

        It belongs to the message that was last passed to ``infer``.
        """
        if not self._alive:
            share.give_back()
            return False
        if self._message_share is None:
            self._message_share = share
        else:
            self._message_share.absorb(share)
        return True

    def proceed(self) -> None:
        """Handle the input that arrived while a message was parsed in a thread."""
        pending, self._buffered_input = self._buffered_input, None
        if pending is None:
            return
        self.share.give_back(len(pending))
        if len(self._requests) >= _MAX_REQUESTS:
            self._reading = False
        if self._reading:
            self.connection.http2.resume(self.stream_id)
        self.receive(memoryview(pending), self._buffered_end)
        self.connection.answered()

    def begin(self, request: InferenceRequest, decoupled: bool) -> None:
        """Record a request that is in progress."""
        self.connection.streamed += 1
        self._model = request.header.model_name
        self._requests[request] = None if decoupled else self._order.begin()
        if self._message_share is not None:
            self._request_shares[request] = self._message_share
            self._message_share = None

    def refuse(self, request_id: str, error: NeriteError) -> None:
        """Report why a message was rejected. The stream goes on."""
        if self._message_share is not None:
            self._message_share.give_back()
            self._message_share = None
        for parts in self._order.finish(self._order.begin(), self.target.write_refusal(request_id, error)):
            self._send(parts)

    # Responses of models

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Handle a response; drop it if the client is gone."""
        if request not in self._requests:
            return
        position = self._requests[request]
        # A model that is not decoupled has exactly one response; anything further that it sends is dropped.
        over = final or position is not None
        if over:
            del self._requests[request]
            if self._request_shares and (share := self._request_shares.pop(request, None)) is not None:
                share.give_back()
        if response.error is not None and self.target.errors_end_it:
            error = response.error
            self._finish(error.grpc_status, error.message, error.retry_after)
            return
        blocked = self._blocked
        parts = self.target.write(request, response, final)
        if position is None:
            self._send(parts)
        else:
            for released in self._order.finish(position, parts):
                self._send(released)
        if over:
            if not self._reading and len(self._requests) < _MAX_REQUESTS // 2:
                self._reading = True
                if self._buffered_input is None:
                    self.connection.http2.resume(self.stream_id)
                    self.connection.answered()
            self._finish_if_done()
        elif blocked:
            request.pause(True)

    def _send(self, parts: Sequence[Buffer]) -> None:
        if not parts or not self._alive:
            return
        http2 = self.connection.http2
        if (self.connection.congested or http2.queued) and self.connection.full:
            self._finish(messages.RESOURCE_EXHAUSTED, messages.UNREAD_TEXT)
            return
        if not self._headers_sent:
            self._headers_sent = True
            http2.send_headers(self.stream_id, self.target.head)
        http2.send_data(self.stream_id, parts)
        self.connection.answered()
        if http2.buffered(self.stream_id) > _HIGH_WATER:
            self.block(True)

    # Flow control

    def block(self, blocked: bool) -> None:
        """Pause or resume the models, depending on whether the client reads."""
        if not blocked and self.connection.http2.buffered(self.stream_id):
            return
        if blocked != self._blocked:
            self._blocked = blocked
            for request in self._requests:
                request.pause(blocked)

    def writable(self) -> None:
        """Resume: the client has read what was buffered."""
        self.block(self.connection.congested)

    # End of the call

    @property
    def _alive(self) -> bool:
        return self.connection.calls.get(self.stream_id) is self

    def _finish_if_done(self) -> None:
        if self._requests or not self._alive:
            return
        if self._half_closed:
            self._finish(messages.OK, "")
        elif self._stopping:
            refusal = "GRPC server is shutting down and has stopped accepting new requests."
            self._finish(messages.UNAVAILABLE, refusal, retry_after=1)

    def _refuse(self, error: NeriteError) -> None:
        """End the stream because of an error in the client's input."""
        self._finish(error.grpc_status, error.message, error.retry_after)

    def _finish(self, code: int, message: str, retry_after: int = 0) -> None:
        """End the call, and cancel its requests."""
        requests = self._end()
        http2 = self.connection.http2
        load = self.target.load_trailer(self._model)
        if self._headers_sent:
            http2.send_trailers(self.stream_id, messages.trailers(code, message, retry_after) + load)
        else:
            block = messages.trailers_only(code, message, retry_after) + load
            http2.send_headers(self.stream_id, block, end_stream=True)
        self.connection.answered()
        why = CancelReason.TOO_LATE if code == messages.DEADLINE_EXCEEDED else CancelReason.CANCELLED
        for request in requests:
            request.cancel(why)

    def _end(self) -> list[InferenceRequest]:
        """Discard the call; return its requests in progress."""
        requests = list(self._requests)
        self._requests.clear()
        if self.on_end is not None:
            self.on_end()
        self._message = self._buffered_input = None
        for share in (self.share, *self._request_shares.values()):
            share.give_back()
        self._request_shares.clear()
        if self._message_share is not None:
            self._message_share.give_back()
            self._message_share = None
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        self.connection.calls.pop(self.stream_id, None)
        return requests

    def cancel(self, why: CancelReason) -> None:
        """Discard the call and cancel its requests: the client no longer waits."""
        for request in self._end():
            request.cancel(why)

    def expire(self) -> None:
        """Reply with DEADLINE_EXCEEDED, and cancel the requests."""
        self.deadline = None
        self._finish(messages.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def abandon(self, error: NeriteError) -> None:
        """Reply with ``error``, and cancel the requests."""
        if self._alive:
            self._finish(error.grpc_status, error.message)

    def shut_down(self) -> None:
        """End the stream as soon as no request is in progress."""
        self._stopping = True
        self._finish_if_done()


# The target of a stream: starts inferences and serializes their responses.


def _marker(final: bool) -> bytes:
    message = ModelInferResponse()
    message.parameters["triton_final_response"].bool_param = final
    return message.SerializeToString()


_FINAL_MARKERS: Final = {final: _marker(final) for final in (False, True)}
"""Serialized response parameter that marks final and other responses on a stream."""


class StreamMessages(Protocol):
    """Parses and packs the messages of a call."""

    head: bytes
    max_message: int

    def too_large(self, size: int) -> NeriteError:
        """Count an oversized message, and return the error."""

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return the buffer for a message of ``size`` bytes that starts with ``beginning``."""

    def read(self, framed: memoryview) -> Read | None:
        """Return the parsed message; None if it has to be parsed in a thread. Raises ``NeriteError``."""

    def read_aside(self, framed: memoryview, then: Callable[[OpenedMessage], None]) -> None:
        """Parse a message in a thread, and call ``then`` with the result."""

    def beginning(self, framed: memoryview) -> memoryview:
        """Return as much of an invalid message as can be had without blocking."""

    def packed(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return a framed message, compressed if the client accepts that."""

    def load_trailer(self, model: str) -> bytes:
        """Return the encoded load report of the engines of a model; empty unless the client asked for it."""


class StreamInference:
    """Starts the inferences of a stream, and serializes their responses."""

    def __init__(
        self,
        server: TransportEntry,
        messages: StreamMessages,
        errors_end_it: bool,
        outer_span: TraceContext | None,
    ) -> None:
        self.head = messages.head
        self.errors_end_it = errors_end_it
        self.outer_span = outer_span
        self.max_message = messages.max_message
        self.load_trailer = messages.load_trailer
        self._server = server
        self._messages = messages

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return a buffer in the model's shared memory for a large request, if possible."""
        return self._messages.receive_buffer(beginning, size)

    def too_large(self, size: int) -> NeriteError:
        """Count an oversized message, and return the error."""
        return self._messages.too_large(size)

    def infer(self, call: StreamCall, framed: memoryview) -> bool:
        """Begin or reject an inference; return False if its message is parsed in a thread."""
        try:
            content = self._messages.read(framed)
        except NeriteError as error:
            self._refuse(call, self._messages.beginning(framed), error)
            return True
        if content is None:
            self._messages.read_aside(framed, partial(self._resume, call))
            return False
        return self._begin(call, content)

    def _resume(self, call: StreamCall, opened: OpenedMessage) -> None:
        """Begin an inference whose message was parsed in a thread, unless the stream has ended."""
        if not call.go_on(opened.share):
            return
        try:
            if isinstance(opened.content, NeriteError):
                self._refuse(call, opened.message, opened.content)
            elif not self._begin(call, opened.content):
                return
            call.proceed()
        except Exception as error:
            call.abandon(report("grpc", error, "in a call"))

    def _begin(self, call: StreamCall, content: Read) -> bool:
        header, request_id, data = content
        try:
            request = self._server.request(header, data, call, monotonic_ns(), request_id)
            version = self._server.version_of(request)
        except NotLoaded as absent:
            begin = partial(self._begin, call, content)
            return not hold_message(self._server.waits, call, absent.without_frames(), header, request_id, begin)
        except NeriteError as error:
            call.refuse(request_id, error)
            return True
        call.begin(request, version.decoupled)
        version.submit(request)
        return True

    def _refuse(self, call: StreamCall, message: memoryview, error: NeriteError) -> None:
        call.refuse(wire.id_of(message), error)

    def write(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> Sequence[Buffer]:
        """Return a response as a framed message; empty for an empty final response that the client did not request."""
        if response.error is not None:
            return self._failed(request, response.error, final)
        if response.empty:
            version = self._server.went_to(request)
            if not (request.header.empty_final and version.decoupled):
                return ()
            response = InferenceResponse(ResponseHeader(version.name, "", ()))
        try:
            parts = wire.write_infer_response(request, response, self._server.signature_of)
        except NeriteError as error:
            return self._failed(request, error, final)
        except Exception as error:
            failure = report("grpc", error, f"in an answer of '{request.header.model_name}'", request.id)
            return self._failed(request, failure, final)
        size = len(_FINAL_MARKERS[final]) + sum(map(len, parts)) - _PREFIX_SIZE
        before = b"\x12" + fields.varint(size) + _FINAL_MARKERS[final]
        framed = (
            b"\0" + (len(before) + size - len(_FINAL_MARKERS[final])).to_bytes(4) + before + parts[0][_PREFIX_SIZE:]
        )
        return self._messages.packed([framed, *parts[1:]])

    def write_refusal(self, request_id: str, error: NeriteError) -> Sequence[Buffer]:
        """Return the framed message that reports why a request was rejected."""
        access_log.log_refusal(request_id, error)
        message = ModelStreamInferResponse(error_message=error.message)
        if name_error(request_id) is None:
            message.infer_response.id = request_id
        return self._framed(message)

    def _failed(self, request: InferenceRequest, error: NeriteError, final: bool) -> Sequence[Buffer]:
        access_log.log_refusal(request.id, error)
        message = ModelStreamInferResponse(error_message=error.message)
        message.infer_response.model_name = request.header.model_name
        message.infer_response.model_version = request.header.model_version  # as it was asked for
        message.infer_response.id = request.id
        message.infer_response.parameters["triton_final_response"].bool_param = final
        return self._framed(message)

    def _framed(self, message: ModelStreamInferResponse) -> Sequence[Buffer]:
        raw = message.SerializeToString()
        return self._messages.packed([b"\0" + len(raw).to_bytes(4) + raw])
