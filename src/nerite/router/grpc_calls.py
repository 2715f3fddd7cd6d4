"""Calls of gRPC on their way through the router: both sides, and the backpressure between them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic_ns
from typing import Final, Protocol

from nerite.balancing.member import AttemptEnd, Member, RoutedRequest
from nerite.core.errors import NeriteError
from nerite.core.request import Caller, CancelReason
from nerite.http2 import Buffer, ReplyHeaders, encode_headers
from nerite.router.accounting import RoutedAccount
from nerite.router.exchange import RoutedExchange
from nerite.router.grpc_member import GrpcCallSink, GrpcMemberCall
from nerite.router.pools import RouterPool
from nerite.transports.access_log import AccessRecord
from nerite.transports.grpc import messages
from nerite.transports.grpc.connection import CallTarget, GrpcCall, GrpcConnection
from nerite.transports.limits import ByteReservation

_ENDS: Final[Mapping[int, AttemptEnd]] = {
    2: AttemptEnd.FAILED,
    messages.INTERNAL: AttemptEnd.FAILED,
    messages.UNAVAILABLE: AttemptEnd.REFUSED,
    15: AttemptEnd.FAILED,
}
"""Statuses for which the member is to blame. The others are answers."""
_BUFFERED: Final = 256 * 1024
"""Bytes of an answer that wait for the client, from which the member is paused."""
_KEPT: Final = 256 * 1024
"""Bytes of a stream that are kept so that it can begin at another member."""
BEGINNING: Final = 64 * 1024
"""Bytes of a stream's first message in which its model must be named."""
_STREAM_BYTES: Final = 16 * 1024
"""Memory that a stream takes, without what is kept."""


class CallRouter(Protocol):
    """What the calls need of the router."""

    def exchange(
        self, client: CallRelay, request: RoutedRequest, target: RoutedTarget, size: int, timeout: float
    ) -> RoutedExchange:
        """Return the exchange of a request, which has not begun. ``size`` is that of its message."""

    def call(self, member: Member, block: bytes, sink: GrpcCallSink) -> GrpcMemberCall:
        """Begin a call at a member."""

    def suspect(self, pool: RouterPool, member: Member, cause: str) -> None:
        """Take a member out until its health has been checked: it could not be reached."""


class RoutedTarget(CallTarget, Protocol):
    """Where the calls with one block of headers go."""

    router: CallRouter
    single: bool
    """A call has one answer."""
    level: str
    """Class that the client asks for."""
    caller: Caller | None
    """Who sends them, if they have to be admitted; None: they need not."""

    def block_for(self, member: Member, account: RoutedAccount | None) -> bytes:
        """Return the headers for a member. ``account`` is that of the ledger, if there is one."""

    def routed(self, message: memoryview, complete: bool) -> RoutedRequest | None:
        """Return what the choice of a member depends on; None if more of the message is needed.

        ``message`` begins with the prefix of five bytes. Raises ``NeriteError``.
        """

    def refusal_of(self, error: NeriteError) -> tuple[bytes, bytes]:
        """Return the block of headers and the message that answer a call for which there is no member."""


class ClientCall(Protocol):
    """The client's side of a call."""

    connection: GrpcConnection
    stream_id: int

    def finish(self, status: str) -> None:
        """Forget the call, whose answer is complete and has this status."""

    def fail(self, block: bytes) -> None:
        """Answer with a status, and forget the call."""


class CallRelay:
    """Passes one call on: its request to the member of the moment, and the answer back."""

    __slots__ = (
        "_client", "_ended", "_head", "_kept", "_kept_size", "_member_call", "_paused", "_place", "_stopped_reading",
        "_target", "_whole", "begun", "exchange", "received", "sent",
    )  # fmt: skip

    def __init__(
        self, client: ClientCall, target: RoutedTarget, request: RoutedRequest, size: int, timeout: float
    ) -> None:
        """``size`` is that of the message, or of what has come of it."""
        self._client = client
        self._target = target
        self._member_call: GrpcMemberCall | None = None
        self._place: tuple[RouterPool, Member] | None = None
        """Where that call is."""
        self._kept: list[Buffer] = []
        """What the client has sent, for the next member."""
        self._kept_size = 0
        self._whole = True
        """All that the client has sent was kept, and no call was begun again at the same member."""
        self._ended = False
        self._head: ReplyHeaders | None = None
        """Headers of an answer that has no data yet."""
        self._paused = False
        """The member waits for the client."""
        self._stopped_reading = False
        """The client waits for the member."""
        self.begun = False
        """The client has got a part of the answer."""
        self.received = self.sent = 0
        """Bytes of messages of the client, and for it."""
        self.exchange = target.router.exchange(self, request, target, size, timeout)

    def begin(self, data: Buffer, end: bool) -> None:
        """Send the beginning of the request, or all of it, which is kept until its answer begins."""
        self._kept.append(data)
        self._ended = end
        self.received = len(data)
        self.exchange.begin(monotonic_ns())

    # From the client

    def send(self, data: bytes, end: bool) -> None:
        """Pass on another part of a stream."""
        if self.exchange.over:
            return
        self._ended = end
        self.received += len(data)
        call = self._member_call
        if call is None or self.exchange.attempts:
            self._kept.append(data)
            self._kept_size += len(data)
        full = self._kept_size > _KEPT
        if call is not None:
            if full:
                self._drop()
            call.send((data,), end)
            full = call.full
        if full and not self._stopped_reading:
            self._stopped_reading = True
            self._client.connection.http2.pause(self._client.stream_id)

    def adjust(self) -> None:
        """Pause or resume the member, as the client reads."""
        connection = self._client.connection
        full = connection.congested or connection.http2.buffered(self._client.stream_id) >= _BUFFERED
        if full != self._paused and self._member_call is not None:
            self._paused = full
            self._member_call.pause(full)

    # For the exchange

    def _drop(self) -> None:
        """Keep the request no longer: it cannot be sent again."""
        self._kept = []
        self._whole = False
        self.exchange.attempts = 0

    def send_to(self, pool: RouterPool, member: Member) -> CallRelay:
        """Send the request to a member. The relay is the call, whichever the member's is."""
        self._head = None
        self._place = (pool, member)
        block = self._target.block_for(member, self.exchange.account)
        call = self._member_call = self._target.router.call(member, block, self)
        call.send(self._kept, self._ended)
        self._paused = False
        if not call.full:
            self.member_writable()
        return self

    def cancel(self) -> None:
        """Tell the member that its answer is no longer wanted."""
        if self._member_call is not None:
            self._member_call.cancel()

    def refuse(self, error: NeriteError) -> None:
        """Answer with an error."""
        head, message = self._target.refusal_of(error)
        if message:
            connection = self._client.connection
            self.sent = len(message)
            self._client.finish(messages.NAMES[messages.OK])
            connection.http2.reply(self._client.stream_id, head, (message,), messages.TRAILERS_OK)
            connection.answered()
        else:
            self._client.fail(head)

    def break_off(self, error: NeriteError) -> None:
        """End an answer that has begun with a status."""
        trailers = messages.trailers(error.grpc_status, error.message)
        connection = self._client.connection
        self._client.finish(messages.NAMES[error.grpc_status])
        connection.http2.send_trailers(self._client.stream_id, trailers)
        connection.answered()

    # From the member

    def response_started(self, headers: ReplyHeaders, end: bool) -> None:
        """Hold the headers until it is certain that no other member is asked, or take a status alone."""
        if headers.status != 200:
            if not end and self._member_call is not None:
                self._member_call.cancel()
            self.exchange.failed(AttemptEnd.FAILED, f"answered with HTTP status {headers.status}")
        elif end:
            self._take_status(headers)
        else:
            self._head = headers

    def response_data(self, data: Buffer, end: bool) -> None:
        """Pass on a piece of the answer."""
        http2 = self._client.connection.http2
        if self._head is not None:
            self._send_head(self._head)
        else:
            self.exchange.progress(1.0)
        if end:
            # gRPC ends with trailers.
            self.exchange.failed(AttemptEnd.FAILED, "ended an answer without a status")
            return
        self.sent += len(data)
        http2.send_data(self._client.stream_id, (data,))
        self.adjust()
        self._client.connection.answered()

    def trailers_received(self, trailers: ReplyHeaders) -> None:
        """Pass on the end of the answer."""
        self._take_status(trailers)

    def call_lost(self, why: str, unprocessed: bool) -> None:
        """Have another member asked, or the client told."""
        call, place = self._member_call, self._place
        if call is not None and place is not None:
            if call.connection is None:
                self._target.router.suspect(*place, why)
            elif unprocessed and call.connection.http2.leaving and self._whole:
                # The member has said goodbye while the call was on its way; its next connection takes it.
                self._whole = False
                self.send_to(*place)
                return
        self.exchange.failed(AttemptEnd.REFUSED if unprocessed else AttemptEnd.LOST, why, sent=not unprocessed)

    def member_writable(self) -> None:
        """Read from the client again."""
        if self._stopped_reading:
            self._stopped_reading = False
            self._client.connection.http2.resume(self._client.stream_id)
            self._client.connection.answered()

    def _send_head(self, head: ReplyHeaders) -> None:
        self._head = None
        self.begun = True
        self._drop()
        self.exchange.answer_begins()
        self._client.connection.http2.send_headers(self._client.stream_id, _block_of(head))

    def _take_status(self, trailers: ReplyHeaders) -> None:
        code = trailers.get(b"grpc-status") or b""
        status = int(code) if code.isdigit() and len(code) < 3 else 2
        name = messages.NAMES[status] if status < len(messages.NAMES) else str(status)
        how = _ENDS.get(status, AttemptEnd.ANSWERED)
        if status == messages.RESOURCE_EXHAUSTED and trailers.get(b"grpc-retry-pushback-ms"):
            how = AttemptEnd.REFUSED
        if how is AttemptEnd.REFUSED and self.exchange.refused(name):
            return
        connection, stream_id = self._client.connection, self._client.stream_id
        self._client.finish(name)
        if trailers.status:
            connection.http2.send_headers(stream_id, _block_of(trailers), end_stream=True)
        else:
            if self._head is not None:
                self._send_head(self._head)
            connection.http2.send_trailers(stream_id, _block_of(trailers))
        connection.answered()
        self.exchange.done(how, name)


def _block_of(headers: ReplyHeaders) -> bytes:
    """Return headers or trailers, encoded for any connection."""
    block: bytes | None = headers.memo
    if block is None:
        status = [(b":status", b"%d" % headers.status)] if headers.status else []
        block = headers.memo = encode_headers([*status, *headers.fields])
    return block


def _remaining(deadline: asyncio.TimerHandle | None) -> float:
    """Stop the client's deadline, which the exchange takes over; return the seconds that are left, or 0 for none."""
    if deadline is None:
        return 0.0
    deadline.cancel()
    return max(1e-6, deadline.when() - asyncio.get_running_loop().time())


def _log(access: AccessRecord | None, relay: CallRelay | None, status: str, sent: int = 0) -> None:
    """Write the line of a call in the access log, if there is one."""
    if access is None:
        return
    if relay is not None:
        request = relay.exchange.request
        access.model, access.version = request.model, request.version
        access.received, sent = relay.received, relay.sent
    access.answered(status, sent)


class RoutedCall(GrpcCall):
    """A unary call: its message is collected, then sent to a member."""

    __slots__ = ("_relay", "access")

    def __init__(self, connection: GrpcConnection, stream_id: int, target: CallTarget) -> None:
        super().__init__(connection, stream_id, target)
        self._relay: CallRelay | None = None
        self.access: AccessRecord | None = None

    def route(self, target: RoutedTarget, framed: memoryview) -> None:
        """Send the call to a member."""
        try:
            request = target.routed(framed, True)
        except NeriteError as error:
            self.fail(messages.of_error(error))
            return
        assert request is not None
        timeout, self.deadline = _remaining(self.deadline), None
        self._relay = CallRelay(self, target, request, len(framed), timeout)
        self._relay.begin(framed, True)

    def finish(self, status: str) -> None:
        """Forget the call."""
        _log(self.access, self._relay, status)
        self._end()

    def reply(self, head: bytes, parts: Sequence[Buffer]) -> None:
        """Send an answer of the router's own."""
        _log(self.access, None, messages.NAMES[messages.OK], sum(map(len, parts)))
        super().reply(head, parts)

    def fail(self, block: bytes) -> None:
        """Answer with a status."""
        _log(self.access, self._relay, messages.told(block))
        super().fail(block)

    def writable(self) -> None:
        """Let the member go on."""
        if self._relay is not None:
            self._relay.adjust()

    def block(self, blocked: bool) -> None:
        """Pause the member, or let it go on."""
        self.writable()

    def cancel(self, why: CancelReason) -> None:
        """Cancel the call at the member."""
        _log(self.access, self._relay, messages.NAMES[messages.CANCELLED])
        self._end()
        if self._relay is not None:
            self._relay.exchange.cancel()

    def _stop(self, block: bytes) -> None:
        self.fail(block)
        if self._relay is not None:
            self._relay.exchange.cancel()


class RoutedStream:
    """A streaming call: it goes to the member that is chosen by its first message."""

    protocol = "GRPC"
    waits = True
    outer_span = None

    __slots__ = ("_beginning", "_relay", "_target", "access", "connection", "deadline", "share", "stream_id")

    def __init__(self, connection: GrpcConnection, stream_id: int, target: RoutedTarget) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self._target = target
        self.deadline: asyncio.TimerHandle | None = None
        self.share = ByteReservation(connection.bounds.bytes)
        self._beginning = bytearray()
        self._relay: CallRelay | None = None
        self.access: AccessRecord | None = None

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Pass on a piece of the stream."""
        if self._relay is not None:
            self._relay.send(bytes(data), end)
            return
        self._beginning += data
        complete = end or len(self._beginning) >= BEGINNING
        try:
            request = self._target.routed(memoryview(self._beginning), complete)
        except NeriteError as error:
            self.fail(messages.of_error(error))
            return
        if request is not None:
            timeout, self.deadline = _remaining(self.deadline), None
            beginning, self._beginning = self._beginning, bytearray()
            self._relay = CallRelay(self, self._target, request, len(beginning), timeout)
            self._relay.begin(beginning, end)

    def expect(self) -> None:
        """Reserve memory for the stream."""
        if not self.share.take(_STREAM_BYTES):
            self.fail(messages.of_error(self.connection.bounds.bytes.refusal(_STREAM_BYTES)))

    @property
    def arriving(self) -> int | None:
        """Bytes of a first message that is still to be completed."""
        return len(self._beginning) or None

    def stall(self, seconds: float) -> None:
        """End a stream whose first message made no progress."""
        self.fail(messages.stalled(seconds))

    def fail(self, block: bytes) -> None:
        """Answer with a status."""
        self.finish(messages.told(block))
        self.connection.http2.send_headers(self.stream_id, block, end_stream=True)
        self.connection.answered()

    def finish(self, status: str) -> None:
        """Forget the stream."""
        _log(self.access, self._relay, status)
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        self.share.give_back()
        self.connection.calls.pop(self.stream_id, None)

    def writable(self) -> None:
        """Let the member go on."""
        if self._relay is not None:
            self._relay.adjust()

    def block(self, blocked: bool) -> None:
        """Pause the member, or let it go on."""
        self.writable()

    def shut_down(self) -> None:
        """Do nothing: the stream ends with its answer, or with the router."""

    def cancel(self, why: CancelReason) -> None:
        """Cancel the call at the member: the client is gone."""
        self.finish(messages.NAMES[messages.CANCELLED])
        if self._relay is not None:
            self._relay.exchange.cancel()

    def expire(self) -> None:
        """Answer that the deadline has passed: before the first message was complete."""
        self.deadline = None
        self.fail(messages.trailers_only(messages.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def abandon(self, error: NeriteError) -> None:
        """Answer with an error, and cancel the call at the member."""
        if self.connection.calls.get(self.stream_id) is self:
            relay = self._relay
            if relay is None or not relay.begun:
                self.fail(messages.of_error(error))
            else:
                relay.break_off(error)
            if relay is not None:
                relay.exchange.cancel()
