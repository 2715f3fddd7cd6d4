"""What a gRPC connection knows of the calls on it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from nerite.core.errors import NeriteError
from nerite.core.request import CancelReason


class ConnectionCall(Protocol):
    """A call, as its connection sees it."""

    stream_id: int
    deadline: asyncio.TimerHandle | None

    @property
    def waits(self) -> bool:
        """Whether memory is reserved for the call if its message does not arrive with its headers."""

    @property
    def arriving(self) -> int | None:
        """Bytes received of an incomplete message; None if no message is arriving."""

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Handle a piece of the request body."""

    def expect(self) -> None:
        """Reserve memory for a call whose message did not arrive together with its headers."""

    def stall(self, seconds: float) -> None:
        """Fail the call because its message made no progress for ``seconds``."""

    def block(self, blocked: bool) -> None:
        """Pause or resume: the client does not read, or reads again."""

    def writable(self) -> None:
        """Resume sending: flow control lets the stream send again."""

    def shut_down(self) -> None:
        """End soon: the server shuts down."""

    def cancel(self, why: CancelReason) -> None:
        """Discard the call: the client no longer waits."""

    def expire(self) -> None:
        """Fail the call: its deadline has passed."""

    def abandon(self, error: NeriteError) -> None:
        """Fail the call with ``error`` unless it has already ended."""


class StreamingCall(ConnectionCall, Protocol):
    """A call to a method that streams; it is created by its connection."""

    def __init__(self, connection: Any, stream_id: int, target: Any, /) -> None:
        """``connection`` is the caller, and ``target`` the ``stream`` of the call's target."""
