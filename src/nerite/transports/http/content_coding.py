"""Content codings (gzip and deflate, both directions) and a decoder for the chunked transfer coding."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Sequence

from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.core.tensor import Buffer
from nerite.transports import unpacking

_WINDOW = {"gzip": 31, "deflate": 15}
_EITHER = 47
"""zlib's ``wbits`` value that detects either coding, as clients confuse the two."""
_LEVEL = 1


def known_coding(encoding: str) -> bool:
    """Return whether a coding is supported."""
    return encoding == "identity" or encoding in _WINDOW


def check_coding(encoding: str) -> None:
    """Raise ``Unsupported`` if a coding is not supported."""
    if not known_coding(encoding):
        raise Unsupported("Unsupported compression type")


def decompress(body: memoryview, limit: int, take: Callable[[int], None] | None = None) -> memoryview:
    """Return the decompressed body. Raises ``InvalidArgument`` if it is empty, broken, or larger than ``limit``.

    ``take`` is called with a number of bytes before they are allocated, and may raise to stop the decompression.
    """
    if not body:
        raise InvalidArgument("nothing to be decompressed")
    try:
        return unpacking.unpack(body, _EITHER, limit, take)
    except (unpacking.UnpackedTooLarge, unpacking.BrokenContent) as error:
        raise _refusal(error, limit) from None


def decompress_small(body: memoryview, limit: int, *, alone: bool = False) -> memoryview | None:
    """Return the decompressed body as ``decompress`` does, or None if it is so large that it would block the loop.

    ``alone``: nothing may follow the compressed data.
    """
    if not body:
        raise InvalidArgument("nothing to be decompressed")
    try:
        return unpacking.unpack_small(body, _EITHER, limit, alone=alone)
    except (unpacking.UnpackedTooLarge, unpacking.BrokenContent) as error:
        raise _refusal(error, limit) from None


def _refusal(error: Exception, limit: int) -> NeriteError:
    if isinstance(error, unpacking.UnpackedTooLarge):
        return InvalidArgument(
            f"Decompressed data size exceeds the maximum allowed value of {limit} bytes. "
            "Use --http-max-input-size to increase the limit."
        )
    return InvalidArgument(f"failed to decompress request body: {error}")


def accepted(header: str) -> str:
    """Return the coding for a reply, given the ``Accept-Encoding`` header; empty for none."""
    best, best_weight = "", 0.0
    identity = 0.0
    for item in header.split(","):
        name, _, parameter = item.strip().partition(";")
        weight = 1.0
        if parameter.strip().startswith("q="):
            try:
                weight = float(parameter.strip()[2:])
            except ValueError:
                weight = 0.0
        name = name.strip()
        if name == "identity":
            identity = weight
        elif name in _WINDOW and weight > best_weight:
            best, best_weight = name, weight
    return best if best_weight > 0 and best_weight >= identity else ""


def compress(encoding: str, pieces: Iterable[Buffer]) -> bytes:
    """Return the concatenated pieces, compressed."""
    encoder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[encoding])
    return b"".join([*map(encoder.compress, pieces), encoder.flush()])


def coding_line(encoding: str) -> bytes:
    """Return the ``Content-Encoding`` header line."""
    return b"Content-Encoding: %b\r\n" % encoding.encode()


def compress_reply(encoding: str, parts: Sequence[Buffer]) -> list[Buffer]:
    """Return an encoded reply with its body compressed."""
    whole = b"".join(parts)
    head, _, body = whole.partition(b"\r\n\r\n")
    packed = compress(encoding, [body])
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length:")]
    lines.append(coding_line(encoding)[:-2])
    lines.append(b"Content-Length: %d" % len(packed))
    return [b"\r\n".join(lines) + b"\r\n\r\n" + packed]


MAX_CHUNKS = 65536
_MAX_LINE = 4096
_HEX = re.compile(rb"[0-9a-fA-F]{1,16}").fullmatch
_SIZE_LINE = re.compile(rb"([0-9a-fA-F]{1,15})\r\n")
"""Line before a chunk, without an extension."""


class BadChunk(Exception):
    """Raised for bytes that violate the chunked coding; the connection must close."""


class ChunkDecoder:
    """Incremental decoder for the chunked transfer coding, without I/O; collects the body in ``body``."""

    __slots__ = ("_chunks", "_input", "_missing", "_trailers", "body", "complete", "limit")

    def __init__(self, limit: int) -> None:
        self.body = bytearray()
        self.complete = False
        self.limit = limit
        """Once ``body`` is larger than this, further data is dropped; callers check ``len(body)``."""
        self._input = bytearray()
        self._missing = 0
        self._chunks = 0
        self._trailers = False

    def feed(self, data: bytes | memoryview) -> bytes:
        """Process bytes; once the body is ``complete``, return the bytes behind its end.

        Raises ``BadChunk`` if the coding is violated, ``InvalidArgument`` for too many chunks.
        """
        self._input += data
        while not self.complete:
            if not (self._missing or self._trailers):
                self._take_whole_chunks()
            if self._missing:
                if not self._take_data():
                    break
            elif not self._take_line():
                break
        if self.complete:
            return bytes(self._input)
        return b""

    def _take_whole_chunks(self) -> None:
        """Move the chunks at the beginning of the input to the body, as far as they are complete."""
        data = self._input
        pieces: list[bytearray] = []
        at, room = 0, MAX_CHUNKS - self._chunks
        while len(pieces) < room and (found := _SIZE_LINE.match(data, at)) is not None:
            start = found.end()
            stop = start + int(found[1], 16)
            if stop == start or not data.startswith(b"\r\n", stop):
                break
            pieces.append(data[start:stop])
            at = stop + 2
        if pieces:
            self._chunks += len(pieces)
            if len(self.body) <= self.limit:
                self.body += b"".join(pieces)
            del data[:at]

    def _take_data(self) -> bool:
        """Move the available bytes of the chunk to the body; return True at the end of the chunk."""
        size = min(self._missing - 2, len(self._input))
        if size > 0:
            if len(self.body) <= self.limit:
                self.body += self._input[:size]
            del self._input[:size]
            self._missing -= size
        if self._missing > 2 or len(self._input) < 2:
            return False
        if self._input[:2] != b"\r\n":
            raise BadChunk("a chunk is longer than its size line says")
        del self._input[:2]
        self._missing = 0
        return True

    def _take_line(self) -> bool:
        """Read a size line or a trailer line; return False if it is incomplete."""
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
