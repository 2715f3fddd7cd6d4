"""One request and its reply: windows, and what is still to be sent."""

from __future__ import annotations

from collections import deque
from typing import Final

REMOTE_CLOSED: Final = 1
"""The request is complete."""
PAUSED: Final = 2
"""The owner does not want more just now: no credit is given back."""
MEASURED: Final = 4
"""The request declared a content-length."""


class Output:
    """What flow control does not let out yet."""

    __slots__ = ("chunks", "ending", "size")

    def __init__(self) -> None:
        self.chunks: deque[memoryview] = deque()
        self.size = 0
        self.ending: bytes | None = None
        """What follows the last chunk: None for nothing, empty for END_STREAM, else a block of trailers."""


class Stream:
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
        self.output: Output | None = None
        """None unless something waits."""
