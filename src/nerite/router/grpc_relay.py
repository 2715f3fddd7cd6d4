"""One gRPC call through the router: its client's side, its attempts at members, and the backpressure between them."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic_ns
from typing import Final, Protocol

from nerite.balancing.member import AttemptEnd, LoadReport, Member, RoutedRequest, ServerKind
from nerite.core.errors import NeriteError
from nerite.core.request import Caller
from nerite.http2 import Buffer, ReplyHeaders, encode_headers
from nerite.router.accounting import RoutedAccount
from nerite.router.exchange import RoutedExchange
from nerite.router.grpc_member import GrpcCallSink, GrpcMemberCall
from nerite.router.grpc_routing import CallMessages, MessageFacts
from nerite.router.hedging import HedgedRelay
from nerite.router.load_reports import BINARY, load_report_in
from nerite.router.member_call import MemberCall
from nerite.router.pools import RouterPool
from nerite.transports.grpc import messages
from nerite.transports.grpc.connection import CallTarget, GrpcConnection

_ENDS: Final[Mapping[int, AttemptEnd]] = {
    2: AttemptEnd.FAILED,
    messages.INTERNAL: AttemptEnd.FAILED,
    messages.UNAVAILABLE: AttemptEnd.REFUSED,
    15: AttemptEnd.FAILED,
}
"""Statuses for which the member is to blame. The others are answers."""
_NOT_FOUND: Final = 5
_BUFFERED: Final = 256 * 1024
"""Bytes of an answer that wait for the client, from which the member is paused."""
_KEPT: Final = 256 * 1024
"""Bytes of a stream that are kept so that it can begin at another member."""


class CallRouter(Protocol):
    """What the calls need of the router."""

    @property
    def accounts(self) -> bool:
        """Whether calls are admitted or billed by the model of their first message."""

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
    reports: bool
    """The client asks for the load of members."""
    single: bool
    """A call has one answer."""
    level: str
    """Class that the client asks for."""
    waits: bool
    """They may wait for a member, or for a copy of their model."""
    caller: Caller | None
    """Who sends them, if they have to be admitted; None: they need not."""

    def block_for(self, member: Member, account: RoutedAccount | None, *, idle: bool, reports: bool) -> bytes:
        """Return the headers for a member.

        ``account`` is that of the ledger, if there is one. ``idle``: the class is the idle one. ``reports``: the member
        is asked for its load.
        """

    def routed(self, framed: memoryview) -> RoutedRequest | None:
        """Return what the choice of a member depends on; None if ``routed_aside`` has to find it.

        ``framed`` begins with the prefix of five bytes. Raises ``NeriteError``.
        """

    def routed_aside(self, framed: memoryview) -> RoutedRequest:
        """Return the same for a message that would block the event loop. Raises ``NeriteError``."""

    def messages(self) -> CallMessages:
        """Return what follows the messages of a stream."""

    def request_of(self, facts: MessageFacts) -> RoutedRequest:
        """Return what the choice of a member depends on, given what its first message says."""

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


class CallRelay(HedgedRelay):
    """The client's side of one call: passes its request to members, and the answer of one of them back."""

    __slots__ = (
        "_asks",
        "_call",
        "_client",
        "_kept_size",
        "_paused",
        "_stopped_reading",
        "begun",
        "ended",
        "kept",
        "received",
        "sent",
        "target",
        "whole",
    )  # fmt: skip

    def __init__(
        self, client: ClientCall, target: RoutedTarget, request: RoutedRequest, size: int, timeout: float
    ) -> None:
        """``size`` is that of the message, or of what has come of it."""
        super().__init__()
        self._client = client
        self.target = target
        self._call: CallAttempt | None = None
        """The attempt whose answer the client gets, or that of ``exchange`` while there is none."""
        self.kept: list[Buffer] = []
        """What the client has sent, for the next member."""
        self._kept_size = 0
        self.ended = False
        """The client has sent all of it."""
        self.whole = True
        """All that the client has sent was kept, and no call was begun again at the same member."""
        self._paused = False
        """The member waits for the client."""
        self._stopped_reading = False
        """The client waits for the member."""
        self._asks = True
        """The client has sent something since the last part of the answer."""
        self.begun = False
        """The client has got a part of the answer."""
        self.received = self.sent = 0
        """Bytes of messages of the client, and for it."""
        self.exchange = target.router.exchange(self, request, target, size, timeout)

    def begin(self, data: Buffer, end: bool) -> None:
        """Send the beginning of the request, or all of it, which is kept until its answer begins."""
        self.kept.append(data)
        self.ended = end
        self.received = len(data)
        self.exchange.begin(monotonic_ns())

    # From the client

    def send(self, data: bytes, end: bool) -> None:
        """Pass on another part of a stream."""
        if self.exchange.over:
            return
        self.ended = end
        self.received += len(data)
        self._asks = self.exchange.heard = True
        call = self._call
        if call is None or self.exchange.attempts:
            self.kept.append(data)
            self._kept_size += len(data)
        full = self._kept_size > _KEPT
        if call is not None:
            if full:
                self.drop()
            call.send(data, end)
            full = call.full
        if full and not self._stopped_reading:
            self._stopped_reading = True
            self._client.connection.http2.pause(self._client.stream_id)

    @property
    def owed(self) -> bool:
        """Whether the member is to send something. A client may keep a stream open and ask for nothing."""
        return (self._asks or self.ended) and not self._paused

    def adjust(self) -> None:
        """Pause or resume the member, as the client reads."""
        connection = self._client.connection
        full = connection.congested or connection.http2.buffered(self._client.stream_id) >= _BUFFERED
        if full != self._paused and self._call is not None:
            self._paused = full
            self._call.pause(full)

    def cancel(self) -> None:
        """End the request: the client no longer waits."""
        self.end_hedge()
        self.exchange.cancel()

    # For the exchanges

    def send_to(self, pool: RouterPool, member: Member) -> MemberCall:
        """Send the request to a member, and after a while to another one if requests are hedged."""
        self.hedge_if_late(pool)
        self._paused = False
        call = self._call = self.begin_call(pool, member, self.exchange)
        if not call.full:
            self.member_writable()
        return call

    def begin_call(self, pool: RouterPool, member: Member, exchange: RoutedExchange) -> CallAttempt:
        """Send what has come of the request to a member."""
        call = CallAttempt(self, exchange, pool, member)
        call.start()
        return call

    def send_error(self, error: NeriteError) -> None:
        """Answer with an error."""
        head, message = self.target.refusal_of(error)
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

    def drop(self) -> None:
        """Keep the request no longer: it cannot be sent again."""
        self.kept = []
        self.whole = False
        self.exchange.attempts = 0

    def forget_call(self) -> bool:
        """Keep what the client sends for the next member, if the request waits for one; return whether it does."""
        if self.exchange.waiting:
            self._call = None
        return self.exchange.waiting

    # From the attempts

    def claim(self, call: CallAttempt) -> None:
        """Give the answer to an attempt: its exchange has won."""
        self._call = call
        self.won(call.exchange)

    def send_head(self, call: CallAttempt, head: ReplyHeaders) -> None:
        """Begin the answer: no other member is asked any more."""
        self.claim(call)
        self.begun = True
        self.drop()
        call.exchange.answer_begins()
        self._client.connection.http2.send_headers(self._client.stream_id, _block_of(head))

    def send_data(self, data: Buffer) -> None:
        """Pass on a piece of the answer."""
        self.sent += len(data)
        self._asks = False
        self._client.connection.http2.send_data(self._client.stream_id, (data,))
        self.adjust()
        self._client.connection.answered()

    def send_status(self, trailers: ReplyHeaders, name: str, report: bytes | None) -> None:
        """Pass on the end of the answer. ``report`` is the load in it, if that is not for the client."""
        connection, stream_id = self._client.connection, self._client.stream_id
        self._client.finish(name)
        block = _block_of(trailers) if report is None else _block_without(trailers, BINARY)
        if trailers.status:
            connection.http2.send_headers(stream_id, block, end_stream=True)
        else:
            connection.http2.send_trailers(stream_id, block)
        connection.answered()

    def member_writable(self) -> None:
        """Read from the client again."""
        if self._stopped_reading:
            self._stopped_reading = False
            self._client.connection.http2.resume(self._client.stream_id)
            self._client.connection.answered()


class CallAttempt:
    """The call at one member, and what comes of it."""

    __slots__ = ("_call", "_head", "_member", "_pool", "_relay", "exchange")

    def __init__(self, relay: CallRelay, exchange: RoutedExchange, pool: RouterPool, member: Member) -> None:
        self._relay = relay
        self.exchange = exchange
        self._pool = pool
        self._member = member
        self._call: GrpcMemberCall
        self._head: ReplyHeaders | None = None
        """Headers of an answer that has no data yet."""

    def start(self) -> None:
        """Send what there is of the request."""
        relay, member = self._relay, self._member
        idle = self.exchange.idle_class and member.kind is ServerKind.NERITE
        reports = self.exchange.request.prompt_tokens > 0
        block = relay.target.block_for(member, relay.exchange.account, idle=idle, reports=reports)
        self._head = None
        call = self._call = relay.target.router.call(member, block, self)
        try:
            call.send(relay.kept, relay.ended)
        except Exception:
            call.cancel()
            raise

    def send(self, data: bytes, end: bool) -> None:
        """Pass on another part of a stream."""
        self._call.send((data,), end)

    @property
    def full(self) -> bool:
        """Whether the member does not read as fast as the client sends."""
        return self._call.full

    @property
    def owed(self) -> bool:
        """Whether the member is to send something: the client has asked for it, and reads."""
        return self._relay.owed

    def pause(self, paused: bool) -> None:
        """Have the member send no more than its window, or go on."""
        self._call.pause(paused)

    def cancel(self) -> None:
        """Tell the member that its answer is no longer wanted."""
        self._call.cancel()

    # From the member

    def response_started(self, headers: ReplyHeaders, end: bool) -> None:
        """Hold the headers until it is certain that no other member is asked, or take a status alone."""
        if headers.status != 200:
            if not end:
                self._call.cancel()
            self.exchange.failed(AttemptEnd.FAILED, f"answered with HTTP status {headers.status}")
        elif end:
            self._take_status(headers)
        else:
            self._head = headers

    def response_data(self, data: Buffer, end: bool) -> None:
        """Pass on a piece of the answer."""
        self.exchange.heard = True
        if self._head is not None:
            head, self._head = self._head, None
            self._relay.send_head(self, head)
        else:
            self.exchange.progress(1.0)
        if end:
            # gRPC ends with trailers.
            self.exchange.failed(AttemptEnd.FAILED, "ended an answer without a status")
            return
        self._relay.send_data(data)

    def trailers_received(self, trailers: ReplyHeaders) -> None:
        """Pass on the end of the answer."""
        self._take_status(trailers)

    def call_lost(self, why: str, unprocessed: bool) -> None:
        """Have another member asked, or the client told."""
        call, relay = self._call, self._relay
        if call.connection is None:
            relay.target.router.suspect(self._pool, self._member, why)
        elif unprocessed and call.connection.http2.leaving and relay.whole:
            # The member began to shut down while the call was on its way; its next connection takes it.
            relay.whole = False
            self.start()
            return
        self.exchange.failed(AttemptEnd.REFUSED if unprocessed else AttemptEnd.LOST, why, sent=not unprocessed)
        if relay.forget_call():
            relay.target.router.suspect(self._pool, self._member, why)

    def member_writable(self) -> None:
        """Read from the client again."""
        self._relay.member_writable()

    def _take_status(self, trailers: ReplyHeaders) -> None:
        relay, exchange = self._relay, self.exchange
        code = trailers.get(b"grpc-status") or b""
        if not (code.isdigit() and len(code) < 3):
            exchange.failed(AttemptEnd.FAILED, "ended an answer without a status")
            return
        status = int(code)
        name = messages.NAMES[status] if status < len(messages.NAMES) else str(status)
        how = _ENDS.get(status, AttemptEnd.ANSWERED)
        if status == messages.RESOURCE_EXHAUSTED and trailers.get(b"grpc-retry-pushback-ms"):
            how = AttemptEnd.REFUSED
        line = trailers.get(BINARY)
        report: LoadReport | None = load_report_in(line) if line else None
        if how is AttemptEnd.REFUSED and exchange.refused(name, report):
            return
        if status == _NOT_FOUND and exchange.not_found(name, report):
            relay.forget_call()
            return
        if how is not AttemptEnd.ANSWERED and relay.leaves_to_first(exchange):
            exchange.failed(how, f"answered {name}")
            return
        relay.claim(self)
        if self._head is not None:
            head, self._head = self._head, None
            relay.send_head(self, head)
        relay.send_status(trailers, name, None if relay.target.reports else line)
        exchange.done(how, name, report)


def _block_without(headers: ReplyHeaders, name: bytes) -> bytes:
    """Return trailers without a field, encoded."""
    status = [(b":status", b"%d" % headers.status)] if headers.status else []
    return encode_headers([*status, *(each for each in headers.fields if each[0] != name)])


def _block_of(headers: ReplyHeaders) -> bytes:
    """Return headers or trailers, encoded for any connection."""
    block: bytes | None = headers.memo
    if block is None:
        status = [(b":status", b"%d" % headers.status)] if headers.status else []
        block = headers.memo = encode_headers([*status, *headers.fields])
    return block
