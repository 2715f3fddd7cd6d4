"""One request and its reply: windows, and what is still to be sent."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from nerite.http2.headers import RequestHeaders

REMOTE_CLOSED: Final = 1
"""The request is complete."""
PAUSED: Final = 2
"""The owner does not want more just now: no credit is given back."""
MEASURED: Final = 4
"""The request declared a content-length."""


class StreamOutput:
    """What flow control does not let out yet."""

    __slots__ = ("chunks", "ending", "size")

    def __init__(self) -> None:
        self.chunks: deque[memoryview] = deque()
        self.size = 0
        self.ending: bytes | None = None
        """What follows the last chunk: None for nothing, empty for END_STREAM, else a block of trailers."""


class Http2Stream:
    """An open stream, from the peer's HEADERS until both sides have ended it or one has reset it.

    What happens to nearly every stream is done by the connection, in place; these are the numbers it does it with.
    """

    __slots__ = ("credit", "missing", "output", "state", "unreturned")

    def __init__(self) -> None:
        self.credit = 0
        """Of the peer, to be added to its initial window: its WINDOW_UPDATEs less what was sent. As the initial window
        is not part of it, SETTINGS can change that one for all streams at once."""
        self.unreturned = 0
        """Bytes received for which no credit was given back."""
        self.state = 0
        """Flags. 0 is the plain case: a request under way, nothing special about it."""
        self.missing = 0
        """Bytes still to come, if the request is ``MEASURED``."""
        self.output: StreamOutput | None = None
        """None unless something waits."""


# What a connection tells its owner.


class Http2Handler(Protocol):
    """Whoever serves the requests. Called during ``receive``, and during calls that send; may call back at once.

    An exception from here goes through ``receive`` to the owner, and the connection must then be given up.
    """

    def request_started(self, stream_id: int, headers: RequestHeaders, end_stream: bool) -> None:
        """Take a new request. ``end_stream``: there is no body."""

    def request_received(self, stream_id: int, headers: RequestHeaders, body: bytes | memoryview) -> None:
        """Take a new request with all of its body: instead of the two other calls, where everything came at once.

        A memoryview is valid only until this call returns.
        """

    def data_received(self, stream_id: int, data: bytes | memoryview, end_stream: bool) -> None:
        """Take a piece of the body, as it came. A memoryview is valid only until this call returns.

        ``data`` may be empty where ``end_stream`` is true, and pieces are not frames: large ones arrive in parts.
        """

    def stream_closed(self, stream_id: int, error_code: int) -> None:
        """Forget a stream that ended before its reply had left.

        The peer reset it, or broke a rule, or the connection ended. Not called for streams whose reply has left, nor
        for those that the owner reset.
        """

    def writable(self, stream_id: int) -> None:
        """Go on: what flow control had held back of this stream has left. Not called once its end was queued."""

    def connection_closing(self, error_code: int, reason: str) -> None:
        """Know that no new requests will come: the peer has said so, or (``closed`` is then set) broke the protocol."""
