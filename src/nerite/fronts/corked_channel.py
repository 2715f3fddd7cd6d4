"""One end of the channel between core and front: all messages of a turn of the loop leave in one system call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any, Final

from nerite.core.tensor import Buffer
from nerite.fronts.groups import GroupWriter
from nerite.workers.ipc import messages
from nerite.workers.ipc.channel import Channel
from nerite.workers.ipc.shared_memory import TRIM_EVERY, TRIM_STEP, Arena, ForeignSegments

_RETURN_EVERY: Final = 0.5
"""Seconds after which released memory is returned although no message carries the tokens."""


class CorkedChannel(Channel):
    """A channel with few messages per system call, which also looks after its own arena.

    Records in ``_groups`` leave before any other message, which may be about one of them.
    """

    _groups: GroupWriter[Any]
    """Set by the derived class."""

    def __init__(
        self,
        name: str,
        connection: socket.socket,
        descriptors: socket.socket,
        arena: Arena,
        foreign_segments: ForeignSegments,
    ) -> None:
        super().__init__(name, connection, descriptors, arena, foreign_segments)
        self._corked: list[bytes] = []
        self._flush_due = False
        self._return_timer: asyncio.TimerHandle | None = None
        self._trim_timer: asyncio.TimerHandle | None = None

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._begin(loop)
        self._return_tokens()
        self._trim_timer = loop.call_later(TRIM_EVERY, self._trim)

    def close(self) -> None:
        """Close the connection, and release the memory of the other end."""
        for timer in (self._return_timer, self._trim_timer):
            if timer is not None:
                timer.cancel()
        self._corked.clear()
        super().close()

    def _send(self, message: bytes) -> None:
        self._groups.close()
        self._cork()
        self._corked.append(message)

    def _post(self, kind: int, number: int, count: int, records: list[Buffer]) -> None:
        """Send a message with records, and the tokens of released memory."""
        self._groups.close()
        self._append(kind, number, count, records)

    def _append(self, kind: int, number: int, count: int, records: list[Buffer]) -> None:
        self._cork()
        tokens = self._borrower.take_released() if self._borrower.released else ()
        self._corked.append(messages.batch_message(kind, number, count, tokens, None, records))

    def _cork(self) -> None:
        """Have everything sent at the end of this turn of the loop."""
        if not self._flush_due:
            assert self._loop is not None
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._groups.close()
        self._flush_due = False
        if self._corked:
            message = b"".join(self._corked)
            self._corked.clear()
            super()._send(message)

    def _return_tokens(self) -> None:
        assert self._loop is not None
        if self._borrower.released:
            self._send(messages.tokens_frame(self._borrower.take_released()))
        self._return_timer = self._loop.call_later(_RETURN_EVERY, self._return_tokens)

    def _trim(self) -> None:
        """Release memory of the arena that is unused, now and every few seconds."""
        self._run_trim_steps(self._arena.trim())

    def _run_trim_steps(self, steps: Iterator[None]) -> None:
        assert self._loop is not None
        for _ in steps:
            self._trim_timer = self._loop.call_later(TRIM_STEP, self._run_trim_steps, steps)
            return
        self._trim_timer = self._loop.call_later(TRIM_EVERY, self._trim)
