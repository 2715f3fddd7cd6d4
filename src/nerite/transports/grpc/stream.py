"""``ModelStreamInfer``: many requests on one call, and their responses as they come.

Order is as Triton has it. The one response of each request to a model that is not decoupled leaves in the order of
those requests; responses of decoupled models leave at once. Where a client reads slowly the stream is blocked, and the
models are told to pause; where it asks without end, no more than so many requests are under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from nerite.core.errors import NeriteError
from nerite.core.failures import report
from nerite.core.request import CancelReason, InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer
from nerite.core.text import text_error
from nerite.core.trace_context import TraceContext
from nerite.http2 import Http2Connection
from nerite.scheduling.request_queue import ResponseOrder
from nerite.transports import access_log
from nerite.transports.grpc import messages, wire
from nerite.transports.grpc.infer_request import Read
from nerite.transports.grpc.messages import OpenedMessage
from nerite.transports.limits import COUNTED, ByteReservation, TransportLimits
from nerite.wire import fields
from nerite.wire.grpc_service import ModelInferResponse, ModelStreamInferResponse

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_PREFIX = 5
_OPEN_STREAM = 2048
"""Bytes that a stream takes in memory without any message."""
_HIGH_WATER = 1024 * 1024
"""Bytes of responses that may wait for the client before the models are told to pause."""
_MOST_REQUESTS = 1024
"""Requests under way on one stream beyond which no more are read."""


class StreamConnection(Protocol):
    """The connection of a stream, as the stream sees it."""

    bounds: TransportLimits
    http2: Http2Connection
    calls: dict[int, Any]
    """Those under way, by the stream that each is on."""
    congested: bool
    """The client has not taken what was written."""

    @property
    def full(self) -> bool:
        """Whether as much waits to be written as may wait."""

    def answered(self) -> None:
        """Write an answer: at once if no other is due, else with those that follow in this turn of the loop."""


class StreamTarget(Protocol):
    """What a stream's messages lead to."""

    head: bytes
    errors_end_it: bool
    """The client asked that the first error of a model ends the stream."""
    outer_span: TraceContext | None
    """The span that the stream was opened under, if its metadata name one."""
    max_message: int
    """Bytes of the largest message that is taken."""

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return where a message of ``size`` bytes, which begins with ``beginning``, is to be collected."""

    def infer(self, call: StreamCall, framed: memoryview) -> bool:
        """Begin the inference that a message asks for: ``call.begin``, or ``call.refuse``.

        False: that takes a while. ``call.go_on`` is called first, and ``call.proceed`` when it is done.
        """

    def too_large(self, size: int) -> NeriteError:
        """Count a message of more than ``max_message`` bytes, and return its refusal."""

    def write(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> Sequence[Buffer]:
        """Return a response as a message with its length in front; nothing for one that is not to be sent."""

    def write_refusal(self, request_id: str, error: NeriteError) -> Sequence[Buffer]:
        """Return the message that says why there is no inference."""


class StreamCall:
    """One call of ``ModelStreamInfer``."""

    protocol = "GRPC"
    waits = True
    """It counts as long as it is open."""

    __slots__ = (
        "_begun",
        "_blocked",
        "_filled",
        "_half_closed",
        "_later",
        "_later_ends",
        "_message",
        "_order",
        "_prefix",
        "_reading",
        "_requests",
        "_share",
        "_shares",
        "_stopping",
        "connection",
        "deadline",
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
        """What the stream itself has of the bytes in flight."""
        self._prefix = b""
        self._message: memoryview | None = None
        self._filled = 0
        self._later: bytearray | None = None
        """What comes while a message is read in a thread; None while none is."""
        self._later_ends = False
        self._share: ByteReservation | None = None
        """What the message that arrives has of the bytes in flight, unless it is small and came in one piece."""
        self._shares: dict[InferenceRequest, ByteReservation] = {}
        """The same of requests."""
        self._half_closed = False
        self._begun = False
        """The headers of the reply have left."""
        self._blocked = False
        self._reading = True
        self._stopping = False
        """No more requests are taken."""
        self._requests: dict[InferenceRequest, int | None] = {}
        """Those under way, with their place in the order, None for those that have none."""
        self._order: ResponseOrder[Sequence[Buffer]] = ResponseOrder()

    @property
    def outer_span(self) -> TraceContext | None:
        """The span that the stream was opened under."""
        return self.target.outer_span

    # What the client says

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Take a piece of the body: messages one after the other, cut anywhere. None while the server stops."""
        if self._stopping:
            return  # its status will say so
        rest = memoryview(data)
        while len(rest) and self._alive and self._later is None:
            rest = self._take(rest)
        if self._later is not None:
            self._later_ends = end
            if not self.share.take(len(rest)):
                self._refuse(self.connection.bounds.bytes.refusal(len(rest)))
                return
            self._later += rest
            return
        if end and self._alive:
            if self._prefix or self._message is not None:
                self._finish(messages.INTERNAL, "the last message of the stream is not complete")
                return
            self._half_closed = True
            self._finish_if_done()

    def _take(self, rest: memoryview) -> memoryview:
        """Take bytes of one message; return what follows them."""
        message = self._message
        if message is None:
            missing = _PREFIX - len(self._prefix)
            self._prefix += bytes(rest[:missing])
            rest = rest[missing:]
            if len(self._prefix) < _PREFIX:
                return rest
            size = int.from_bytes(self._prefix[1:])
            if size > self.target.max_message:
                self._refuse(self.target.too_large(size))
                return rest
            bounds = self.connection.bounds.bytes
            if (size >= COUNTED or size > len(rest)) and not bounds.fits(size):
                self._refuse(bounds.refusal(size))
                return rest
            message = self._message = self.target.receive_buffer(rest, size + _PREFIX)
            message[:_PREFIX] = self._prefix
            self._prefix = b""
            self._filled = _PREFIX
        stop = min(self._filled + len(rest), len(message))
        # What is small and came in one piece does not count.
        if (stop < len(message) or stop >= COUNTED or self._share is not None) and not self._counts(stop, len(message)):
            return rest
        taken = stop - self._filled
        message[self._filled : stop] = rest[:taken]
        self._filled = stop
        if self._filled == len(message):
            self._message = None
            if not self.target.infer(self, message):
                self._later = bytearray()
                self.connection.http2.pause(self.stream_id)
            elif len(self._requests) >= _MOST_REQUESTS and self._reading:
                self._reading = False
                self.connection.http2.pause(self.stream_id)
        return rest[taken:]

    def _counts(self, arrived: int, whole: int) -> bool:
        """Count the bytes that have arrived of a message, or end the stream if there is no room for them."""
        bounds = self.connection.bounds.bytes
        if self._share is None:
            self._share = ByteReservation(bounds)
        if self._share.cover(arrived, whole):
            return True
        self._refuse(bounds.refusal(arrived))
        return False

    def expect(self) -> None:
        """Count what the stream takes beside its messages."""
        if not self.share.take(_OPEN_STREAM):
            self._refuse(self.connection.bounds.bytes.refusal(_OPEN_STREAM))

    @property
    def arriving(self) -> int | None:
        """How much of a message is here that is not complete; None if none is on its way, or nothing is read."""
        if self._later is not None or not self._reading:
            return None
        if self._message is not None:
            return self._filled
        return len(self._prefix) or None

    def stall(self, seconds: float) -> None:
        """End the stream because a message has not come on for so long."""
        self._finish(messages.DEADLINE_EXCEEDED, messages.stalled_text(seconds))

    def go_on(self, share: ByteReservation) -> bool:
        """Take over bytes that were taken for the message that is read; give them back, and return False, at the end.

        The message is the last that was given to ``infer``.
        """
        if not self._alive:
            share.give_back()
            return False
        if self._share is None:
            self._share = share
        else:
            self._share.absorb(share)
        return True

    def proceed(self) -> None:
        """Take what came while a message was read."""
        later, self._later = self._later, None
        if later is None:
            return
        self.share.give_back(len(later))
        if len(self._requests) >= _MOST_REQUESTS:
            self._reading = False
        if self._reading:
            self.connection.http2.resume(self.stream_id)
        self.receive(memoryview(later), self._later_ends)
        self.connection.answered()

    def begin(self, request: InferenceRequest, decoupled: bool) -> None:
        """Note that a request is under way."""
        self._requests[request] = None if decoupled else self._order.begin()
        if self._share is not None:
            self._shares[request] = self._share
            self._share = None

    def refuse(self, request_id: str, error: NeriteError) -> None:
        """Say why a message leads to no inference. The stream goes on."""
        if self._share is not None:
            self._share.give_back()
            self._share = None
        for parts in self._order.finish(self._order.begin(), self.target.write_refusal(request_id, error)):
            self._send(parts)

    # What models say

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take a response; drop it if the client is gone."""
        if request not in self._requests:
            return
        place = self._requests[request]
        # A model that is not decoupled has one response, whatever else it sends.
        over = final or place is not None
        if over:
            del self._requests[request]
            if self._shares and (share := self._shares.pop(request, None)) is not None:
                share.give_back()
        if response.error is not None and self.target.errors_end_it:
            error = response.error
            self._finish(error.grpc_status, error.message, error.retry_after)
            return
        blocked = self._blocked
        parts = self.target.write(request, response, final)
        if place is None:
            self._send(parts)
        else:
            for released in self._order.finish(place, parts):
                self._send(released)
        if over:
            if not self._reading and len(self._requests) < _MOST_REQUESTS // 2:
                self._reading = True
                if self._later is None:
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
        if not self._begun:
            self._begun = True
            http2.send_headers(self.stream_id, self.target.head)
        http2.send_data(self.stream_id, parts)
        self.connection.answered()
        if http2.buffered(self.stream_id) > _HIGH_WATER:
            self.block(True)

    # Flow

    def block(self, blocked: bool) -> None:
        """Have the models pause, or go on, because of how the client reads."""
        if not blocked and self.connection.http2.buffered(self.stream_id):
            return
        if blocked != self._blocked:
            self._blocked = blocked
            for request in self._requests:
                request.pause(blocked)

    def writable(self) -> None:
        """Go on: the client has taken what was held back."""
        self.block(self.connection.congested)

    # The end

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
        """End the stream because of what was sent on it."""
        self._finish(error.grpc_status, error.message, error.retry_after)

    def _finish(self, code: int, message: str, retry_after: int = 0) -> None:
        """End the call, and cancel what is under way."""
        requests = self._end()
        http2 = self.connection.http2
        if self._begun:
            http2.send_trailers(self.stream_id, messages.trailers(code, message, retry_after))
        else:
            http2.send_headers(self.stream_id, messages.trailers_only(code, message, retry_after), end_stream=True)
        self.connection.answered()
        why = CancelReason.TOO_LATE if code == messages.DEADLINE_EXCEEDED else CancelReason.CANCELLED
        for request in requests:
            request.cancel(why)

    def _end(self) -> list[InferenceRequest]:
        """Forget the call; return what was under way."""
        requests = list(self._requests)
        self._requests.clear()
        self._message = self._later = None
        for share in (self.share, *self._shares.values()):
            share.give_back()
        self._shares.clear()
        if self._share is not None:
            self._share.give_back()
            self._share = None
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        self.connection.calls.pop(self.stream_id, None)
        return requests

    def cancel(self, why: CancelReason) -> None:
        """Forget the call: nobody waits for its responses."""
        for request in self._end():
            request.cancel(why)

    def expire(self) -> None:
        """Answer DEADLINE_EXCEEDED, and stop the work."""
        self.deadline = None
        self._finish(messages.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def abandon(self, error: NeriteError) -> None:
        """Answer with ``error``, and stop the work."""
        if self._alive:
            self._finish(error.grpc_status, error.message)

    def shut_down(self) -> None:
        """End the stream as soon as nothing is under way on it."""
        self._stopping = True
        self._finish_if_done()


# What the messages of ``ModelStreamInfer`` lead to, and how their responses are written.

_now = time.monotonic_ns


def _marker(final: bool) -> bytes:
    message = ModelInferResponse()
    message.parameters["triton_final_response"].bool_param = final
    return message.SerializeToString()


_FINAL: Final = {final: _marker(final) for final in (False, True)}
"""The response parameter that every response on a stream has, serialized."""


class StreamMessages(Protocol):
    """How messages of a call are packed, and what they say."""

    head: bytes
    max_message: int

    def too_large(self, size: int) -> NeriteError:
        """Count a message that is too large, and return its refusal."""

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return memory for a message of ``size`` bytes that begins with ``beginning``."""

    def read(self, framed: memoryview) -> Read | None:
        """Return what a message says; None if that is to be read aside. Raises ``NeriteError``."""

    def read_aside(self, framed: memoryview, then: Callable[[OpenedMessage], None]) -> None:
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
        messages: StreamMessages,
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

    def _go_on(self, call: StreamCall, opened: OpenedMessage) -> None:
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
        call.refuse(wire.id_of(message), error)

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
            parts = wire.write_infer_response(request, response, self._server.signature_of)
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
        access_log.log_refusal(request_id, error)
        message = ModelStreamInferResponse(error_message=error.message)
        if text_error(request_id) is None:
            message.infer_response.id = request_id
        return self._framed(message)

    def _failed(self, request: InferenceRequest, error: NeriteError, final: bool) -> Sequence[Buffer]:
        access_log.log_refusal(request.id, error)
        message = ModelStreamInferResponse(error_message=error.message)
        message.infer_response.model_name = request.header.model_name
        message.infer_response.id = request.id
        message.infer_response.parameters["triton_final_response"].bool_param = final
        return self._framed(message)

    def _framed(self, message: ModelStreamInferResponse) -> Sequence[Buffer]:
        raw = message.SerializeToString()
        return self._messages.packed([b"\0" + len(raw).to_bytes(4) + raw])
