"""``ModelStreamInfer``: many requests on one call, and their responses as they come.

Order is as Triton has it. The one response of each request to a model that is not decoupled leaves in the order of
those requests; responses of decoupled models leave at once. Where a client reads slowly the stream is blocked, and the
models are told to pause; where it asks without end, no more than so many requests are under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from nerite.core.errors import NeriteError
from nerite.core.request import GaveUp, InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer
from nerite.core.trace_context import TraceContext
from nerite.scheduling.release_order import ReleaseOrder
from nerite.transports.grpc import status

if TYPE_CHECKING:
    from nerite.transports.grpc.connection import GrpcConnection

_PREFIX = 5
_MAX_MESSAGE = 2**31 - 1
_HIGH_WATER = 1024 * 1024
"""Bytes of responses that may wait for the client before the models are told to pause."""
_MOST_REQUESTS = 1024
"""Requests under way on one stream beyond which no more are read."""


class StreamTarget(Protocol):
    """What a stream's messages lead to."""

    head: bytes
    errors_end_it: bool
    """The client asked that the first error of a model ends the stream."""
    outer_span: TraceContext | None
    """The span that the stream was opened under, if its metadata name one."""

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return where a message of ``size`` bytes, which begins with ``beginning``, is to be collected."""

    def infer(self, call: StreamCall, framed: memoryview) -> None:
        """Begin the inference that a message asks for: ``call.begin``, or ``call.refuse``."""

    def write(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> Sequence[Buffer]:
        """Return a response as a message with its length in front; nothing for one that is not to be sent."""

    def write_refusal(self, request_id: str, error: NeriteError) -> Sequence[Buffer]:
        """Return the message that says why there is no inference."""


class StreamCall:
    """One call of ``ModelStreamInfer``."""

    protocol = "GRPC"

    __slots__ = (
        "_begun",
        "_blocked",
        "_filled",
        "_half_closed",
        "_message",
        "_order",
        "_prefix",
        "_reading",
        "_requests",
        "_stopping",
        "connection",
        "deadline",
        "stream_id",
        "target",
    )

    def __init__(self, connection: GrpcConnection, stream_id: int, target: StreamTarget) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.target = target
        self.deadline: asyncio.TimerHandle | None = None
        self._prefix = b""
        self._message: memoryview | None = None
        self._filled = 0
        self._half_closed = False
        self._begun = False
        """The headers of the reply have left."""
        self._blocked = False
        self._reading = True
        self._stopping = False
        """No more requests are taken."""
        self._requests: dict[InferenceRequest, int | None] = {}
        """Those under way, with their place in the order, None for those that have none."""
        self._order: ReleaseOrder[Sequence[Buffer]] = ReleaseOrder()

    @property
    def outer_span(self) -> TraceContext | None:
        """The span that the stream was opened under."""
        return self.target.outer_span

    # What the client says

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Take a piece of the body: messages one after the other, cut anywhere."""
        rest = memoryview(data)
        while len(rest) and self._alive:
            rest = self._take(rest)
        if end and self._alive:
            if self._prefix or self._message is not None:
                self._finish(status.INTERNAL, "the last message of the stream is not complete")
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
            if size > _MAX_MESSAGE:
                self._finish(status.RESOURCE_EXHAUSTED, "a message is larger than 2 GiB")
                return rest
            message = self._message = self.target.receive_buffer(rest, size + _PREFIX)
            message[:_PREFIX] = self._prefix
            self._prefix = b""
            self._filled = _PREFIX
        taken = min(len(rest), len(message) - self._filled)
        message[self._filled : self._filled + taken] = rest[:taken]
        self._filled += taken
        if self._filled == len(message):
            self._message = None
            self.target.infer(self, message)
            if len(self._requests) >= _MOST_REQUESTS and self._reading:
                self._reading = False
                self.connection.http2.pause(self.stream_id)
        return rest[taken:]

    def begin(self, request: InferenceRequest, decoupled: bool) -> None:
        """Note that a request is under way."""
        self._requests[request] = None if decoupled else self._order.begin()

    def refuse(self, request_id: str, error: NeriteError) -> None:
        """Say why a message leads to no inference. The stream goes on."""
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
            self._finish(status.RESOURCE_EXHAUSTED, status.UNREAD_TEXT)
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
            self._finish(status.OK, "")
        elif self._stopping:
            refusal = "GRPC server is shutting down and has stopped accepting new requests."
            self._finish(status.UNAVAILABLE, refusal, retry_after=1)

    def _finish(self, code: int, message: str, retry_after: int = 0) -> None:
        """End the call, and cancel what is under way."""
        requests = self._end()
        http2 = self.connection.http2
        if self._begun:
            http2.send_trailers(self.stream_id, status.trailers(code, message, retry_after))
        else:
            http2.send_headers(self.stream_id, status.trailers_only(code, message, retry_after), end_stream=True)
        self.connection.answered()
        why = GaveUp.TOO_LATE if code == status.DEADLINE_EXCEEDED else GaveUp.CANCELLED
        for request in requests:
            request.cancel(why)

    def _end(self) -> list[InferenceRequest]:
        """Forget the call; return what was under way."""
        requests = list(self._requests)
        self._requests.clear()
        self._message = None
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        self.connection.calls.pop(self.stream_id, None)
        return requests

    def cancel(self, why: GaveUp) -> None:
        """Forget the call: nobody waits for its responses."""
        for request in self._end():
            request.cancel(why)

    def expire(self) -> None:
        """Answer DEADLINE_EXCEEDED, and stop the work."""
        self.deadline = None
        self._finish(status.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def abandon(self) -> None:
        """Answer that a mistake of ours came to light, and stop the work."""
        if self._alive:
            self._finish(status.INTERNAL, status.MISTAKE_TEXT)

    def shut_down(self) -> None:
        """End the stream as soon as nothing is under way on it."""
        self._stopping = True
        self._finish_if_done()
