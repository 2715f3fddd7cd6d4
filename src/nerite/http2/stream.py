"""State of one stream, and the interfaces for the handlers of requests and of responses."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from nerite.http2.headers import ReplyHeaders, RequestHeaders

REMOTE_CLOSED: Final = 1
"""The peer's message is complete."""
PAUSED: Final = 2
"""The owner has paused the stream: no credit is returned."""
MEASURED: Final = 4
"""The peer's message declared a content-length."""
LOCAL_CLOSED: Final = 8
"""Of a client: the request was completely sent."""
ANSWERED: Final = 16
"""Of a client: the headers of the response were received."""


class StreamOutput:
    """Data of a message that flow control holds back."""

    __slots__ = ("chunks", "ending", "size")

    def __init__(self) -> None:
        self.chunks: deque[memoryview] = deque()
        self.size = 0
        self.ending: bytes | None = None
        """What follows the last chunk: None if more data may come, empty for END_STREAM, else a block of trailers."""


class Http2Stream:
    """State of an open stream, from the client's HEADERS until both sides have ended it or one has reset it.

    The logic is in the connection, which changes these attributes directly for speed.
    """

    __slots__ = ("credit", "missing", "output", "state", "unreturned")

    def __init__(self) -> None:
        self.credit = 0
        """Send window relative to the peer's initial window: its WINDOW_UPDATEs minus the bytes sent. Relative, so that
        SETTINGS can change the initial window of all streams at once."""
        self.unreturned = 0
        """Bytes received for which no credit was returned."""
        self.state = 0
        """Flags. 0 is a server's normal case: an incomplete request that is not paused or measured."""
        self.missing = 0
        """Bytes of the body still to come, if the stream is ``MEASURED``."""
        self.output: StreamOutput | None = None
        """Data that waits to be sent, or None."""


class StreamEvents(Protocol):
    """What both sides of a connection report. Called during ``receive`` and calls that send; may call back at once.

    An exception from here propagates through ``receive`` to the owner, which must then abandon the connection.
    """

    def data_received(self, stream_id: int, data: bytes | memoryview, end_stream: bool) -> None:
        """Handle a piece of the body as it arrived. A memoryview is valid only until this call returns.

        ``data`` may be empty if ``end_stream`` is true. Pieces are not frames: large frames arrive in parts.
        """

    def stream_closed(self, stream_id: int, error_code: int) -> None:
        """Handle the premature end of a stream: the peer reset it, or violated the protocol, or the connection ended.

        Not called for streams that the owner reset, nor by a server whose reply was sent, nor by a client that has
        received the complete response. ``REFUSED_STREAM`` tells a client that the server has not processed the request.
        """

    def writable(self, stream_id: int) -> None:
        """Resume sending: all queued data of this stream was sent. Not called once its end was queued."""

    def connection_closing(self, error_code: int, reason: str) -> None:
        """Handle that no new streams will come: the peer sent GOAWAY, or violated the protocol (``closed`` is set)."""


class Http2Handler(StreamEvents, Protocol):
    """Serves the requests of a connection."""

    def request_started(self, stream_id: int, headers: RequestHeaders, end_stream: bool) -> None:
        """Handle a new request; with ``end_stream`` it has no body."""

    def request_received(self, stream_id: int, headers: RequestHeaders, body: bytes | memoryview) -> None:
        """Handle a new request with its complete body; replaces the two other calls if everything arrived at once.

        A memoryview is valid only until this call returns.
        """


class ResponseHandler(StreamEvents, Protocol):
    """Takes the responses of a connection to a server. A stream is over when the end of its response is reported."""

    def response_started(self, stream_id: int, headers: ReplyHeaders, end_stream: bool) -> None:
        """Handle the headers of a response; with ``end_stream`` it has no body, and in gRPC they are its trailers."""

    def trailers_received(self, stream_id: int, trailers: ReplyHeaders) -> None:
        """Handle the end of a response with trailers, whose ``status`` is 0."""
