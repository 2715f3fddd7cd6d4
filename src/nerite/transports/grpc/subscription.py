"""Calls with one question and any number of answers, which the server sends until one side ends the call."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final

from nerite.core.errors import NeriteError
from nerite.core.request import CancelReason
from nerite.transports.grpc import messages
from nerite.transports.limits import ByteReservation

if TYPE_CHECKING:
    from nerite.transports.grpc.stream import StreamConnection

_PREFIX_SIZE: Final = 5
_CALL_BYTES: Final = 16 * 1024


class Subscription(ABC):
    """One such call. Answers are small: they are sent even if the client does not read for a while."""

    protocol = "GRPC"
    waits = True
    outer_span = None

    __slots__ = ("_begun", "_message", "connection", "deadline", "share", "stream_id")

    def __init__(self, connection: StreamConnection, stream_id: int) -> None:
        self.connection = connection
        self.stream_id = stream_id
        self._message = bytearray()
        self._begun = False
        """The question was accepted."""
        self.deadline: asyncio.TimerHandle | None = None
        self.share = ByteReservation(connection.bounds.bytes)

    @abstractmethod
    def begin(self, message: bytes) -> None:
        """Send the first answer with ``tell``, and go on. Raises ``NeriteError`` for an invalid question."""

    @abstractmethod
    def forget(self) -> None:
        """Answer no more. Called once for each call, whether it has begun or not."""

    def tell(self, answer: bytes) -> None:
        """Send an answer. A client that has not read the last megabyte of them loses the call."""
        if not self._alive:
            return
        if (self.connection.congested or self.connection.http2.queued) and self.connection.full:
            self._end(messages.RESOURCE_EXHAUSTED, messages.UNREAD_TEXT)
            return
        if not self._begun:
            self._begun = True
            self.connection.http2.send_headers(self.stream_id, messages.HEAD)
        self.connection.http2.send_data(self.stream_id, [messages.framed(answer)])
        self.connection.answered()

    def _end(self, status: int, text: str) -> None:
        self._discard()
        if self._begun:
            self.connection.http2.send_trailers(self.stream_id, messages.trailers(status, text))
        else:
            self.connection.http2.send_headers(self.stream_id, messages.trailers_only(status, text), end_stream=True)
        self.connection.answered()

    def _discard(self) -> None:
        self.forget()
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        self.share.give_back()
        self.connection.calls.pop(self.stream_id, None)

    @property
    def _alive(self) -> bool:
        return self.connection.calls.get(self.stream_id) is self

    # For the connection

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Take a piece of the only message, and begin to answer once it is complete."""
        if self._begun:
            return
        self._message += data
        size = int.from_bytes(self._message[1:_PREFIX_SIZE]) if len(self._message) >= _PREFIX_SIZE else 0
        most = messages.MAX_QUESTION
        if size > most or len(self._message) > _PREFIX_SIZE + most:
            self._end(messages.RESOURCE_EXHAUSTED, f"Received message larger than max ({most})")
        elif len(self._message) >= _PREFIX_SIZE and len(self._message) == _PREFIX_SIZE + size:
            try:
                self.begin(bytes(self._message[_PREFIX_SIZE:]))
            except NeriteError as error:
                self.abandon(error)
        elif end or len(self._message) > _PREFIX_SIZE + size > _PREFIX_SIZE:
            self._end(messages.INTERNAL, "the call does not carry exactly one message")

    def expect(self) -> None:
        """Reserve memory for the call."""
        if not self.share.take(_CALL_BYTES):
            self.abandon(self.connection.bounds.bytes.refusal(_CALL_BYTES))

    @property
    def arriving(self) -> int | None:
        """Bytes of a message that is incomplete."""
        return None if self._begun else len(self._message)

    def stall(self, seconds: float) -> None:
        """End the call because its message made no progress."""
        self._end(messages.DEADLINE_EXCEEDED, messages.stalled_text(seconds))

    def block(self, blocked: bool) -> None:  # noqa: B027
        """Do nothing: an answer is a few bytes."""

    def writable(self) -> None:  # noqa: B027
        """Do nothing: an answer is a few bytes."""

    def shut_down(self) -> None:
        """End the call: the server stops, and the client asks another one."""
        self._end(messages.OK, "")

    def cancel(self, why: CancelReason) -> None:
        """Forget the call: the client has given it up."""
        self._discard()

    def expire(self) -> None:
        """End the call: its deadline has passed."""
        self.deadline = None
        self._end(messages.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def abandon(self, error: NeriteError) -> None:
        """End the call with an error."""
        if self._alive:
            self._end(error.grpc_status, error.message)
