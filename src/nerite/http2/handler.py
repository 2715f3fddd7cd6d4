"""What a connection tells its owner."""

from __future__ import annotations

from typing import Protocol

from nerite.http2.headers import Headers


class Handler(Protocol):
    """Whoever serves the requests. Called during ``receive``, and during calls that send; may call back at once.

    An exception from here goes through ``receive`` to the owner, and the connection must then be given up.
    """

    def request_started(self, stream_id: int, headers: Headers, end_stream: bool) -> None:
        """Take a new request. ``end_stream``: there is no body."""

    def request_received(self, stream_id: int, headers: Headers, body: bytes | memoryview) -> None:
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
