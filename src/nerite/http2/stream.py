"""State of one stream, and the interface for the handler of requests."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from nerite.http2.headers import RequestHeaders

REMOTE_CLOSED: Final = 1
"""The request is complete."""
PAUSED: Final = 2
"""The owner has paused the request: no credit is returned."""
MEASURED: Final = 4
"""The request declared a content-length."""


class StreamOutput:
    """Data of a reply that flow control holds back."""

    __slots__ = ("chunks", "ending", "size")

    def __init__(self) -> None:
        self.chunks: deque[memoryview] = deque()
        self.size = 0
        self.ending: bytes | None = None
        """What follows the last chunk: None if more data may come, empty for END_STREAM, else a block of trailers."""


class Http2Stream:
    """State of an open stream, from the peer's HEADERS until both sides have ended it or one has reset it.

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
        """Flags. 0 is the normal case: an incomplete request that is not paused or measured."""
        self.missing = 0
        """Bytes of the body still to come, if the request is ``MEASURED``."""
        self.output: StreamOutput | None = None
        """Data that waits to be sent, or None."""


class Http2Handler(Protocol):
    """Serves the requests of a connection. Called during ``receive`` and calls that send; may call back at once.

    An exception from here propagates through ``receive`` to the owner, which must then abandon the connection.
    """

    def request_started(self, stream_id: int, headers: RequestHeaders, end_stream: bool) -> None:
        """Handle a new request; with ``end_stream`` it has no body."""

    def request_received(self, stream_id: int, headers: RequestHeaders, body: bytes | memoryview) -> None:
        """Handle a new request with its complete body; replaces the two other calls if everything arrived at once.

        A memoryview is valid only until this call returns.
        """

    def data_received(self, stream_id: int, data: bytes | memoryview, end_stream: bool) -> None:
        """Handle a piece of the body as it arrived. A memoryview is valid only until this call returns.

        ``data`` may be empty if ``end_stream`` is true. Pieces are not frames: large frames arrive in parts.
        """

    def stream_closed(self, stream_id: int, error_code: int) -> None:
        """Handle the end of a stream whose reply was not completely sent.

        The peer reset it, or violated the protocol, or the connection ended. Not called for streams whose reply was
        sent, nor for those that the owner reset.
        """

    def writable(self, stream_id: int) -> None:
        """Resume sending: all queued data of this stream was sent. Not called once its end was queued."""

    def connection_closing(self, error_code: int, reason: str) -> None:
        """Handle that no new requests will come: the peer sent GOAWAY, or violated the protocol (``closed`` is set)."""
