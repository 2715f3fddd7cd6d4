"""HTTP/2 frames: the constants of RFC 9113, and encoders for the frames that we send."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from typing import Final, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Data to send. A memoryview must be one-dimensional and of bytes: its ``len`` is taken as its size."""

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITISED: Final = 0x20
"""The PRIORITY flag of a HEADERS frame."""

HEADER_SIZE: Final = 9
MAX_STREAM_ID: Final = 0x7FFFFFFF
MAX_WINDOW: Final = 0x7FFFFFFF
DEFAULT_WINDOW: Final = 65_535
MIN_MAX_FRAME_SIZE: Final = 16_384
"""Frame size that every peer accepts, even before its SETTINGS arrive."""
MAX_MAX_FRAME_SIZE: Final = 16_777_215


class Http2ErrorCode(IntEnum):
    """Reasons why a stream or connection ended. A peer may send numbers that are not listed."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ProtocolError(Exception):
    """A violation by the peer that ends the connection. Never leaves ``Http2Connection.receive``."""

    def __init__(self, code: Http2ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


# A frame header is read and written as three numbers: length and type share the first word, ``length << 8 | type``, so
# that one struct call is enough instead of two and a shift.
_HEADER = struct.Struct(">IBI")
unpack_header = _HEADER.unpack_from
pack_header = _HEADER.pack
_pack_with_word = struct.Struct(">IBII").pack

DATA_START: Final = bytes((DATA, 0))
"""Type and flags in the header of a DATA frame that does not end its stream."""


@lru_cache
def block_start(size: int, flags: int) -> bytes:
    """Return the header of a HEADERS frame up to its stream id. Cached, because few distinct ones are sent."""
    return (size << 8 | HEADERS).to_bytes(4) + bytes((flags,))


SETTINGS_ACK: Final = pack_header(SETTINGS, ACK, 0)


def rst_stream(stream_id: int, code: int) -> bytes:
    """Return a RST_STREAM frame."""
    return _pack_with_word(4 << 8 | RST_STREAM, 0, stream_id, code)


def window_update(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return _pack_with_word(4 << 8 | WINDOW_UPDATE, 0, stream_id, increment)


def ping(payload: bytes, flags: int = 0) -> bytes:
    """Return a PING frame. ``payload`` is eight bytes."""
    return pack_header(8 << 8 | PING, flags, 0) + payload


def goaway(last_stream_id: int, code: int, reason: bytes) -> bytes:
    """Return a GOAWAY frame with ``reason`` as its debug data."""
    return _pack_with_word((8 + len(reason)) << 8 | GOAWAY, 0, 0, last_stream_id) + code.to_bytes(4) + reason


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """Return a SETTINGS frame with ``values`` in the given order."""
    payload = b"".join(struct.pack(">HI", identifier, value) for identifier, value in values)
    return pack_header(len(payload) << 8 | SETTINGS, 0, 0) + payload


def header_block(stream_id: int, block: bytes, flags: int, max_frame_size: int) -> bytes:
    """Return a HEADERS frame with ``flags``, and as many CONTINUATION frames as ``block`` needs."""
    if len(block) <= max_frame_size:
        return pack_header(len(block) << 8 | HEADERS, flags | END_HEADERS, stream_id) + block
    frames = [pack_header(max_frame_size << 8 | HEADERS, flags, stream_id), block[:max_frame_size]]
    for start in range(max_frame_size, len(block), max_frame_size):
        fragment = block[start : start + max_frame_size]
        last = END_HEADERS if start + max_frame_size >= len(block) else 0
        frames.append(pack_header(len(fragment) << 8 | CONTINUATION, last, stream_id))
        frames.append(fragment)
    return b"".join(frames)
