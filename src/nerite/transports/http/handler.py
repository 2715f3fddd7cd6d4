"""What a connection gives its requests to, and hears from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple, Protocol

from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.failures import report
from nerite.core.request import CancelReason, InferenceRequest, ReplySink, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer
from nerite.core.trace_context import TraceContext
from nerite.transports.http import reply
from nerite.transports.http.head import HeadCache, RequestHead, split_span
from nerite.transports.http.reply import Reply
from nerite.transports.limits import ByteReservation, TransportLimits


class HttpHandler(Protocol):
    """What connections give their requests to."""

    def begin(self, head: RequestHead) -> Reply | None:
        """Look at a head before its body. A reply is sent at once, and the body skipped."""

    def receive_buffer(self, head: RequestHead) -> memoryview | None:
        """Return writable memory of ``head.content_length`` bytes for a large body, or None for any."""

    def handle(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> HttpQuestion | None:
        """Answer a request, now or later, through ``connection.send``.

        Returns what to remember of a request that may come again with other data.
        """

    def handle_again(self, connection: HttpExchange, meaning: Any, data: bytearray) -> None:
        """Answer a request whose text is that of a ``HttpQuestion`` with this meaning, given what follows the text."""

    def answer(self, connection: HttpExchange, request: InferenceRequest, response: InferenceResponse) -> None:
        """Send the answer of an inference that ``handle`` began."""


class HttpWork(Protocol):
    """What an exchange runs: an inference, or several that are answered as one."""

    @property
    def id(self) -> str:
        """The request's id, or that of the first."""

    @property
    def header(self) -> RequestHeader:
        """What is asked of which model."""

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """Say that nobody waits for the answer any more."""

    def pause(self, paused: bool) -> None:
        """Say that no more responses are wanted for now, or that they are again."""


class HttpQuestion(NamedTuple):
    """What a handler makes of a request, apart from its data."""

    text_size: int
    """So many bytes of the body say what is asked; what follows is data."""
    meaning: Any
    """The handler's own."""
    footprint: int
    """Bytes that the meaning takes in memory, about."""


class HttpExchange(ReplySink, Protocol):
    """A request of a connection and its reply, as those see it who answer."""

    request: HttpWork | None
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

    def hold(self, share: ByteReservation) -> None:
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


# What all connections of one HTTP listener have in common.

READ_SIZE = 256 * 1024


class HttpShared:
    """Made by a listener, given to each of its connections."""

    __slots__ = (
        "_whole_heads", "bounds", "connections", "draining", "handler", "heads", "max_body", "scratch", "scratch_view",
    )  # fmt: skip

    def __init__(
        self, handler: HttpHandler, max_body: int, bounds: TransportLimits, *, whole_heads: bool = False
    ) -> None:
        """``whole_heads``: the lines that name a span are passed on like others, and stay in the head."""
        self.handler = handler
        self.bounds = bounds
        self._whole_heads = whole_heads
        self.max_body = max_body
        self.heads = HeadCache()
        self.connections: set[OpenConnection] = set()
        self.draining = False
        """Each connection ends with its next answer."""
        # One read buffer for all: a read and its handling are one step of the loop, so nobody else needs it meanwhile,
        # and an idle connection costs no memory.
        self.scratch = bytearray(READ_SIZE)
        self.scratch_view = memoryview(self.scratch)

    def head(self, raw: bytes) -> tuple[RequestHead, TraceContext | None]:
        """Return the head that ``raw`` is, and the span that it names. Raises ``BadHead``."""
        text, span = split_span(raw, self._whole_heads)
        return self.heads.get(text), span


# What differs between ports that speak Triton's HTTP: how an inference says its sizes, and how its refusals look.


class HttpDialect(NamedTuple):
    """How inferences are written on a port."""

    json_size: Callable[[RequestHead], int]
    """Returns the bytes of the JSON part; -1: all; 0: none, the body is the tensor. Raises ``InvalidArgument``."""
    binary_headers: bytes
    """Content type and more of a reply with tensors behind its JSON part; %d is the size of that part."""
    compresses: bool
    """Content codings mean something."""
    early_type: str = reply.PLAIN
    """The content type of a refusal for which the body was not looked at."""
    status_of: Callable[[NeriteError], int] | None = None
    """Returns the status of a refusal, where it is not the usual one."""

    def binary_head(self, json_size: int, size: int) -> bytes:
        """Return status line and headers of a reply with tensors behind its JSON part."""
        return reply.status_line(200) + self.binary_headers % json_size + b"Content-Length: %d\r\n\r\n" % size

    def refusal(self, error: NeriteError, content_type: str) -> Reply:
        """Return the reply that a refusal is."""
        answer = reply.error_reply(error, content_type)
        return answer if self.status_of is None else answer._replace(status=self.status_of(error))


def _json_size(head: RequestHead) -> int:
    text = head.headers.get("inference-header-content-length")
    if text is None:
        return -1
    try:
        size = int(text)
    except ValueError:
        raise InvalidArgument(f"Unable to parse Inference-Header-Content-Length, got: {text}") from None
    if size < 0 or (size > head.content_length > 0 and not head.headers.get("content-encoding")):
        raise InvalidArgument(f"inference header size should be in range (0, {head.content_length}), got: {text}")
    return size


HTTP: Final = HttpDialect(
    json_size=_json_size,
    binary_headers=b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n",
    compresses=True,
)

# Calls that take their time: run beside everything else, and answered when they are over.


class BackgroundCalls:
    """The coroutines that are under way."""

    def __init__(self, refusal_of: Callable[[NeriteError], Reply] = reply.error_reply) -> None:
        """``refusal_of`` makes the answer of one that is refused."""
        self._refusal_of = refusal_of
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, connection: HttpExchange, work: Coroutine[Any, Any, Reply]) -> None:
        """Run a coroutine, and send what it returns."""

        async def run() -> None:
            try:
                answer = await work
            except NeriteError as error:
                answer = self._refusal_of(error)
            except Exception as error:
                answer = self._refusal_of(report("http", error, "in a call that takes its time"))
            connection.send([answer.encode(), *answer.rest])

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# Long work on the loop, in turns: requests are answered in between.

_TURN: Final = 0.0005
"""Seconds of the loop that the work takes at once: requests wait no longer for it, however much there is."""


class LoopTurns:
    """Those of one piece of work."""

    def __init__(self) -> None:
        self._over = time.monotonic() + _TURN

    async def go_on(self) -> None:
        """Return when there is time."""
        if time.monotonic() >= self._over:
            await asyncio.sleep(0)
            self._over = time.monotonic() + _TURN
