"""Interfaces between HTTP connections and the handlers that answer their requests, and what both sides share.

Also: the state that all connections of a listener share, the dialects of ports that speak Triton's HTTP, background
calls, and cooperative yielding for long work on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple, Protocol

from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.execution_observer import TraceContext
from nerite.core.failures import report
from nerite.core.request import CancelReason, InferenceRequest, ReplySink, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer
from nerite.transports.http import reply
from nerite.transports.http.head import HeadCache, RequestHead, split_span
from nerite.transports.http.reply import Reply
from nerite.transports.limits import ByteReservation, TransportLimits


class HttpHandler(Protocol):
    """Answers the requests of connections."""

    def begin(self, head: RequestHead) -> Reply | None:
        """Check a head before its body arrives. A returned reply is sent at once, and the body is skipped."""

    def receive_buffer(self, head: RequestHead) -> memoryview | None:
        """Return writable memory of ``head.content_length`` bytes for a large body, or None if any memory will do."""

    def handle(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> HttpQuestion | None:
        """Answer a request, now or later, through ``connection.send``.

        Returns what the connection should remember if the request may be repeated with other tensor data.
        """

    def handle_again(self, connection: HttpExchange, meaning: Any, data: bytearray) -> None:
        """Answer a repeated request, given the remembered ``HttpQuestion.meaning`` and the data behind the text."""

    def answer(self, connection: HttpExchange, request: InferenceRequest, response: InferenceResponse) -> None:
        """Send the reply to an inference that ``handle`` started."""


class HttpWork(Protocol):
    """Work that an exchange runs: one inference, or several that are answered together."""

    @property
    def id(self) -> str:
        """The id of the request, or of the first of several."""

    @property
    def header(self) -> RequestHeader:
        """The header of the request, which names the model."""

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """Cancel the work: its result is no longer wanted."""

    def pause(self, paused: bool) -> None:
        """Pause responses (backpressure), or resume them."""


class HttpQuestion(NamedTuple):
    """Parsed form of a repeatable request, without its tensor data, for the connection to remember."""

    text_size: int
    """Length in bytes of the JSON part at the start of the body; tensor data follows it."""
    meaning: Any
    """Opaque to the connection; passed to ``HttpHandler.handle_again``."""
    footprint: int
    """Approximate size of the meaning in memory, in bytes."""


class HttpExchange(ReplySink, Protocol):
    """One request of a connection and its reply, as the code that answers it sees them."""

    request: HttpWork | None
    """The work that the exchange runs; cancelled if the client disconnects."""
    began_ns: int
    outer_span: TraceContext | None

    @property
    def head(self) -> RequestHead:
        """The head of the current exchange."""

    @property
    def secure(self) -> bool:
        """Whether the client is connected over TLS."""

    @property
    def writable(self) -> bool:
        """Whether the client keeps up with what is written."""

    @property
    def gone(self) -> bool:
        """Whether the client no longer waits for a reply."""

    def hold(self, share: ByteReservation) -> None:
        """Take over the bytes that were reserved for the current exchange."""

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send the complete reply to the current exchange, then continue with the next request."""

    def open(self, first: bytes, data: bytes = b"") -> None:
        """Begin a reply with a head of ``chunked_head`` and a first chunk; ``send_chunk``, ``close_reply`` follow."""

    def send_chunk(self, data: bytes) -> None:
        """Send one chunk of the reply."""

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Send one large chunk of the reply without copying it."""

    def close_reply(self) -> None:
        """End the reply that ``open`` began, then continue with the next request."""


class OpenConnection(Protocol):
    """A connection as its listener sees it."""

    def check(self, now: float, seconds: float) -> None:
        """Close the connection if a partly received request has made no progress for ``seconds``."""

    def forget(self) -> None:
        """Discard remembered requests, because access rules have changed: the next request is parsed in full."""

    def abort(self) -> None:
        """Close at once, discarding unsent bytes."""

    def drain(self) -> None:
        """Close after the next reply."""

    def shut_down(self) -> None:
        """Close once the current exchange is answered, or at once if none is open."""


READ_SIZE = 256 * 1024


class HttpShared:
    """State that all connections of one HTTP listener share."""

    __slots__ = (
        "_whole_heads", "bounds", "closed", "connections", "draining", "handler", "heads", "max_body", "scratch",
        "scratch_view", "size_setting",
    )  # fmt: skip

    def __init__(
        self, handler: HttpHandler, max_body: int, bounds: TransportLimits, *, whole_heads: bool = False
    ) -> None:
        """``whole_heads``: trace context lines stay in the head and are forwarded like any other header."""
        self.handler = handler
        self.bounds = bounds
        self._whole_heads = whole_heads
        self.max_body = max_body
        self.size_setting = "--http-max-input-size"
        """What sets ``max_body``, for error texts."""
        self.heads = HeadCache()
        self.connections: set[OpenConnection] = set()
        self.closed: Callable[[], None] = lambda: None
        """Called when a connection has ended."""
        self.draining = False
        """Connections close after their next reply."""
        # One read buffer for all connections: it is filled and consumed within one loop callback, so they never
        # compete for it, and an idle connection costs no memory.
        self.scratch = bytearray(READ_SIZE)
        self.scratch_view = memoryview(self.scratch)

    def too_large(self, head: RequestHead, size: int) -> Reply:
        """Return the error reply for a body that exceeds the maximum size."""
        return reply.too_large(head, size, self.max_body, self.size_setting)

    def head(self, raw: bytes) -> tuple[RequestHead, TraceContext | None]:
        """Parse ``raw`` or look it up; return the head and the trace context that it names. Raises ``BadHead``."""
        text, span = split_span(raw, self._whole_heads)
        return self.heads.get(text), span


class HttpDialect(NamedTuple):
    """What differs between ports that speak Triton's HTTP: how sizes are announced and how errors look."""

    json_size: Callable[[RequestHead], int]
    """Returns the size of the JSON part; -1: the whole body; 0: none, the body is the tensor.

    Raises ``InvalidArgument``.
    """
    binary_headers: bytes
    """Header lines of a reply with tensors behind its JSON part; %d stands for the size of that part."""
    compresses: bool
    """Whether the port supports content codings."""
    early_type: str = reply.PLAIN
    """Content type of an error that is sent before the body was parsed."""
    status_of: Callable[[NeriteError], int] | None = None
    """Returns the status of an error reply, if it differs from the usual one."""

    def binary_head(self, json_size: int, size: int) -> bytes:
        """Return the status line and headers of a reply with tensors behind its JSON part."""
        return reply.status_line(200) + self.binary_headers % json_size + b"Content-Length: %d\r\n\r\n" % size

    def refusal(self, error: NeriteError, content_type: str) -> Reply:
        """Return the reply for an error."""
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


class BackgroundCalls:
    """Runs slow calls as tasks beside everything else, and sends their replies when they finish."""

    def __init__(self, refusal_of: Callable[[NeriteError], Reply] = reply.error_reply) -> None:
        """``refusal_of`` makes the reply for a call that fails."""
        self._refusal_of = refusal_of
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, connection: HttpExchange, work: Coroutine[Any, Any, Reply]) -> None:
        """Run a coroutine and send the reply that it returns."""

        async def run() -> None:
            try:
                answer = await work
            except NeriteError as error:
                answer = self._refusal_of(error)
            except Exception as error:
                answer = self._refusal_of(report("http", error, "in a background call"))
            connection.send([answer.encode(), *answer.rest])

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


TURN: Final = 0.0005
"""Time slice in seconds: however large the work is, requests wait no longer than this for it."""


class LoopTurns:
    """Splits long work on the event loop into time slices, so that requests are answered in between."""

    def __init__(self) -> None:
        self._over = time.monotonic() + TURN

    async def go_on(self) -> None:
        """Yield to the event loop if the current time slice is used up."""
        if time.monotonic() >= self._over:
            await asyncio.sleep(0)
            self._over = time.monotonic() + TURN
