"""SETTINGS: what the peer tells us, checked, and what we tell the peer."""

from __future__ import annotations

import struct
from typing import Final

from nerite.http2 import frames
from nerite.http2.frames import ErrorCode, ProtocolError
from nerite.http2.limits import Limits

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

DEFAULT_HEADER_TABLE_SIZE: Final = 4_096

_entries = struct.Struct(">HI").iter_unpack


class PeerSettings:
    """The values in force for what we send, starting from the RFC's defaults."""

    __slots__ = ("header_table_size", "initial_window_size", "max_frame_size", "max_header_list_size")

    def __init__(self) -> None:
        self.header_table_size = DEFAULT_HEADER_TABLE_SIZE
        self.initial_window_size = frames.DEFAULT_WINDOW
        self.max_frame_size = frames.MIN_MAX_FRAME_SIZE
        self.max_header_list_size: int | None = None
        """Advice on how large our header lists may be (names and values plus 32 bytes a field); None is no limit."""

    def update(self, payload: bytes) -> None:
        """Take the entries of a SETTINGS frame in their order. Raises ``ProtocolError`` on a value out of range."""
        if len(payload) % 6:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS is not a multiple of 6 bytes")
        for identifier, value in _entries(payload):
            if identifier == HEADER_TABLE_SIZE:
                self.header_table_size = value
            elif identifier == INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is above 2^31-1")
                self.initial_window_size = value
            elif identifier == MAX_FRAME_SIZE:
                if not frames.MIN_MAX_FRAME_SIZE <= value <= frames.MAX_MAX_FRAME_SIZE:
                    raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of range")
                self.max_frame_size = value
            elif identifier == MAX_HEADER_LIST_SIZE:
                self.max_header_list_size = value
            elif identifier == ENABLE_PUSH and value > 1:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
            # MAX_CONCURRENT_STREAMS limits what we push, which is nothing; unknown identifiers are to be ignored.


def opening(limits: Limits) -> bytes:
    """Return the first bytes of a server: its SETTINGS, and the connection's window raised to ours.

    The header table keeps its default size: with less the peer repeats itself, with more nothing is gained.
    """
    opening = frames.settings(
        (
            (MAX_CONCURRENT_STREAMS, limits.max_concurrent_streams),
            (INITIAL_WINDOW_SIZE, limits.stream_window),
            (MAX_FRAME_SIZE, limits.max_frame_size),
            (MAX_HEADER_LIST_SIZE, limits.max_header_list_size),
        )
    )
    raised = limits.connection_window - frames.DEFAULT_WINDOW
    return opening + frames.window_update(0, raised) if raised > 0 else opening
