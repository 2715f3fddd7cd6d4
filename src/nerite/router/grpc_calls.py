"""The calls of clients at the router: unary ones, and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from nerite.balancing.member import RoutedRequest
from nerite.core.errors import NeriteError
from nerite.core.request import CancelReason
from nerite.http2 import Buffer
from nerite.router.grpc_relay import CallRelay, RoutedTarget
from nerite.transports.access_log import AccessRecord
from nerite.transports.grpc import messages
from nerite.transports.grpc.connection import CallTarget, GrpcCall, GrpcConnection
from nerite.transports.limits import ByteReservation

BEGINNING: Final = 64 * 1024
"""Bytes of a stream's first message in which its model must be named."""
_STREAM_BYTES: Final = 16 * 1024
"""Memory that a stream takes, without what is kept."""


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


def _stalled(seconds: float) -> bytes:
    text = f"the message made no progress for {seconds:g} s. Send it faster, or in smaller messages."
    return messages.trailers_only(messages.DEADLINE_EXCEEDED, text)


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
            request = target.routed(framed)
        except NeriteError as error:
            self.fail(messages.of_error(error))
            return
        if request is not None:
            self._send(target, framed, request)
        else:
            work = partial(target.routed_aside, framed)
            self.connection.bounds.aside.run("router", work, partial(self._go_on, target, framed))

    def _go_on(self, target: RoutedTarget, framed: memoryview, found: RoutedRequest | NeriteError) -> None:
        """Send a call whose message was read in a thread, unless it has ended meanwhile."""
        if self.connection.calls.get(self.stream_id) is not self:
            return
        if isinstance(found, NeriteError):
            self.fail(messages.of_error(found))
        else:
            self._send(target, framed, found)

    def _send(self, target: RoutedTarget, framed: memoryview, request: RoutedRequest) -> None:
        timeout, self.deadline = _remaining(self.deadline), None
        self._relay = CallRelay(self, target, request, len(framed), timeout)
        self._relay.begin(framed, True)

    def stall(self, seconds: float) -> None:
        """Fail the call because its message made no progress."""
        self.fail(_stalled(seconds))

    def finish(self, status: str) -> None:
        """Forget the call."""
        _log(self.access, self._relay, status)
        self._end()

    def reply(self, head: bytes, parts: Sequence[Buffer], load: bytes = b"") -> None:
        """Send an answer of the router's own."""
        _log(self.access, None, messages.NAMES[messages.OK], sum(map(len, parts)))
        super().reply(head, parts, load)

    def fail(self, block: bytes) -> None:
        """Answer with a status."""
        _log(self.access, self._relay, messages.status_name(block))
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
            self._relay.cancel()

    def _stop(self, block: bytes) -> None:
        self.fail(block)
        if self._relay is not None:
            self._relay.cancel()


class RoutedStream:
    """A streaming call: it goes to the member that is chosen by its first message."""

    protocol = "GRPC"
    waits = True
    outer_span = None

    __slots__ = (
        "_beginning", "_messages", "_relay", "_target", "access", "connection", "deadline", "share", "stream_id",
    )  # fmt: skip

    def __init__(self, connection: GrpcConnection, stream_id: int, target: RoutedTarget) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self._target = target
        self.deadline: asyncio.TimerHandle | None = None
        self.share = ByteReservation(connection.bounds.bytes)
        self._beginning = bytearray()
        self._messages = target.messages()
        self._relay: CallRelay | None = None
        self.access: AccessRecord | None = None

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Pass on a piece of the stream."""
        following = self._messages
        try:
            following.feed(memoryview(data))
            if self._relay is None:
                self._beginning += data
                if end or len(self._beginning) >= BEGINNING:
                    following.settle()
        except NeriteError as error:
            self.abandon(error)
            return
        if self._relay is not None:
            self._relay.send(bytes(data), end)
        elif following.facts is not None:
            timeout, self.deadline = _remaining(self.deadline), None
            beginning, self._beginning = self._beginning, bytearray()
            request = self._target.request_of(following.facts)
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
        self.fail(_stalled(seconds))

    def fail(self, block: bytes) -> None:
        """Answer with a status."""
        self.finish(messages.status_name(block))
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
            self._relay.cancel()

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
                relay.cancel()
