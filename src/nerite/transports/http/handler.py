"""What a connection gives its requests to, and hears from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nerite.core.request import GaveUp

if TYPE_CHECKING:
    from nerite.core.request import InferenceRequest, RequestHeader
    from nerite.core.response import InferenceResponse
    from nerite.transports.http.connection import HttpConnection
    from nerite.transports.http.head import RequestHead
    from nerite.transports.http.reply import Reply


class Handler(Protocol):
    """What connections give their requests to."""

    def begin(self, head: RequestHead) -> Reply | None:
        """Look at a head before its body. A reply is sent at once, and the body skipped."""

    def receive_buffer(self, head: RequestHead) -> memoryview | None:
        """Return writable memory of ``head.content_length`` bytes for a large body, or None for any."""

    def handle(self, connection: HttpConnection, head: RequestHead, body: memoryview) -> Question | None:
        """Answer a request, now or later, through ``connection.send``.

        Returns what to remember of a request that may come again with other data.
        """

    def handle_again(self, connection: HttpConnection, meaning: Any, data: bytearray) -> None:
        """Answer a request whose text is that of a ``Question`` with this meaning, given what follows the text."""

    def answer(self, connection: HttpConnection, request: InferenceRequest, response: InferenceResponse) -> None:
        """Send the answer of an inference that ``handle`` began."""


class Work(Protocol):
    """What an exchange runs: an inference, or several that are answered as one."""

    @property
    def id(self) -> str:
        """The request's id, or that of the first."""

    @property
    def header(self) -> RequestHeader:
        """What is asked of which model."""

    def cancel(self, why: GaveUp = GaveUp.CANCELLED) -> None:
        """Say that nobody waits for the answer any more."""

    def pause(self, paused: bool) -> None:
        """Say that no more responses are wanted for now, or that they are again."""


class Question(NamedTuple):
    """What a handler makes of a request, apart from its data."""

    text_size: int
    """So many bytes of the body say what is asked; what follows is data."""
    meaning: Any
    """The handler's own."""
    footprint: int
    """Bytes that the meaning takes in memory, about."""
