"""What a connection gives its requests to, and hears from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from nerite.core.request import GaveUp, InferenceRequest, ReplySink, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer
from nerite.core.trace_context import TraceContext
from nerite.transports.bounds import Share
from nerite.transports.http.head import RequestHead
from nerite.transports.http.reply import Reply


class Handler(Protocol):
    """What connections give their requests to."""

    def begin(self, head: RequestHead) -> Reply | None:
        """Look at a head before its body. A reply is sent at once, and the body skipped."""

    def receive_buffer(self, head: RequestHead) -> memoryview | None:
        """Return writable memory of ``head.content_length`` bytes for a large body, or None for any."""

    def handle(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> Question | None:
        """Answer a request, now or later, through ``connection.send``.

        Returns what to remember of a request that may come again with other data.
        """

    def handle_again(self, connection: HttpExchange, meaning: Any, data: bytearray) -> None:
        """Answer a request whose text is that of a ``Question`` with this meaning, given what follows the text."""

    def answer(self, connection: HttpExchange, request: InferenceRequest, response: InferenceResponse) -> None:
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


class HttpExchange(ReplySink, Protocol):
    """A request of a connection and its reply, as those see it who answer."""

    request: Work | None
    """What the exchange runs; cancelled when the client goes."""
    began_ns: int
    outer_span: TraceContext | None

    @property
    def head(self) -> RequestHead:
        """The head of the exchange that is being answered."""

    @property
    def secure(self) -> bool:
        """Whether the client came over TLS."""

    @property
    def writable(self) -> bool:
        """Whether the client takes what is written."""

    @property
    def gone(self) -> bool:
        """Nobody waits for an answer any more."""

    def hold(self, share: Share) -> None:
        """Take over bytes that were taken for the current exchange."""

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send the reply to the current exchange, and go on to the next request."""

    def open(self, first: bytes, data: bytes = b"") -> None:
        """Begin a reply with a head of ``chunked_head`` and a first part: ``send_chunk`` and ``close_reply`` follow."""

    def send_chunk(self, data: bytes) -> None:
        """Send a part of the reply."""

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Send a part of the reply that is large: it is not copied."""

    def close_reply(self) -> None:
        """End a reply that ``open`` began, and go on to the next request."""


class OpenConnection(Protocol):
    """A connection, as its listener sees it."""

    def look(self, now: float, seconds: float) -> None:
        """Refuse a request that has not come on for so long."""

    def forget(self) -> None:
        """Read the next request whole, whatever it begins with: what is allowed has changed."""

    def abort(self) -> None:
        """Close without ceremony."""

    def drain(self) -> None:
        """Close with the next answer."""

    def shut_down(self) -> None:
        """Close as soon as the current exchange is answered: at once if there is none."""
