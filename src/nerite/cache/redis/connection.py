"""A connection to Redis: commands leave together at the end of a turn of the loop, replies come in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import hiredis

Reply = bytes | int | Exception | None
"""None: there is nothing under the key. An exception: Redis refused, or the connection was lost first."""
Answered = Callable[[Reply], None]

_ROOM: Final = 16 * 1024 * 1024
"""Bytes that may wait to be sent. What Redis does not take for so long is better not sent."""
_INCOMPLETE: Final = object()


class RedisConnection(asyncio.Protocol):
    """Asks, and passes replies on. Each command is answered once, whatever happens."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, patience: float, lost: Callable[[RedisConnection, Exception], None]
    ) -> None:
        """``patience``: seconds that a reply may take before the connection is given up; 0 is for ever.

        ``lost`` is called once, when it has ended: commands have been answered by then.
        """
        self._loop = loop
        self._patience = patience
        self._lost = lost
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._asked: deque[tuple[float, Answered]] = deque()
        """Who waits for a reply, and since when."""
        self._leaving: list[bytes] = []
        self._transport: asyncio.Transport
        self._reason: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.full = False
        """Redis does not take what is there to send."""

    def ask(self, command: Sequence[bytes], answered: Answered) -> None:
        """Send a command."""
        self._asked.append((self._loop.time(), answered))
        if not self._leaving:
            self._loop.call_soon(self._flush)
        self._leaving.append(b"*%d\r\n" % len(command))
        for word in command:
            self._leaving += (b"$%d\r\n" % len(word), word, b"\r\n")
        if self._timer is None and self._patience:
            self._timer = self._loop.call_later(self._patience, self._look)

    def close(self, reason: Exception) -> None:
        """End it, for a reason."""
        self._reason = self._reason or reason
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take note of the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_ROOM)

    def data_received(self, data: bytes) -> None:
        """Pass on the replies that are complete."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _INCOMPLETE:
                if not self._asked:
                    raise hiredis.ProtocolError("a reply that nobody asked for")
                self._asked.popleft()[1](_plain(reply))
        except hiredis.ProtocolError as error:
            self.close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Answer all who wait."""
        reason = self._reason or exc or ConnectionResetError("Redis has closed the connection")
        if self._timer is not None:
            self._timer.cancel()
        while self._asked:
            self._asked.popleft()[1](reason)
        self._lost(self, reason)

    def pause_writing(self) -> None:
        """Redis does not keep up."""
        self.full = True

    def resume_writing(self) -> None:
        """It does again."""
        self.full = False

    def _flush(self) -> None:
        leaving, self._leaving = self._leaving, []
        if not self._transport.is_closing():
            self._transport.writelines(leaving)

    def _look(self) -> None:
        """Give up if the oldest command has waited too long; look again when the one that is the oldest then has."""
        self._timer = None
        if self._asked:
            left = self._asked[0][0] + self._patience - self._loop.time()
            if left <= 0:
                self.close(TimeoutError(f"no answer in {self._patience * 1000:.0f} ms"))
            else:
                self._timer = self._loop.call_later(left, self._look)


def _plain(reply: Any) -> Reply:
    if reply is None or isinstance(reply, bytes | int | Exception):
        return reply
    return TypeError("Redis replied with something else than was asked for")
