"""Where the body of a response ends: reads the chunked coding without changing or copying it."""

from __future__ import annotations

import re
from typing import Final

from nerite.core.tensor import Buffer
from nerite.router.response_head import MAX_RESPONSE_HEAD, BadResponse

MANY_CHUNKS: Final = 2048
"""Chunks that are followed without a break: it takes about two milliseconds."""
_MAX_LINE: Final = 4096
_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?")
_SHORT_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,15})\r\n")
"""One without an extension, with the line end."""


class ChunkScanner:
    """Follows a chunked body. Whoever has fed it may pass on the bytes as they are."""

    __slots__ = ("_line", "_missing", "_trailer_bytes", "_trailers", "chunks", "complete", "spans")

    def __init__(self) -> None:
        self._missing = 0
        """Bytes of the current chunk that are still to come, with the line end behind it."""
        self._line = b""
        """Beginning of a size line or a trailer line."""
        self._trailers = False
        self._trailer_bytes = 0
        self.chunks = 0
        """Number of chunks that have begun."""
        self.complete = False
        self.spans: list[tuple[int, int]] = []
        """Where the data is in the bytes that were fed last, without its framing."""

    @property
    def between(self) -> bool:
        """Whether the last chunk is complete, so that another one may follow."""
        return not self._missing and not self._line and not self._trailers

    def feed(self, data: bytes) -> int:
        """Follow more bytes; return how many. Raises ``BadResponse``.

        These are all of them, but for what follows the end of the body, or ``MANY_CHUNKS`` in these bytes.
        """
        at, size = 0, len(data)
        spans = self.spans = []
        while at < size and not self.complete and len(spans) < MANY_CHUNKS:
            if self.between:
                at = self._take_whole_chunks(data, at)
            if self._missing:
                stop = min(at + self._missing, size)
                # The last two of the missing bytes are a line end.
                last = at + self._missing - 2
                if last > at:
                    spans.append((at, min(last, stop)))
                self._check_line_end(data, at, stop)
                self._missing -= stop - at
                at = stop
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._line += data[at:]
                if len(self._line) > _MAX_LINE:
                    raise BadResponse("sent a chunk with a size line that does not end")
                return size
            line = self._line + data[at:end] if self._line else data[at:end]
            at = end + 1
            self._line = b""
            self._take_line(line)
        return at

    def _take_whole_chunks(self, data: bytes, at: int) -> int:
        """Take the chunks that follow as far as they are complete; return the offset behind them."""
        before = len(self.spans)
        while len(self.spans) < MANY_CHUNKS and (found := _SHORT_SIZE_LINE.match(data, at)) is not None:
            start = found.end()
            stop = start + int(found[1], 16)
            if stop == start or not data.startswith(b"\r\n", stop):
                break
            self.spans.append((start, stop))
            at = stop + 2
        self.chunks += len(self.spans) - before
        return at

    def _check_line_end(self, data: bytes, at: int, stop: int) -> None:
        for place, expected in ((at + self._missing - 2, b"\r"), (at + self._missing - 1, b"\n")):
            if at <= place < stop and data[place : place + 1] != expected:
                raise BadResponse("sent a chunk that is longer than its size line says")

    def _take_line(self, line: bytes) -> None:
        if len(line) > _MAX_LINE or not line.endswith(b"\r"):
            raise BadResponse("sent a chunk with a bad size line")
        line = line[:-1]
        if self._trailers:
            self.complete = not line
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MAX_RESPONSE_HEAD:
                raise BadResponse(f"sent trailers of more than {MAX_RESPONSE_HEAD} bytes")
            return
        found = _SIZE_LINE.fullmatch(line)
        if found is None:
            raise BadResponse("sent a chunk with a bad size line")
        size = int(found[1], 16)
        if size:
            self.chunks += 1
            self._missing = size + 2
        else:
            self._trailers = True


def data_of(data: Buffer, scanner: ChunkScanner) -> bytes:
    """Return the data that a scanner has found in the bytes that it was fed last."""
    view = memoryview(data)
    return b"".join([view[start:stop] for start, stop in scanner.spans])
