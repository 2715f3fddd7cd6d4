"""What a gRPC connection knows of the calls on it, and the wait of a stream for a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

from nerite.core.failures import report

if TYPE_CHECKING:
    from nerite.core.errors import NeriteError, NotLoaded
    from nerite.core.request import CancelReason, RequestHeader
    from nerite.repository.load_waits import LoadWaits


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


class WaitingStream(Protocol):
    """A stream whose input waits until a model is loaded."""

    on_end: Callable[[], None] | None
    """Called when the stream ends."""

    def resumes(self) -> bool:
        """Return whether the stream has not ended."""

    def refuse(self, request_id: str, error: NeriteError) -> None:
        """Report why a message was rejected. The stream goes on."""

    def proceed(self) -> None:
        """Handle the input that has arrived meanwhile."""

    def abandon(self, error: NeriteError) -> None:
        """Fail the stream."""


def hold_message(
    waits: LoadWaits,
    call: WaitingStream,
    absent: NotLoaded,
    header: RequestHeader,
    request_id: str,
    begin: Callable[[], bool],
) -> bool:
    """Let the message of a stream wait for its model, and the input behind it; return False if it was rejected.

    ``begin`` begins its inference when the model is loaded; it returns False if it has to wait again.
    """

    def go_on() -> None:
        call.on_end = None
        if not call.resumes():
            return
        try:
            if begin():
                call.proceed()
        except Exception as error:
            call.abandon(report("grpc", error, "in a call"))

    def give_up(error: NeriteError) -> None:
        call.on_end = None
        if call.resumes():
            call.refuse(request_id, error)
            call.proceed()

    held = waits.hold(absent, header.caller, monotonic_ns(), go_on, give_up)
    if held is not None:
        call.on_end = partial(waits.leave, held)
    return held is not None
