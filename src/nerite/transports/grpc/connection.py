"""A gRPC connection: one socket, one ``http2.Http2Connection``, and the calls that are in progress on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from nerite.core.byte_budget import GRPC_METADATA
from nerite.core.failures import report
from nerite.core.request import CancelReason
from nerite.http2 import Http2Connection, Limits, RequestHeaders
from nerite.transports.engine_load import LoadSource
from nerite.transports.grpc import messages
from nerite.transports.grpc.keepalive import Keepalive, KeepaliveRules, KeepaliveVerdict
from nerite.transports.grpc.load_reports import LoadReportStream
from nerite.transports.grpc.stream import StreamCall
from nerite.transports.limits import COUNTED, ArrivalTimeout, ByteReservation, TransportLimits

if TYPE_CHECKING:
    from nerite.core.errors import NeriteError
    from nerite.core.execution_observer import TraceContext
    from nerite.core.request import InferenceRequest
    from nerite.core.response import InferenceResponse
    from nerite.core.tensor import Buffer
    from nerite.transports.grpc.call import ConnectionCall, StreamingCall

READ_SIZE = 256 * 1024
_SHORTEST_TIMEOUT = 0.001
"""Least seconds of a timer: for less than half of it, uvloop makes a handle that does not know its time."""
_HIGH_WATER = 1024 * 1024
_MAX_UNREAD_BYTES = 1024 * 1024 * 1024
"""Limit of reply bytes kept for a client that does not read; further replies are dropped with an error."""
_PREFIX_SIZE = 5
WAITING_CALL = 2048
"""Memory that a call takes while its message is outstanding, in bytes."""
_MAX_CHUNKS_PER_WRITE = 8
"""Maximum number of replies in one write, so that the client can already work while the others are written."""
_NOT_HTTP2 = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"This is the gRPC port, which speaks HTTP/2. The HTTP port is 8000 by default.\n"
)


class CallTarget(Protocol):
    """Handles the calls to one path; built once per distinct header block."""

    @property
    def stream(self) -> object:
        """Receives the messages of a streaming call; None if it is unary, for which the methods below are."""

    refusal: bytes | None
    """Complete reply if every such call is refused regardless of its message."""
    timeout: float | None
    """Seconds that the client waits for the reply."""
    max_message: int
    """Maximum size of a message in bytes."""

    @property
    def outer_span(self) -> TraceContext | None:
        """Parent span named by the metadata of the call, if any."""

    def start_known(self, call: GrpcCall, framed: bytes | memoryview) -> bool:
        """Answer a call whose message differs from an earlier one only in its tensor data; return False otherwise.

        ``framed`` is valid only until this returns.
        """

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return the buffer for a large message of ``size`` bytes that starts with ``beginning``."""

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Handle a call; the reply is sent through ``call``, now or later."""

    def answer(self, call: GrpcCall, request: InferenceRequest, response: InferenceResponse) -> None:
        """Send the response of an inference that ``start`` began."""

    def too_large(self, size: int) -> NeriteError:
        """Count a message of more than ``max_message`` bytes, and return the error."""


class CallService(Protocol):
    """Resolves the target of a call."""

    def target(self, headers: RequestHeaders) -> CallTarget:
        """Return the target of a call, and memoize it on the headers, which are shared by equal header blocks."""


class GrpcShared:
    """State shared by all connections of a listener."""

    __slots__ = ("bounds", "closed", "connections", "limits", "rules", "scratch", "service")

    def __init__(self, service: CallService, limits: Limits, rules: KeepaliveRules, bounds: TransportLimits) -> None:
        self.service = service
        self.limits = limits
        self.rules = rules
        self.bounds = bounds
        self.connections: set[GrpcConnection] = set()
        self.closed: Callable[[], None] = lambda: None
        """Called when a connection has ended."""
        # All connections share one read buffer: it is filled and consumed within one callback of the loop.
        self.scratch = memoryview(bytearray(READ_SIZE))


class GrpcCall:
    """A unary call: collects its message, then waits for its response."""

    protocol = "GRPC"

    __slots__ = (
        "_filled",
        "_message",
        "_partial_prefix",
        "began_ns",
        "connection",
        "deadline",
        "request",
        "share",
        "stream_id",
        "target",
    )

    def __init__(self, connection: GrpcConnection, stream_id: int, target: CallTarget) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self.target = target
        self.request: InferenceRequest | None = None
        """Inference of this call; it is cancelled when the client gives up."""
        self.deadline: asyncio.TimerHandle | None = None
        self.share: ByteReservation | None = None
        """Reservation of bytes in flight; None while the message is small and arrived in one piece."""
        self._message: memoryview | None = None
        self._filled = 0
        self._partial_prefix: bytes | None = b""
        """Start of the length prefix while it is incomplete; None once the message is complete."""

    @property
    def outer_span(self) -> TraceContext | None:
        """Parent span of the call."""
        return self.target.outer_span

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Handle a piece of the request body."""
        if self._message is None:
            if end and not self._partial_prefix and self.target.start_known(self, data):
                return
            if self._partial_prefix:
                data = self._partial_prefix + data
                self._partial_prefix = b""
            if len(data) < _PREFIX_SIZE:
                self._partial_prefix = bytes(data)
                if end:
                    self._fail_malformed()
                return
            size = int.from_bytes(data[1:_PREFIX_SIZE], "big")
            if size > self.target.max_message:
                self.fail(messages.of_error(self.target.too_large(size)))
                return
            if end and len(data) == size + _PREFIX_SIZE:
                if size < COUNTED or self._reserve(size, size):
                    # Copied, because models may modify their inputs in place.
                    self._complete(memoryview(bytearray(data)))
                return
            if len(data) > size + _PREFIX_SIZE:
                self._fail_malformed()
                return
            self._begin(data, size)
        else:
            self._append(data)
        if end and self._alive:
            assert self._message is not None
            if self._filled == len(self._message):
                self._complete(self._message)
            else:
                self._fail_malformed()

    def _begin(self, data: bytes | memoryview, size: int) -> None:
        """Allocate a buffer for a message that arrives in pieces; the five-byte prefix is kept in front of it."""
        budget = self.connection.bounds.bytes
        if not budget.fits(size):
            self.fail(messages.of_error(budget.refusal(size)))
            return
        self.began_ns = time.monotonic_ns()
        self._message = self.target.receive_buffer(memoryview(data)[_PREFIX_SIZE:], size + _PREFIX_SIZE)
        self._append(data)

    def _append(self, data: bytes | memoryview) -> None:
        assert self._message is not None
        stop = self._filled + len(data)
        if stop > len(self._message):
            self._fail_malformed()
            return
        if (self.share is None or self.share.size < stop) and not self._reserve(stop, len(self._message)):
            return
        self._message[self._filled : stop] = data
        self._filled = stop

    @property
    def waits(self) -> bool:
        """Whether the message is still incomplete."""
        return self._partial_prefix is not None and self.request is None

    def expect(self) -> None:
        """Reserve memory for a call whose message did not arrive together with its headers."""
        self._reserve(WAITING_CALL, WAITING_CALL)

    def _reserve(self, arrived: int, whole: int) -> bool:
        """Reserve the bytes of a message that have arrived, or fail the call if they exceed the limit."""
        if self.share is None:
            self.share = ByteReservation(self.connection.bounds.bytes)
        if self.share.cover(arrived, whole):
            return True
        self.fail(messages.of_error(self.connection.bounds.bytes.refusal(arrived)))
        return False

    @property
    def arriving(self) -> int | None:
        """Bytes received of an incomplete message; None if no message is arriving."""
        if self._message is not None:
            return self._filled
        return len(self._partial_prefix) if self._partial_prefix is not None and self.request is None else None

    def stall(self, seconds: float) -> None:
        """Fail the call because its message made no progress for ``seconds``."""
        self.fail(messages.stalled(seconds))

    def _fail_malformed(self) -> None:
        self.fail(messages.trailers_only(messages.INTERNAL, "the call does not carry exactly one message"))

    def _complete(self, framed: memoryview) -> None:
        self._message = self._partial_prefix = None
        self.target.start(self, framed)

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Handle the response of the inference; drop it if the client is gone."""
        if self.request is request:
            self.target.answer(self, request, response)

    def reply(self, head: bytes, parts: Sequence[Buffer], load: bytes = b"") -> None:
        """Send the reply message with status OK. ``load`` is the trailer with the load report, if there is one."""
        connection = self.connection
        if (connection.congested or connection.http2.queued) and connection.full:
            self.fail(messages.UNREAD)
            return
        self._end()
        connection.http2.reply(self.stream_id, head, parts, messages.TRAILERS_OK + load)
        connection.answered()

    def fail(self, block: bytes) -> None:
        """Send an error status as made by ``messages.trailers_only``."""
        self._end()
        self.connection.http2.send_headers(self.stream_id, block, end_stream=True)
        self.connection.answered()

    def block(self, blocked: bool) -> None:
        """Do nothing: a unary call has a single reply, which is not paused."""

    def writable(self) -> None:
        """Do nothing: a reply is queued as a whole."""

    def shut_down(self) -> None:
        """Do nothing: the call ends with its reply."""

    def cancel(self, why: CancelReason) -> None:
        """Discard the call and cancel its inference: the client no longer waits."""
        request = self.request
        self._end()
        if request is not None:
            request.cancel(why)

    def _end(self) -> None:
        self.request = None
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        if self.share is not None:
            self.share.give_back()
            self._message = None
        self.connection.calls.pop(self.stream_id, None)

    @property
    def _alive(self) -> bool:
        return self.connection.calls.get(self.stream_id) is self

    def go_on(self, share: ByteReservation) -> bool:
        """Take over the reservation of background work; if the call has ended, release it and return False."""
        if not self._alive:
            share.give_back()
            return False
        if self.share is None:
            self.share = share
        else:
            self.share.absorb(share)
        return True

    def expire(self) -> None:
        """Reply with DEADLINE_EXCEEDED, and cancel the inference."""
        self.deadline = None
        self._stop(messages.trailers_only(messages.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def abandon(self, error: NeriteError) -> None:
        """Reply with ``error`` unless the call has already ended, and cancel the inference."""
        if self._alive:
            self._stop(messages.of_error(error))

    def _stop(self, block: bytes) -> None:
        request = self.request
        self.fail(block)
        if request is not None:
            request.cancel(CancelReason.TOO_LATE)


class GrpcConnection(asyncio.BufferedProtocol):
    """Connection of one client, and event handler of its ``http2.Http2Connection``."""

    _unary: type[GrpcCall] = GrpcCall
    _streaming: type[StreamingCall] = StreamCall

    def __init__(self, shared: GrpcShared, loop: asyncio.AbstractEventLoop) -> None:
        self._shared = shared
        self.bounds = shared.bounds
        self._loop = loop
        self._transport: asyncio.Transport
        self._receiving = False
        self._flush_scheduled = False
        """A flush at the end of this loop turn is scheduled, which sends all replies of the turn in one write."""
        self._keepalive = Keepalive(shared.rules, loop.time())
        self.http2 = Http2Connection(self, shared.limits, loop.time(), GRPC_METADATA.put)
        self.calls: dict[int, ConnectionCall] = {}
        self.streamed = 0
        """Number of requests on streams."""
        self.congested = False
        """The client has not read what was written: the write buffer is above its high-water mark."""
        self._awaiting_message: list[ConnectionCall] = []
        """Calls begun during the current read whose message did not arrive together with their headers."""
        self._arrival_timeouts: dict[int, ArrivalTimeout] = {}
        """Progress of each stream whose message is arriving; key 0 is the connection itself."""

    # Socket callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._transport.set_write_buffer_limits(_HIGH_WATER)
        self._shared.connections.add(self)
        self.bounds.connections.add(self, time.monotonic())

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all calls: their client is gone."""
        self._shared.connections.discard(self)
        self._shared.closed()
        self.bounds.connections.remove(self)
        self.http2.lost()
        for call in tuple(self.calls.values()):
            call.cancel(CancelReason.DISCONNECTED)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next read."""
        return self._shared.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Process received bytes; everything answered meanwhile leaves in one write."""
        self._receiving = True
        now = self._loop.time()
        self._keepalive.heard(now)
        try:
            self.http2.receive(self._shared.scratch[:nbytes], now)
            if self._awaiting_message:
                self._reserve_awaiting()
        except Exception as error:
            report("grpc", error, "while a connection was read")
            self.abort()
        finally:
            self._receiving = False
            self.flush()

    def eof_received(self) -> bool:
        """Close the connection: a client that sends no more cannot even acknowledge."""
        return False

    def pause_writing(self) -> None:
        """Apply backpressure: stop reading until the client reads, as more requests would only add to the backlog."""
        self._transport.pause_reading()
        self._set_congested(True)

    def resume_writing(self) -> None:
        """Resume reading."""
        self._transport.resume_reading()
        self._set_congested(False)

    def _set_congested(self, congested: bool) -> None:
        self.congested = congested
        for call in tuple(self.calls.values()):
            call.block(congested)

    @property
    def full(self) -> bool:
        """Whether the client has left so much unread that further replies are dropped."""
        return self.http2.queued + self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES

    def answered(self) -> None:
        """Flush a reply: at once if no other call is pending, otherwise batched with the others of this loop turn."""
        self._keepalive.answered = True
        if not self.calls or len(self.http2.outbound) >= _MAX_CHUNKS_PER_WRITE:
            self.flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._scheduled_flush)

    def _scheduled_flush(self) -> None:
        self._flush_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Write pending output to the socket, and close the socket once the HTTP/2 connection is finished."""
        if self._receiving:
            return
        http2 = self.http2
        outbound = http2.outbound
        if outbound:
            if not self._transport.is_closing():
                if len(outbound) == 1:
                    self._transport.write(outbound[0])
                else:
                    self._transport.writelines(outbound)
            outbound.clear()
        if http2.finished and not self._transport.is_closing():
            if http2.http1:
                self._transport.write(_NOT_HTTP2)
            self._transport.close()

    @property
    def busy(self) -> bool:
        """Whether a call is in progress or its reply has not been fully written."""
        return self.http2.open_streams > 0 or self._transport.get_write_buffer_size() > 0

    @property
    def served(self) -> int:
        """Number of calls and of requests on streams."""
        return (self.http2.last_stream_id + 1) // 2 + self.streamed

    def retire(self) -> None:
        """Close an idle connection. GOAWAY tells the client that a call still on its way was not processed."""
        self.http2.goaway()
        self.flush()

    def check_uploads(self, now: float, seconds: float) -> None:
        """Fail calls whose message made no progress for ``seconds``; close the connection if a frame made none."""
        if self.congested:  # reading is paused
            self._arrival_timeouts.clear()
            return
        before, self._arrival_timeouts = self._arrival_timeouts, {}
        stalled = []
        for stream_id, call in self.calls.items():
            received = call.arriving
            if received is not None:
                arrival = self._arrival_timeouts[stream_id] = before.get(stream_id) or ArrivalTimeout()
                if arrival.exhausted((1, received), now, seconds):
                    stalled.append(call)
        for call in stalled:
            self.bounds.refused["stalled"] += 1
            call.stall(seconds)
        if self.http2.incomplete:
            arrival = self._arrival_timeouts[0] = before.get(0) or ArrivalTimeout()
            if arrival.exhausted((1 + self.served, 0), now, seconds):
                self.bounds.closed["stalled"] += 1
                self.http2.give_up(f"a frame made no progress for {seconds:g} s")
        self.flush()

    def check(self, now: float) -> None:
        """Apply the keepalive and connection age rules."""
        verdict = self._keepalive.check(now, len(self.calls))
        if verdict is KeepaliveVerdict.PING:
            self.http2.ping()
            self.flush()
        elif verdict is KeepaliveVerdict.SHUT_DOWN:
            self.http2.shutdown()
            self.flush()
        elif verdict is KeepaliveVerdict.ABORT:
            self.abort()

    def drain(self) -> None:
        """Shut down gracefully: refuse calls once the client has been notified, finish those in progress, and close."""
        if self.http2.begun:
            self.http2.shutdown()
            self.flush()

    def shut_down(self) -> None:
        """Refuse new calls immediately, finish those in progress, and close."""
        self.http2.shutdown()
        self.http2.goaway()
        for call in tuple(self.calls.values()):
            call.shut_down()
        self.flush()

    def abort(self) -> None:
        """Close immediately, without GOAWAY."""
        self._transport.abort()

    # HTTP/2 callbacks

    def request_started(self, stream_id: int, headers: RequestHeaders, end_stream: bool) -> None:
        """Begin a call whose headers arrived first."""
        call = self._begin(stream_id, headers)
        if call is None:
            return
        if end_stream:
            self._receive(call, b"", True)
        else:
            self._awaiting_message.append(call)

    def _reserve_awaiting(self) -> None:
        """Reserve memory for calls whose message is still outstanding after this read."""
        begun, self._awaiting_message = self._awaiting_message, []
        for call in begun:
            if self.calls.get(call.stream_id) is call and call.waits:
                call.expect()

    def request_received(self, stream_id: int, headers: RequestHeaders, body: bytes | memoryview) -> None:
        """Begin a call whose headers and message arrived together, which is the usual case."""
        call = self._begin(stream_id, headers)
        if call is not None:
            self._receive(call, body, True)

    def _begin(self, stream_id: int, headers: RequestHeaders) -> ConnectionCall | None:
        """Create the call; return None if it was refused."""
        try:
            target: CallTarget = headers.memo or self._shared.service.target(headers)
        except Exception as error:  # an error must not cost other calls their connection
            failure = report("grpc", error, "when a call began")
            self.http2.send_headers(stream_id, messages.of_error(failure), end_stream=True)
            return None
        if target.refusal is not None:
            self.http2.send_headers(stream_id, target.refusal, end_stream=True)
            return None
        stream = target.stream
        call = self._unary(self, stream_id, target) if stream is None else self._stream_call(stream_id, stream)
        self.calls[stream_id] = call
        if target.timeout is not None:
            call.deadline = self._loop.call_later(max(target.timeout, _SHORTEST_TIMEOUT), call.expire)
        return call

    def _stream_call(self, stream_id: int, stream: Any) -> StreamingCall:
        """Return a call whose target has this ``stream``."""
        if isinstance(stream, LoadSource):
            return LoadReportStream(self, stream_id, stream)
        return self._streaming(self, stream_id, stream)

    def _receive(self, call: ConnectionCall, data: bytes | memoryview, end: bool) -> None:
        try:
            call.receive(data, end)
        except Exception as error:  # an error must not cost the call its reply, nor other calls their connection
            call.abandon(report("grpc", error, "in a call"))

    def data_received(self, stream_id: int, data: bytes | memoryview, end_stream: bool) -> None:
        """Pass a piece of a message to its call."""
        call = self.calls.get(stream_id)
        if call is not None:
            self._receive(call, data, end_stream)

    def stream_closed(self, stream_id: int, error_code: int) -> None:
        """Cancel a call that the client has reset."""
        call = self.calls.get(stream_id)
        if call is not None:
            call.cancel(CancelReason.CANCELLED)

    def writable(self, stream_id: int) -> None:
        """Notify a call that flow control lets it send again."""
        call = self.calls.get(stream_id)
        if call is not None:
            call.writable()

    def connection_closing(self, error_code: int, reason: str) -> None:
        """Do nothing: ``flush`` closes the socket once the connection is finished."""
