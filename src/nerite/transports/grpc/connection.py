"""One gRPC connection: a socket, an ``http2.Http2Connection``, and the calls that are under way on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from nerite.core.byte_budget import GRPC_METADATA
from nerite.core.errors import NeriteError
from nerite.core.failures import report
from nerite.core.request import CancelReason
from nerite.core.tensor import Buffer
from nerite.http2 import Http2Connection, Limits, RequestHeaders
from nerite.transports.grpc import messages
from nerite.transports.grpc.keepalive import Keepalive, KeepaliveRules, KeepaliveVerdict
from nerite.transports.grpc.stream import StreamCall, StreamTarget
from nerite.transports.limits import COUNTED, ArrivalTimeout, ByteReservation, TransportLimits

if TYPE_CHECKING:
    from nerite.core.request import InferenceRequest
    from nerite.core.response import InferenceResponse
    from nerite.core.trace_context import TraceContext

READ_SIZE = 256 * 1024
_HIGH_WATER = 1024 * 1024
_MOST_UNREAD = 1024 * 1024 * 1024
"""Bytes of answers that are kept for a client that does not take them; what comes beyond is dropped, with an error."""
_PREFIX = 5
WAITING_CALL = 2048
"""Bytes that a call takes in memory while its message has not come."""
_TOGETHER = 8
"""Answers that leave in one write. Not more, so that the client has something to do while we write the others."""
_NOT_HTTP2 = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"This is the gRPC port, which speaks HTTP/2. The HTTP port is 8000 unless it was set otherwise.\n"
)


class CallTarget(Protocol):
    """What a path leads to, worked out once for each distinct header block."""

    stream: StreamTarget | None
    """Where the messages of a call go that carries many; the methods are for calls that carry one."""

    refusal: bytes | None
    """The whole reply, if the call is refused whatever it says."""
    timeout: float | None
    """Seconds that the client will wait."""
    max_message: int
    """Bytes of the largest message that is taken."""
    outer_span: TraceContext | None
    """The span that the call is made under, if its metadata name one."""

    def start_known(self, call: GrpcCall, framed: bytes | memoryview) -> bool:
        """Answer a call whose message says what an earlier one said, with other data; False if it does not.

        ``framed`` is valid only until this returns.
        """

    def receive_buffer(self, beginning: memoryview, size: int) -> memoryview:
        """Return where a large message of ``size`` bytes, which begins with ``beginning``, is to be collected."""

    def start(self, call: GrpcCall, framed: memoryview) -> None:
        """Answer a call, now or later, through the call."""

    def answer(self, call: GrpcCall, request: InferenceRequest, response: InferenceResponse) -> None:
        """Send the answer of an inference that ``start`` began."""

    def too_large(self, size: int) -> NeriteError:
        """Count a message of more than ``max_message`` bytes, and return its refusal."""


class CallService(Protocol):
    """What connections ask where a call goes."""

    def target(self, headers: RequestHeaders) -> CallTarget:
        """Return the target of a call, and leave it on the headers, which repeat."""


class GrpcShared:
    """What all connections of a listener have in common."""

    __slots__ = ("bounds", "connections", "limits", "rules", "scratch", "service")

    def __init__(self, service: CallService, limits: Limits, rules: KeepaliveRules, bounds: TransportLimits) -> None:
        self.service = service
        self.limits = limits
        self.rules = rules
        self.bounds = bounds
        self.connections: set[GrpcConnection] = set()
        # One read buffer for all: a read and its handling are one step of the loop.
        self.scratch = memoryview(bytearray(READ_SIZE))


class GrpcCall:
    """One unary call: collects its message, then waits for its answer."""

    protocol = "GRPC"

    __slots__ = (
        "_filled",
        "_message",
        "_missing",
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
        """The inference that this call is; cancelled when the client gives up."""
        self.deadline: asyncio.TimerHandle | None = None
        self.share: ByteReservation | None = None
        """What it has of the bytes in flight, unless its message is small and came in one piece."""
        self._message: memoryview | None = None
        self._filled = 0
        self._missing: bytes | None = b""
        """The first bytes, as long as there are not enough of them; None once the message is complete."""

    @property
    def outer_span(self) -> TraceContext | None:
        """The span that the call is made under."""
        return self.target.outer_span

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Take a piece of the body."""
        if self._message is None:
            if end and not self._missing and self.target.start_known(self, data):
                return
            if self._missing:
                data = self._missing + data
                self._missing = b""
            if len(data) < _PREFIX:
                self._missing = bytes(data)
                if end:
                    self._broken()
                return
            size = int.from_bytes(data[1:_PREFIX], "big")
            if size > self.target.max_message:
                self.fail(messages.of_error(self.target.too_large(size)))
                return
            if end and len(data) == size + _PREFIX:
                if size < COUNTED or self._counts(size, size):
                    # A copy, because models may work in place.
                    self._complete(memoryview(bytearray(data)))
                return
            if len(data) > size + _PREFIX:
                self._broken()
                return
            self._begin(data, size)
        else:
            self._append(data)
        if end and self._alive:
            assert self._message is not None
            if self._filled == len(self._message):
                self._complete(self._message)
            else:
                self._broken()

    def _begin(self, data: bytes | memoryview, size: int) -> None:
        """Find a place for a message that comes in pieces; keep its five bytes in front of it."""
        taken = self.connection.bounds.bytes
        if not taken.fits(size):
            self.fail(messages.of_error(taken.refusal(size)))
            return
        self.began_ns = time.monotonic_ns()
        self._message = self.target.receive_buffer(memoryview(data)[_PREFIX:], size + _PREFIX)
        self._append(data)

    def _append(self, data: bytes | memoryview) -> None:
        assert self._message is not None
        stop = self._filled + len(data)
        if stop > len(self._message):
            self._broken()
            return
        if (self.share is None or self.share.size < stop) and not self._counts(stop, len(self._message)):
            return
        self._message[self._filled : stop] = data
        self._filled = stop

    @property
    def waits(self) -> bool:
        """Whether the message is not complete."""
        return self._missing is not None and self.request is None

    def expect(self) -> None:
        """Count what the call takes until its message is there, which has not come with its headers."""
        self._counts(WAITING_CALL, WAITING_CALL)

    def _counts(self, arrived: int, whole: int) -> bool:
        """Count the bytes that have arrived of a message, or fail if there is no room for them."""
        if self.share is None:
            self.share = ByteReservation(self.connection.bounds.bytes)
        if self.share.cover(arrived, whole):
            return True
        self.fail(messages.of_error(self.connection.bounds.bytes.refusal(arrived)))
        return False

    @property
    def arriving(self) -> int | None:
        """How much of a message is here that is not complete; None if none is on its way."""
        if self._message is not None:
            return self._filled
        return len(self._missing) if self._missing is not None and self.request is None else None

    def stall(self, seconds: float) -> None:
        """Fail because the message has not come on for so long."""
        self.fail(messages.stalled(seconds))

    def _broken(self) -> None:
        self.fail(messages.trailers_only(messages.INTERNAL, "the call does not carry exactly one message"))

    def _complete(self, framed: memoryview) -> None:
        self._message = self._missing = None
        self.target.start(self, framed)

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take the answer of an inference; drop it if its client is gone."""
        if self.request is request:
            self.target.answer(self, request, response)

    def reply(self, head: bytes, parts: Sequence[Buffer]) -> None:
        """Send the message of the reply, and OK."""
        connection = self.connection
        if (connection.congested or connection.http2.queued) and connection.full:
            self.fail(messages.UNREAD)
            return
        self._end()
        connection.http2.reply(self.stream_id, head, parts, messages.TRAILERS_OK)
        connection.answered()

    def fail(self, block: bytes) -> None:
        """Send the status of a call that failed, ``status.trailers_only``."""
        self._end()
        self.connection.http2.send_headers(self.stream_id, block, end_stream=True)
        self.connection.answered()

    def block(self, blocked: bool) -> None:
        """Do nothing: the one answer is made when it is made."""

    def writable(self) -> None:
        """Do nothing: a reply is queued as a whole."""

    def shut_down(self) -> None:
        """Do nothing: the call ends with its answer."""

    def cancel(self, why: CancelReason) -> None:
        """Forget the call: nobody waits for its answer."""
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
        """Take over bytes that were taken for the call meanwhile; give them back, and return False, if it is over."""
        if not self._alive:
            share.give_back()
            return False
        if self.share is None:
            self.share = share
        else:
            self.share.absorb(share)
        return True

    def expire(self) -> None:
        """Answer DEADLINE_EXCEEDED, and stop the work."""
        self.deadline = None
        self._stop(messages.trailers_only(messages.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def abandon(self, error: NeriteError) -> None:
        """Answer with ``error``, unless there was an answer already, and stop the work."""
        if self._alive:
            self._stop(messages.of_error(error))

    def _stop(self, block: bytes) -> None:
        request = self.request
        self.fail(block)
        if request is not None:
            request.cancel(CancelReason.TOO_LATE)


class GrpcConnection(asyncio.BufferedProtocol):
    """A client's connection. Also the handler of its ``http2.Http2Connection``."""

    _unary: type[GrpcCall] = GrpcCall
    _streaming: type[StreamCall] = StreamCall

    def __init__(self, shared: GrpcShared, loop: asyncio.AbstractEventLoop) -> None:
        self._shared = shared
        self.bounds = shared.bounds
        self._loop = loop
        self._transport: asyncio.Transport
        self._receiving = False
        self._gathering = False
        """Answers wait for the end of this turn of the loop, to leave in one write."""
        self._keepalive = Keepalive(shared.rules, loop.time())
        self.http2 = Http2Connection(self, shared.limits, loop.time(), GRPC_METADATA.put)
        self.calls: dict[int, GrpcCall | StreamCall] = {}
        self.congested = False
        """The client has not taken what was written."""
        self._begun: list[GrpcCall | StreamCall] = []
        """Calls whose message has not come with their headers, since the last bytes were taken."""
        self._arriving: dict[int, ArrivalTimeout] = {}
        """Calls whose message is on its way, and under 0 the connection itself."""

    # The socket's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.set_write_buffer_limits(_HIGH_WATER)
        self._shared.connections.add(self)
        self.bounds.connections.add(self, time.monotonic())

    def connection_lost(self, exc: Exception | None) -> None:
        """End: nobody waits for any answer."""
        self._shared.connections.discard(self)
        self.bounds.connections.remove(self)
        self.http2.lost()
        for call in tuple(self.calls.values()):
            call.cancel(CancelReason.DISCONNECTED)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self._shared.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes; everything that is answered at once leaves in one write."""
        self._receiving = True
        now = self._loop.time()
        self._keepalive.heard(now)
        try:
            self.http2.receive(self._shared.scratch[:nbytes], now)
            if self._begun:
                self._count_begun()
        except Exception as error:
            report("grpc", error, "while a connection was read")
            self.abort()
        finally:
            self._receiving = False
            self.flush()

    def eof_received(self) -> bool:
        """Close: a client that sends no more cannot even acknowledge."""
        return False

    def pause_writing(self) -> None:
        """Read no more until the client has taken what is there: its requests would only make it more."""
        self._transport.pause_reading()
        self._congest(True)

    def resume_writing(self) -> None:
        """Go on reading."""
        self._transport.resume_reading()
        self._congest(False)

    def _congest(self, congested: bool) -> None:
        self.congested = congested
        for call in tuple(self.calls.values()):
            call.block(congested)

    @property
    def full(self) -> bool:
        """Whether nothing more is kept for the client, which has left so much unread."""
        return self.http2.queued + self._transport.get_write_buffer_size() > _MOST_UNREAD

    def answered(self) -> None:
        """Write an answer: at once if no other is due, else with those that follow in this turn of the loop."""
        self._keepalive.answered = True
        if not self.calls or len(self.http2.outbound) >= _TOGETHER:
            self.flush()
        elif not self._gathering:
            self._gathering = True
            self._loop.call_soon(self._gathered)

    def _gathered(self) -> None:
        self._gathering = False
        self.flush()

    def flush(self) -> None:
        """Write what is ready."""
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
        """Whether a call is under way, or its answer has not left."""
        return self.http2.open_streams > 0 or self._transport.get_write_buffer_size() > 0

    @property
    def served(self) -> int:
        """A number that changes with each call."""
        return self.http2.last_stream_id

    def retire(self) -> None:
        """Close, as nothing is under way. A call that is on its way was not begun, as its client is told."""
        self.http2.goaway()
        self.flush()

    def look_at_arrivals(self, now: float, seconds: float) -> None:
        """Fail calls whose message has not come on for so long. Close if there is none, and no beginning of one."""
        if self.congested:  # nothing is read
            self._arriving.clear()
            return
        before, self._arriving = self._arriving, {}
        stalled = []
        for stream_id, call in self.calls.items():
            received = call.arriving
            if received is not None:
                patience = self._arriving[stream_id] = before.get(stream_id) or ArrivalTimeout()
                if patience.exhausted((1, received), now, seconds):
                    stalled.append(call)
        for call in stalled:
            self.bounds.refused["stalled"] += 1
            call.stall(seconds)
        if self.http2.incomplete:
            patience = self._arriving[0] = before.get(0) or ArrivalTimeout()
            if patience.exhausted((1 + self.served, 0), now, seconds):
                self.bounds.closed["stalled"] += 1
                self.http2.give_up(f"a frame did not come on for {seconds:g} s")
        self.flush()

    def look(self, now: float) -> None:
        """Do what keepalive and connection age ask for."""
        verdict = self._keepalive.look(now, len(self.calls))
        if verdict is KeepaliveVerdict.PING:
            self.http2.ping()
            self.flush()
        elif verdict is KeepaliveVerdict.SHUT_DOWN:
            self.http2.shutdown()
            self.flush()
        elif verdict is KeepaliveVerdict.ABORT:
            self.abort()

    def drain(self) -> None:
        """Take no more calls once the client knows that it should make none here; finish those there are, and close."""
        if self.http2.begun:
            self.http2.shutdown()
            self.flush()

    def shut_down(self) -> None:
        """Take no more calls, finish those there are, and close."""
        self.http2.shutdown()
        self.http2.goaway()
        for call in tuple(self.calls.values()):
            call.shut_down()
        self.flush()

    def abort(self) -> None:
        """Close without ceremony."""
        self._transport.abort()

    # The HTTP/2 connection's side

    def request_started(self, stream_id: int, headers: RequestHeaders, end_stream: bool) -> None:
        """Begin a call."""
        call = self._begin(stream_id, headers)
        if call is None:
            return
        if end_stream:
            self._receive(call, b"", True)
        else:
            self._begun.append(call)

    def _count_begun(self) -> None:
        """Count the calls that have begun and whose message, mostly behind the headers of others, is still to come."""
        begun, self._begun = self._begun, []
        for call in begun:
            if self.calls.get(call.stream_id) is call and call.waits:
                call.expect()

    def request_received(self, stream_id: int, headers: RequestHeaders, body: bytes | memoryview) -> None:
        """Begin a call whose message is here: the usual case."""
        call = self._begin(stream_id, headers)
        if call is not None:
            self._receive(call, body, True)

    def _begin(self, stream_id: int, headers: RequestHeaders) -> GrpcCall | StreamCall | None:
        """Begin a call, or refuse it."""
        try:
            target: CallTarget = headers.memo or self._shared.service.target(headers)
        except Exception as error:  # it must not cost others their connection
            failure = report("grpc", error, "when a call began")
            self.http2.send_headers(stream_id, messages.of_error(failure), end_stream=True)
            return None
        if target.refusal is not None:
            self.http2.send_headers(stream_id, target.refusal, end_stream=True)
            return None
        stream = target.stream
        call = self._unary(self, stream_id, target) if stream is None else self._streaming(self, stream_id, stream)
        self.calls[stream_id] = call
        if target.timeout is not None:
            call.deadline = self._loop.call_later(target.timeout, call.expire)
        return call

    def _receive(self, call: GrpcCall | StreamCall, data: bytes | memoryview, end: bool) -> None:
        try:
            call.receive(data, end)
        except Exception as error:  # it must not cost the client its answer, nor others their connection
            call.abandon(report("grpc", error, "in a call"))

    def data_received(self, stream_id: int, data: bytes | memoryview, end_stream: bool) -> None:
        """Pass a piece of a message to its call."""
        call = self.calls.get(stream_id)
        if call is not None:
            self._receive(call, data, end_stream)

    def stream_closed(self, stream_id: int, error_code: int) -> None:
        """Cancel a call that its client gave up."""
        call = self.calls.get(stream_id)
        if call is not None:
            call.cancel(CancelReason.CANCELLED)

    def writable(self, stream_id: int) -> None:
        """Have a stream go on."""
        call = self.calls.get(stream_id)
        if call is not None:
            call.writable()

    def connection_closing(self, error_code: int, reason: str) -> None:
        """Nothing to do: ``flush`` closes the socket when the connection is finished."""
