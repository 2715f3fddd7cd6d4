"""One HTTP request through the router: its client's side, and its calls to members."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from nerite.balancing.member import AttemptEnd, LoadReport, Member, ServerKind
from nerite.balancing.response_ids import TAG_HEADER, member_tag
from nerite.core.errors import NeriteError
from nerite.core.execution_observer import REQUEST_ID
from nerite.core.request import CancelReason, RequestHeader
from nerite.core.tensor import Buffer
from nerite.router.exchange import MemberCall, RoutedExchange
from nerite.router.hedging import HedgedRelay
from nerite.router.http_members import HttpMembers
from nerite.router.http_targets import BodyKind, RouteTarget
from nerite.router.load_reports import load_report
from nerite.router.member_connection import MemberConnection, MemberConnections
from nerite.router.pools import RouterPool
from nerite.router.response_body import ChunkScanner, pieces_of
from nerite.router.response_head import REPORT, ResponseHead
from nerite.transports.http import reply
from nerite.transports.http.connection import HttpConnection
from nerite.transports.http.head import field_line

_OVERLOADED: Final = (429, 503)
"""Statuses that say that a member has not begun."""
_NOT_FOUND: Final = 404
_KSERVE: Final = (BodyKind.TENSORS, BodyKind.TEXT)
"""Requests for which this status says that the member does not have the model."""
_USAGE_BYTES: Final = 1024
"""Bytes at the end of what has come of an answer, and at its beginning, in which ``usage`` is looked for."""
_TOKENS: Final = b'_tokens"'
_COUNT: Final = re.compile(
    rb'"(prompt|input|completion|output|cached|cache_read_input|cache_creation_input)_tokens"\s*:\s*([0-9]{1,9})(?=\s*[,}])'
)
"""A count in ``usage``, under the names of completions, of responses, and of Anthropic's messages."""
_CHUNKED: Final = b"Transfer-Encoding: chunked\r\n"


class HttpRelay(HedgedRelay):
    """The client's side: sends the answer of a member, or an error."""

    __slots__ = (
        "_begun",
        "_body",
        "_call",
        "_client",
        "_plain",
        "_scanner",
        "_stream",
        "attempt",
        "members",
        "span",
        "target",
    )

    id = ""

    def __init__(
        self, client: HttpConnection, target: RouteTarget, body: memoryview, members: HttpMembers, span: bytes
    ) -> None:
        """``span`` has the header lines of the trace context. ``exchange`` is set by the owner."""
        super().__init__()
        self._client = client
        self.target = target
        self._body: memoryview | None = body
        self.members = members
        self.span = span
        self.attempt = ""
        """Id of an attempt at an item of a batch; empty for requests of clients."""
        self._call: HttpCall | None = None
        self._begun = False
        self._stream = False
        self._plain = False
        """The client speaks HTTP/1.0, which knows no chunks."""
        self._scanner: ChunkScanner | None = None

    # The work of the client's connection.

    @property
    def header(self) -> RequestHeader:
        """The model, for the access log."""
        request = self.exchange.request
        return RequestHeader(request.model, request.version, ())

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """End the request: the client is gone."""
        self.end_hedge()
        self.exchange.cancel()

    def pause(self, paused: bool) -> None:
        """Stop reading the answer, or go on."""
        if self._call is not None:
            self._call.pause(paused)

    # The client of the exchange.

    def send_to(self, pool: RouterPool, member: Member) -> MemberCall:
        """Send the request to a member, and after a while to another one if requests are hedged."""
        self.hedge_if_late(pool)
        return self.begin_call(pool, member, self.exchange)

    def begin_call(self, pool: RouterPool, member: Member, exchange: RoutedExchange) -> HttpCall:
        """Send the request to a member for an exchange."""
        body = self._body
        assert body is not None
        connections = self.members.of(member)
        idle = exchange.idle_class and member.kind is ServerKind.NERITE
        more = self.span
        if member.kind is ServerKind.NERITE:
            more += self.target.identity
            if self.target.responses:
                more += field_line(TAG_HEADER, member_tag(member.name))
            account = self.exchange.account
            if request_id := self.attempt if account is None else account.request_id:
                more += field_line(REQUEST_ID, request_id)
        head = self.target.request(connections.address.encode(), len(body), more, idle=idle)
        call = HttpCall(self, exchange, connections, [head, body] if body else [head])
        call.start(pool, member)
        return call

    def send_error(self, error: NeriteError) -> None:
        """Answer with an error."""
        self._client.send([self.target.reply(error).encode()])

    def claim(self, call: HttpCall) -> None:
        """Give the answer to a call: its exchange has won."""
        self._call = call
        self.won(call.exchange)

    def break_off(self, error: NeriteError) -> None:
        """End a stream of events with an event that tells the error; break the connection of any other answer."""
        self._call = None
        self.end_hedge()
        whole = self._scanner is None or self._scanner.between
        if not (self._stream and whole) or self._plain:
            self._client.abort()
            return
        self._client.send_chunk(self.target.last_event(error))
        self._client.close_reply()

    # What the call passes on.

    def first_of(self, head: ResponseHead, load: bytes) -> bytes:
        """Return the head for the client."""
        if load and self.target.passes_load:
            return reply.with_header(head.first, b"%b: %b" % (REPORT, load))
        return head.first

    def answer(self, head: ResponseHead, load: bytes, body: Buffer) -> None:
        """Send a whole answer."""
        self._body = self._call = None
        first = self.first_of(head, load)
        if head.closes:
            first = first.replace(_CHUNKED, b"Content-Length: %d\r\n" % len(body))
        self._client.send([first, body] if len(body) else [first])

    def open(self, head: ResponseHead, load: bytes) -> None:
        """Send the head of an answer whose body follows."""
        self._body = None
        self._begun = True
        self._stream = head.events
        self._plain = self._client.head.version == "1.0"
        self._client.open(self.first_of(head, load))
        if not self._client.writable and self._call is not None:
            self._call.pause(True)

    def pass_on(self, data: Buffer, scanner: ChunkScanner | None, *, closes: bool) -> None:
        """Send a part of the body."""
        client = self._client
        self._scanner = scanner
        if closes:
            client.send_pieces([data])
        elif scanner is not None and self._plain:
            for piece in pieces_of(bytes(data), scanner):
                client.send_bytes(piece)
        else:
            client.send_bytes(data)

    def end(self, *, closes: bool) -> None:
        """End the answer."""
        self._call = None
        if closes:
            self._client.close_reply()
        else:
            self._client.end_reply()


class HttpCall:
    """A request at one member."""

    __slots__ = (
        "_closes", "_connection", "_connections", "_counts", "_fresh", "_load", "_member", "_parts", "_pool", "_relay",
        "_status", "_tail", "_tokens", "exchange",
    )  # fmt: skip

    def __init__(
        self, relay: HttpRelay, exchange: RoutedExchange, connections: MemberConnections, parts: list[Buffer]
    ) -> None:
        self._relay = relay
        self.exchange = exchange
        self._connections = connections
        self._parts = parts
        self._pool: RouterPool
        self._member: Member
        self._connection: MemberConnection | None = None
        self._fresh = False
        self._status = 0
        self._closes = False
        self._load = b""
        self._tokens = 0
        self._counts: dict[bytes, int] = {}
        """Tokens that the member has counted, by what they are of."""
        self._tail = b""
        """End of what has come of the answer."""

    def start(self, pool: RouterPool, member: Member) -> None:
        """Send the request when there is a connection."""
        self._pool, self._member = pool, member
        # A kept connection may be closed by the member at this moment; what must not be sent twice needs a new one.
        self._fresh = not self._relay.target.repeatable or not self.exchange.request.repeatable
        self._connections.acquire(self, fresh=self._fresh)

    def cancel(self) -> None:
        """Close the connection, which is how HTTP/1.1 cancels."""
        if self._connection is None:
            self._connections.withdraw(self)
        else:
            self._connection.abandon()
            self._connection = None

    def pause(self, paused: bool) -> None:
        """Stop reading the answer, or go on."""
        if self._connection is not None:
            self._connection.pause(paused)

    # The waiter of a connection.

    def connected(self, connection: MemberConnection) -> None:
        """Send the request."""
        self._connection = connection
        connection.request(self, self._parts, bodiless=self._relay.target.bodiless)

    def unconnected(self, cause: str) -> None:
        """Report that the member cannot be reached."""
        self._relay.members.suspect(self._pool, self._member, cause)
        self.exchange.failed(AttemptEnd.LOST, cause, sent=False)

    # The taker of the response.

    def take_whole(self, head: ResponseHead, load: bytes, body: Buffer) -> None:
        """Send the answer, or have another member asked."""
        self._connection = None
        exchange = self.exchange
        status = head.status
        known = load_report(load) if load else None
        if status in _OVERLOADED and self._refused(status, known):
            return
        if status == _NOT_FOUND and self._relay.target.kind in _KSERVE and exchange.not_found(str(status), known):
            return
        self._relay.claim(self)
        exchange.answer_begins()
        if self._relay.target.openai:
            self._take_usage(body)
        self._relay.answer(head, load, body)
        exchange.done(_end_of(status), str(status), known)

    def take_head(self, head: ResponseHead, load: bytes) -> None:
        """Begin the answer, or have another member asked."""
        exchange = self.exchange
        self._status, self._closes, self._load = head.status, head.closes, load
        known = load_report(load) if load else None
        if head.status in _OVERLOADED:
            connection = self._connection
            if self._refused(head.status, known):
                if connection is not None:
                    connection.abandon()
                self._connection = None
                return
        self._relay.claim(self)
        exchange.answer_begins(known)
        self._relay.open(head, load)
        self._parts = []

    def _refused(self, status: int, known: LoadReport | None) -> bool:
        """Whether another member answers instead of this one, which is overloaded."""
        exchange = self.exchange
        if exchange.refused(str(status), known):
            return True
        left = self._relay.leaves_to_first(exchange)
        if left:
            exchange.failed(AttemptEnd.REFUSED, f"answered with status {status}")
        return left

    def take_data(self, data: Buffer, scanner: ChunkScanner | None) -> None:
        """Send a part of the answer."""
        self._relay.pass_on(data, scanner, closes=self._closes)
        if scanner is not None and scanner.chunks > self._tokens:
            self.exchange.progress(scanner.chunks - self._tokens)
            self._tokens = scanner.chunks
        if self._relay.target.openai:
            self._take_usage(data)

    def _take_usage(self, data: Buffer) -> None:
        """Report the tokens that the member has counted, if their numbers have come, which may be in pieces."""
        size = len(data)
        if self._tail or size <= 2 * _USAGE_BYTES:
            text = self._tail + bytes(data[-_USAGE_BYTES:] if self._tail else data)
        else:
            text = b"%b\n%b" % (bytes(data[:_USAGE_BYTES]), bytes(data[-_USAGE_BYTES:]))
        self._tail = text[-_USAGE_BYTES:]
        if _TOKENS in text and (found := _COUNT.findall(text)):
            self._counts.update((name, int(number)) for name, number in found)
            self.exchange.used(*_used(self._counts))

    def take_end(self) -> None:
        """End the answer."""
        self._connection = None
        self._relay.end(closes=self._closes)
        self.exchange.done(_end_of(self._status), str(self._status))

    def take_loss(self, cause: str, *, stale: bool) -> None:
        """Try a new connection if a kept one was closed meanwhile; otherwise report the loss."""
        self._connection = None
        if stale and not self._fresh:
            self._fresh = True
            self._connections.acquire(self, fresh=True)
        else:
            self.exchange.failed(AttemptEnd.LOST, cause)
            if self.exchange.waiting:
                self._relay.members.suspect(self._pool, self._member, cause)


def _used(counts: Mapping[bytes, int]) -> tuple[int, int, int]:
    """Return the tokens of the prompt, of the answer, and of the cached part of the prompt."""
    prompt = counts.get(b"prompt", counts.get(b"input", 0))
    answer = counts.get(b"completion", counts.get(b"output", 0))
    # Anthropic's count of a prompt leaves out what the other two count.
    read = counts.get(b"cache_read_input", 0)
    return prompt + read + counts.get(b"cache_creation_input", 0), answer, counts.get(b"cached", read)


def _end_of(status: int) -> AttemptEnd:
    if status in _OVERLOADED:
        return AttemptEnd.REFUSED
    return AttemptEnd.FAILED if status >= 500 and status != 501 else AttemptEnd.ANSWERED
