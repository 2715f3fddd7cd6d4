"""A connection to Redis without a task for each command: commands are pipelined, replies are passed to callbacks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import hiredis

from nerite.core.failures import report

Reply = bytes | int | list[int] | Exception | None
"""None: no such key. An exception: Redis returned an error, or the connection was lost first."""
Answered = Callable[[Reply], None]

_SEND_BUFFER: Final = 16 * 1024 * 1024
"""Size of the send buffer in bytes above which no commands are sent until Redis catches up."""
_INCOMPLETE: Final = object()
MAX_REPLY: Final = 16 * 1024 * 1024
"""Size of a reply in bytes, unless values may be larger."""


class RedisConnection(asyncio.Protocol):
    """Connection to Redis that pipelines the commands of one loop turn. Each command gets exactly one reply.

    Replies arrive in the order of the commands. If the connection is lost, the outstanding commands get an exception.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        patience: float,
        lost: Callable[[RedisConnection, Exception], None],
        max_reply: int = MAX_REPLY,
    ) -> None:
        """``patience``: timeout of a reply in seconds, after which the connection is closed; 0 for none.

        ``lost`` is called once when the connection has ended, after all outstanding commands got their exception. A
        reply of more than ``max_reply`` bytes ends it: what has arrived of a reply is kept until it is complete.
        """
        self._max_reply = max_reply
        self._received = 0
        """Bytes that have arrived since the last complete reply."""
        self._loop = loop
        self._patience = patience
        self._lost = lost
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._asked: deque[tuple[float, Answered]] = deque()
        """Callbacks of the outstanding commands, with the times at which they were sent."""
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport
        self._reason: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.full = False
        """The send buffer is full because Redis does not keep up."""

    def ask(self, command: Sequence[bytes], answered: Answered) -> None:
        """Send a command."""
        self._asked.append((self._loop.time(), answered))
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(b"*%d\r\n" % len(command))
        for word in command:
            self._unsent += (b"$%d\r\n" % len(word), word, b"\r\n")
        if self._timer is None and self._patience:
            self._timer = self._loop.call_later(self._patience, self._check_timeout)

    def close(self, reason: Exception) -> None:
        """Abort the connection; ``reason`` is passed to the outstanding commands."""
        self._reason = self._reason or reason
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport and set the limit of its send buffer."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_SEND_BUFFER)

    def data_received(self, data: bytes) -> None:
        """Deliver the complete replies."""
        self._reader.feed(data)
        self._received += len(data)
        try:
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                if not self._asked:
                    raise hiredis.ProtocolError("an unexpected reply")
                self._received = 0
                self._answer(_plain(reply))
            if self._received > self._max_reply:
                raise hiredis.ProtocolError(f"a reply of more than {self._max_reply} bytes")
        except (hiredis.ProtocolError, MemoryError) as error:
            self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)  # frees what it has kept
            self.close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all outstanding commands."""
        reason = self._reason or exc or ConnectionResetError("Redis has closed the connection")
        if self._timer is not None:
            self._timer.cancel()
        while self._asked:
            self._answer(reason)
        self._lost(self, reason)

    def _answer(self, reply: Reply) -> None:
        """Pass a reply to the oldest command. What fails there concerns no other command, and not the connection."""
        _, answered = self._asked.popleft()
        try:
            answered(reply)
        except Exception as error:
            report("loop", error, "while a reply of Redis was handled")

    def pause_writing(self) -> None:
        """Stop sending: the send buffer is full."""
        self.full = True

    def resume_writing(self) -> None:
        """Resume sending."""
        self.full = False

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not self._transport.is_closing():
            self._transport.writelines(unsent)

    def _check_timeout(self) -> None:
        """Close the connection if the oldest command has timed out; else check again when it would."""
        self._timer = None
        if self._asked:
            left = self._asked[0][0] + self._patience - self._loop.time()
            if left <= 0:
                self.close(TimeoutError(f"no answer in {self._patience * 1000:.0f} ms"))
            else:
                self._timer = self._loop.call_later(left, self._check_timeout)


def _plain(reply: Any) -> Reply:
    if reply is None or isinstance(reply, bytes | int | Exception):
        return reply
    if isinstance(reply, list) and all(isinstance(each, int) for each in reply):
        return reply
    return TypeError("Redis sent a reply of an unexpected type")
