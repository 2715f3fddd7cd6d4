"""What all connections of one HTTP listener have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nerite.transports.http.handler import Handler
from nerite.transports.http.head import HeadCache

if TYPE_CHECKING:
    from nerite.transports.http.connection import HttpConnection

READ_SIZE = 256 * 1024


class Shared:
    """Made by a listener, given to each of its connections."""

    __slots__ = ("connections", "handler", "heads", "max_body", "scratch", "scratch_view")

    def __init__(self, handler: Handler, max_body: int) -> None:
        self.handler = handler
        self.max_body = max_body
        self.heads = HeadCache()
        self.connections: set[HttpConnection] = set()
        # One read buffer for all: a read and its handling are one step of the loop, so nobody else needs it meanwhile,
        # and an idle connection costs no memory.
        self.scratch = bytearray(READ_SIZE)
        self.scratch_view = memoryview(self.scratch)
