"""The chunked transfer coding, reading side: a pure decoder."""

from __future__ import annotations

import re

from nerite.core.errors import InvalidArgument

MAX_CHUNKS = 65536
_MAX_LINE = 4096
_HEX = re.compile(rb"[0-9a-fA-F]{1,16}").fullmatch


class BadChunk(Exception):
    """The bytes do not follow the chunked coding; the connection cannot go on."""


class ChunkDecoder:
    """Takes bytes as they come; collects the body in ``body``."""

    __slots__ = ("_chunks", "_input", "_missing", "_trailers", "body", "complete", "limit")

    def __init__(self, limit: int) -> None:
        self.body = bytearray()
        self.complete = False
        self.limit = limit
        """Bytes of body that are kept; what comes beyond is counted by the caller's check of ``len(body)``."""
        self._input = bytearray()
        self._missing = 0
        self._chunks = 0
        self._trailers = False

    def feed(self, data: bytes | memoryview) -> bytes:
        """Take bytes; return what lies behind the end of the body, once that is ``complete``.

        Raises ``BadChunk`` where the coding is broken, ``InvalidArgument`` for too many chunks.
        """
        self._input += data
        while not self.complete:
            if self._missing:
                if not self._take_data():
                    break
            elif not self._take_line():
                break
        if self.complete:
            return bytes(self._input)
        return b""

    def _take_data(self) -> bool:
        """Move what is there of the chunk to the body; True when the chunk is over."""
        size = min(self._missing - 2, len(self._input))
        if size > 0:
            if len(self.body) <= self.limit:
                self.body += self._input[:size]
            del self._input[:size]
            self._missing -= size
        if self._missing > 2 or len(self._input) < 2:
            return False
        if self._input[:2] != b"\r\n":
            raise BadChunk("a chunk is longer than it says")
        del self._input[:2]
        self._missing = 0
        return True

    def _take_line(self) -> bool:
        """Read a size line, or a line of the trailers; False if it is not complete."""
        end = self._input.find(b"\r\n")
        if end < 0:
            if len(self._input) > _MAX_LINE:
                raise BadChunk("line too long")
            return False
        line = bytes(self._input[:end])
        del self._input[: end + 2]
        if self._trailers:
            self.complete = not line
            return True
        digits = line.partition(b";")[0].strip()
        if not _HEX(digits):
            raise BadChunk("bad chunk size")
        size = int(digits, 16)
        if size == 0:
            self._trailers = True
            return True
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise InvalidArgument(
                f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. "
                "Send fewer or larger HTTP chunks."
            )
        self._missing = size + 2
        return True
