"""A call of ``Process`` on the picker's port: messages of a gateway in, answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from google.protobuf.message import DecodeError

from nerite.core.errors import NeriteError
from nerite.core.request import CancelReason
from nerite.picker.session import PickSession
from nerite.transports.grpc import messages
from nerite.transports.grpc.connection import GrpcConnection
from nerite.transports.limits import ByteReservation
from nerite.wire import ext_proc as wire

_PREFIX_SIZE: Final = 5
_STREAM_BYTES: Final = 16 * 1024
_BUFFERED: Final = 1024 * 1024
"""Bytes of answers that wait for the gateway, from which no more messages are read."""


class PickSessions:
    """What the calls to ``Process`` share."""

    def __init__(self, make: Callable[[], PickSession], max_message: int) -> None:
        self.make = make
        self.max_message = max_message


class ProcessStream:
    """One call of ``Process``."""

    protocol = "GRPC"
    waits = True
    outer_span = None

    __slots__ = ("_begun", "_held", "_paused", "_session", "_target", "connection", "deadline", "share", "stream_id")

    def __init__(self, connection: GrpcConnection, stream_id: int, target: PickSessions) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self._target = target
        self._session = target.make()
        self._held = bytearray()
        """Beginning of an incomplete message."""
        self._begun = False
        self._paused = False
        self.deadline: asyncio.TimerHandle | None = None
        self.share = ByteReservation(connection.bounds.bytes)

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Answer the messages in a piece of the call."""
        self._held += data
        start = 0
        while len(self._held) - start >= _PREFIX_SIZE and self._alive:
            size = int.from_bytes(self._held[start + 1 : start + _PREFIX_SIZE])
            if self._held[start]:
                self._end(messages.UNIMPLEMENTED, "compressed messages are not supported")
                return
            if size > self._target.max_message:
                text = f"Received message larger than max ({size} vs. {self._target.max_message})"
                self._end(messages.RESOURCE_EXHAUSTED, text)
                return
            stop = start + _PREFIX_SIZE + size
            if stop > len(self._held):
                break
            self._take(bytes(memoryview(self._held)[start + _PREFIX_SIZE : stop]))
            start = stop
        del self._held[:start]
        if self._alive:
            self._reserve()
        if end and self._alive:
            self._end(messages.OK, "")

    def _reserve(self) -> None:
        """Reserve memory for what is kept; refuse the request if there is none."""
        more = _STREAM_BYTES + len(self._held) + self._session.kept - self.share.size
        if more <= 0:
            self.share.give_back(-more)
        elif not self.share.take(more):
            error = self.connection.bounds.bytes.refusal(more)
            if self._session.decided:
                self.abandon(error)
            else:
                self._send([self._session.refuse(error)])
                self._end(messages.OK, "")

    def _take(self, message: bytes) -> None:
        try:
            request = wire.ProcessingRequest.FromString(message)
        except DecodeError:
            self._end(messages.INTERNAL, "a message is not a ProcessingRequest")
            return
        self._send(self._session.take(request))

    def _send(self, answers: Iterable[wire.ProcessingResponse]) -> None:
        parts = [messages.framed(answer.SerializeToString()) for answer in answers]
        if not parts:
            return
        http2 = self.connection.http2
        if not self._begun:
            self._begun = True
            http2.send_headers(self.stream_id, messages.HEAD)
        http2.send_data(self.stream_id, parts)
        self._adjust()
        self.connection.answered()

    @property
    def _alive(self) -> bool:
        return self.connection.calls.get(self.stream_id) is self

    def _adjust(self) -> None:
        """Read no more messages while the gateway does not read answers."""
        http2 = self.connection.http2
        full = self.connection.congested or http2.buffered(self.stream_id) >= _BUFFERED
        if full != self._paused:
            self._paused = full
            (http2.pause if full else http2.resume)(self.stream_id)

    def _end(self, status: int, text: str) -> None:
        """End the call with a status."""
        self._forget(cancelled=status != messages.OK)
        if self._begun:
            self.connection.http2.send_trailers(self.stream_id, messages.trailers(status, text))
        else:
            self.connection.http2.send_headers(self.stream_id, messages.trailers_only(status, text), end_stream=True)
        self.connection.answered()

    def _forget(self, *, cancelled: bool) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        self.share.give_back()
        self.connection.calls.pop(self.stream_id, None)
        self._session.close(cancelled=cancelled)

    # For the connection

    def expect(self) -> None:
        """Reserve memory for the call."""
        if not self.share.take(_STREAM_BYTES):
            self.abandon(self.connection.bounds.bytes.refusal(_STREAM_BYTES))

    @property
    def arriving(self) -> int | None:
        """Bytes of a message that is incomplete."""
        return len(self._held) or None

    def stall(self, seconds: float) -> None:
        """End the call because a message made no progress."""
        self._end(messages.DEADLINE_EXCEEDED, messages.stalled_text(seconds))

    def block(self, blocked: bool) -> None:
        """Read no more messages, or go on."""
        self._adjust()

    def writable(self) -> None:
        """Read messages again."""
        self._adjust()

    def shut_down(self) -> None:
        """Do nothing: the call ends with its request."""

    def cancel(self, why: CancelReason) -> None:
        """Note that the gateway gave up the request."""
        self._forget(cancelled=True)

    def expire(self) -> None:
        """End the call: its deadline has passed."""
        self.deadline = None
        self._end(messages.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def abandon(self, error: NeriteError) -> None:
        """End the call with an error."""
        if self._alive:
            self._end(error.grpc_status, error.message)
