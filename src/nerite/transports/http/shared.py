"""What all connections of one HTTP listener have in common."""

from __future__ import annotations

from nerite.core.trace_context import TraceContext
from nerite.transports.bounds import Bounds
from nerite.transports.http import head_span
from nerite.transports.http.handler import Handler, OpenConnection
from nerite.transports.http.head import HeadCache, RequestHead

READ_SIZE = 256 * 1024


class Shared:
    """Made by a listener, given to each of its connections."""

    __slots__ = (
        "_whole_heads", "bounds", "connections", "draining", "handler", "heads", "max_body", "scratch", "scratch_view",
    )  # fmt: skip

    def __init__(self, handler: Handler, max_body: int, bounds: Bounds, *, whole_heads: bool = False) -> None:
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
        text, span = head_span.split(raw, self._whole_heads)
        return self.heads.get(text), span
