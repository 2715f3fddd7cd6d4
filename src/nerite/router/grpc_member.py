"""A connection of the router to the gRPC port of a member, and the calls on it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol, cast

from nerite.core.byte_budget import GRPC_METADATA
from nerite.core.failures import report
from nerite.http2 import Buffer, Http2ClientConnection, Http2ErrorCode, Limits, ReplyHeaders
from nerite.transports import tcp

_HIGH_WATER: Final = 1024 * 1024
_LIMITS: Final = Limits(
    max_concurrent_streams=4_096, resets=100_000, resets_per_second=10_000.0, max_ping_strikes=0
)  # fmt: skip
"""A member is trusted more than a client: it may refuse many streams at once, and measures bandwidth by PINGs."""
_PING_AFTER: Final = 300.0
"""Seconds of silence during calls after which a member is asked; servers of gRPC do not allow it sooner."""
_PING_TIMEOUT: Final = 20.0
_SPARE_SECONDS: Final = 60.0
"""Seconds after which a connection without calls is closed, if there is another to the same member."""


class GrpcCallSink(Protocol):
    """Takes what a member answers to one call. The call is over once its end was reported."""

    def response_started(self, headers: ReplyHeaders, end: bool) -> None:
        """Handle the headers of the answer; with ``end`` they are its trailers, too."""

    def response_data(self, data: Buffer, end: bool) -> None:
        """Handle a piece of the answer, which stays valid."""

    def trailers_received(self, trailers: ReplyHeaders) -> None:
        """Handle the end of the answer."""

    def call_lost(self, why: str, unprocessed: bool) -> None:
        """Handle the loss of the call. ``why`` continues a sentence about the member, as in "closed the connection".

        ``unprocessed``: the member has certainly not begun with it.
        """

    def member_writable(self) -> None:
        """Resume sending after ``GrpcMemberCall.full`` was true."""


class GrpcCallQueue(Protocol):
    """Where the calls of a member come from, and where its connections are registered."""

    def withdraw(self, call: GrpcMemberCall) -> None:
        """Remove a call that waits for a connection."""

    def begin_waiting(self) -> None:
        """Begin calls that wait for room on a connection."""

    def connected(self, connection: GrpcMemberConnection) -> None:
        """Use a new connection."""

    def disconnected(self, connection: GrpcMemberConnection) -> None:
        """Forget a connection."""


class GrpcMemberCall:
    """A call at a member: waits for a connection, then is a stream of it."""

    __slots__ = ("_ended", "_held", "_paused", "_queue", "block", "connection", "sink", "stream_id")

    def __init__(self, queue: GrpcCallQueue, block: bytes, sink: GrpcCallSink) -> None:
        self._queue = queue
        self._held: list[Buffer] = []
        """What was sent before there was a connection."""
        self._ended = False
        self._paused = False
        self.block = block
        self.sink = sink
        self.connection: GrpcMemberConnection | None = None
        self.stream_id = 0

    def send(self, buffers: Sequence[Buffer], end: bool) -> None:
        """Send a part of the request. The buffers must not change until the end of the call."""
        if self.connection is None:
            self._held += buffers
            self._ended = end
        else:
            self.connection.http2.send_data(self.stream_id, buffers, end)
            self.connection.flush_soon()

    @property
    def full(self) -> bool:
        """Whether the member does not read as fast as the client sends. ``member_writable`` follows."""
        connection = self.connection
        if connection is None:
            return bool(self._held)
        return connection.congested or connection.http2.buffered(self.stream_id) > 0

    def pause(self, paused: bool) -> None:
        """Have the member send no more than its window, or go on."""
        self._paused = paused
        if self.connection is None:
            return
        if paused:
            self.connection.http2.pause(self.stream_id)
        else:
            self.connection.http2.resume(self.stream_id)
            self.connection.flush_soon()

    def cancel(self) -> None:
        """End the call; its sink is told nothing more. Repeated calls have no effect."""
        if self.connection is None:
            self._queue.withdraw(self)
        elif self.connection.calls.pop(self.stream_id, None) is not None:
            self.connection.http2.reset(self.stream_id, Http2ErrorCode.CANCEL)
            self.connection.flush_soon()
            self._queue.begin_waiting()

    def lose(self, why: str, *, unprocessed: bool) -> None:
        """Tell the sink that the call is lost. Never raises: other calls that are lost with it have to be told, too."""
        try:
            self.sink.call_lost(why, unprocessed)
        except Exception as error:
            report("router", error, "while the loss of a call was handled")

    def begin(self, connection: GrpcMemberConnection) -> None:
        """Open the stream on a connection that has room."""
        self.connection = connection
        self.stream_id = connection.http2.open_stream(self.block)
        connection.calls[self.stream_id] = self
        held, self._held = self._held, []
        if held or self._ended:
            connection.http2.send_data(self.stream_id, held, self._ended)
        if self._paused:
            connection.http2.pause(self.stream_id)
        connection.flush_soon()
        if held and not self._ended and not self.full:
            self.sink.member_writable()


class GrpcMemberConnection:
    """One connection to a member, and event handler of its ``Http2ClientConnection``."""

    def __init__(self, queue: GrpcCallQueue, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = queue
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._flush_scheduled = False
        self._receiving = False
        self._reason = ""
        """Why the connection ends."""
        self._heard_at = self._used_at = loop.time()
        self._pinged_at: float | None = None
        self.calls: dict[int, GrpcMemberCall] = {}
        self.congested = False
        """The member has not read what was written."""
        self.ready: asyncio.Future[None] = loop.create_future()
        """Done when the member's SETTINGS have come; fails with ``OSError`` if the connection ends before."""
        self.http2 = Http2ClientConnection(self, _LIMITS, loop.time(), GRPC_METADATA.put)

    # For the socket

    def opened(self, transport: asyncio.Transport) -> None:
        """Send the preface. Calls begin when it is known how many the member allows."""
        self._transport = transport
        transport.set_write_buffer_limits(_HIGH_WATER)
        self.flush()

    def lost(self, error: Exception | None) -> None:
        """Report all calls as lost."""
        cause = f"lost the connection ({error})" if error else "closed the connection"
        self._reason = self._reason or cause
        self._queue.disconnected(self)
        self.http2.lost()
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(f"it {self._reason}"))

    def receive(self, data: bytes) -> None:
        """Process what the member sends. Parts of ``data`` are kept, not copied."""
        now = self._heard_at = self._loop.time()
        self._pinged_at = None
        self._receiving = True
        try:
            self.http2.receive(data, now)
        except Exception as error:
            report("grpc", error, "while a connection to a member was read")
            self.abort("sent an answer that caused an internal error")
        finally:
            self._receiving = False
            if self.ready.done():
                self._queue.begin_waiting()
            elif self.http2.leaving:  # one that shuts down at once takes no calls: those that wait go elsewhere
                self.ready.set_exception(ConnectionError(f"it {self._reason}"))
            elif self.http2.settled and not self.http2.closed:
                self.ready.set_result(None)
                self._queue.connected(self)
            self.flush()

    def set_congested(self, congested: bool) -> None:
        """Have the clients wait until the member reads, or go on."""
        self.congested = congested
        if not congested:
            for call in tuple(self.calls.values()):
                if not call.full:
                    call.sink.member_writable()

    # For the channel and the calls

    def flush_soon(self) -> None:
        """Write once in this turn of the loop."""
        if not self._flush_scheduled and not self._receiving:
            self._flush_scheduled = True
            self._loop.call_soon(self._scheduled_flush)

    def _scheduled_flush(self) -> None:
        self._flush_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Write pending output, and close the socket once the HTTP/2 connection is finished."""
        outbound = self.http2.outbound
        transport = self._transport
        if transport is None:
            return
        if outbound:
            if not transport.is_closing():
                transport.writelines(outbound)
            outbound.clear()
        if self.http2.finished and not transport.is_closing():
            transport.close()

    def check(self, now: float, *, spare: bool) -> None:
        """Ask a member that is silent, give up one that does not answer, and close a spare connection."""
        if self.calls:
            self._used_at = now
            if self._pinged_at is not None:
                if now - self._pinged_at >= _PING_TIMEOUT:
                    self.abort(f"did not answer a PING within {_PING_TIMEOUT:g} s")
            elif now - self._heard_at >= _PING_AFTER:
                self._pinged_at = now
                self.http2.ping()
                self.flush()
        elif spare and now - self._used_at >= _SPARE_SECONDS:
            self.close()

    def close(self) -> None:
        """Begin no more calls, and close after the last has ended."""
        self.http2.goaway()
        self.flush()

    def abort(self, why: str) -> None:
        """Close at once: all calls are lost."""
        self._reason = why
        if self._transport is not None:
            self._transport.abort()

    # HTTP/2 callbacks

    def response_started(self, stream_id: int, headers: ReplyHeaders, end_stream: bool) -> None:
        """Pass on the headers of an answer."""
        call = self.calls.pop(stream_id, None) if end_stream else self.calls.get(stream_id)
        if call is not None:
            call.sink.response_started(headers, end_stream)

    def data_received(self, stream_id: int, data: bytes | memoryview, end_stream: bool) -> None:
        """Pass on a piece of an answer."""
        call = self.calls.pop(stream_id, None) if end_stream else self.calls.get(stream_id)
        if call is not None:
            call.sink.response_data(data, end_stream)

    def trailers_received(self, stream_id: int, trailers: ReplyHeaders) -> None:
        """Pass on the end of an answer."""
        call = self.calls.pop(stream_id, None)
        if call is not None:
            call.sink.trailers_received(trailers)

    def stream_closed(self, stream_id: int, error_code: int) -> None:
        """Report the loss of a call."""
        call = self.calls.pop(stream_id, None)
        if call is not None:
            why = self._reason or f"reset the call with {_name(error_code)}"
            call.lose(why, unprocessed=error_code == Http2ErrorCode.REFUSED_STREAM)

    def writable(self, stream_id: int) -> None:
        """Let a client go on."""
        call = self.calls.get(stream_id)
        if call is not None and not self.congested:
            call.sink.member_writable()

    def connection_closing(self, error_code: int, reason: str) -> None:
        """Remember why, for calls that are lost with the connection."""
        self._reason = f"ended the connection with {_name(error_code)}" + (f", '{reason[:200]}'" if reason else "")


class GrpcMemberSocket(asyncio.Protocol):
    """Connects a socket to its ``GrpcMemberConnection``."""

    def __init__(self, connection: GrpcMemberConnection) -> None:
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        tcp.notice_lost_host(transport)
        self._connection.opened(cast(asyncio.Transport, transport))  # uvloop's does not inherit from it

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._connection.lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass on what was read."""
        self._connection.receive(data)

    def pause_writing(self) -> None:
        """Apply backpressure."""
        self._connection.set_congested(True)

    def resume_writing(self) -> None:
        """End backpressure."""
        self._connection.set_congested(False)


def _name(error_code: int) -> str:
    try:
        return Http2ErrorCode(error_code).name
    except ValueError:
        return f"error {error_code}"
