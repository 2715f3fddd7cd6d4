"""Every bound of a connection in one place."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from nerite.http2 import frames
from nerite.http2.frames import Http2ErrorCode, ProtocolError


@dataclass(frozen=True, slots=True)
class Limits:
    """What a peer may do on one connection. Sizes are bytes, rates are events a second.

    A limit on a rate comes as a pair: how many at once, and how many come back a second. Exceeding one ends the
    connection with ENHANCE_YOUR_CALM; the defaults are far above what honest clients under load were seen to do.
    """

    max_concurrent_streams: int = 1_024
    """Requests under way at once; more are refused with REFUSED_STREAM, which clients retry."""
    connection_window: int = 16 * 1024 * 1024
    """Bytes of all requests that the peer may have under way; at least 65,535, which the protocol starts with."""
    stream_window: int = 4 * 1024 * 1024
    """Bytes of one request that the peer may send ahead of the reader; what a paused stream can bring at most."""
    max_frame_size: int = 256 * 1024
    """The largest frame that the peer may send. DATA is passed on as it comes, so that size costs no memory here; it
    saves both sides work."""

    max_header_list_size: int = 16 * 1024
    """Names and values of a request plus 32 bytes a field. A larger request is refused alone, with ENHANCE_YOUR_CALM,
    which gRPC clients report as RESOURCE_EXHAUSTED."""
    max_header_block: int = 64 * 1024
    """The compressed headers of a request with all CONTINUATION frames, and any other frame that is held until it is
    complete. More than this ends the connection."""
    max_continuations: int = 64
    """CONTINUATION frames of one header block."""
    header_block_seconds: float = 10.0
    """How long the frames of one header block may take to arrive."""

    resets: int = 2_000
    resets_per_second: float = 1_000.0
    """Streams that the peer starts and then cancels, or makes us reset by breaking a rule (rapid reset)."""
    settings: int = 1_000
    settings_per_second: float = 50.0
    """Entries of SETTINGS frames; an empty frame counts as one."""
    idle_frames: int = 10_000
    idle_frames_per_second: float = 1_000.0
    """Frames that move no request forward: WINDOW_UPDATE, PRIORITY, PING, GOAWAY, empty DATA, unknown types,
    frames for closed streams. What we send earns more (``abuse.IDLE_FRAMES_EARNED``)."""

    min_recv_ping_interval_without_data_ms: int = 300_000
    """A PING sooner than this after the last one, with no reply sent in between, is a strike. As in gRPC."""
    max_ping_strikes: int = 2
    """One strike more ends the connection with "too_many_pings". 0 allows any number. As in gRPC."""
    permit_pings_without_calls: bool = False
    """If not, the interval is two hours while no stream is open. gRPC's ``keepalive_permit_without_calls``."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for values that the protocol cannot express."""
        if self.max_concurrent_streams < 1:
            raise ValueError("max_concurrent_streams must be at least 1")
        if not 1 <= self.stream_window <= frames.MAX_WINDOW:
            raise ValueError("stream_window must be from 1 to 2^31-1")
        if not frames.DEFAULT_WINDOW <= self.connection_window <= frames.MAX_WINDOW:
            raise ValueError("connection_window must be from 65535 to 2^31-1")
        if not frames.MIN_MAX_FRAME_SIZE <= self.max_frame_size <= frames.MAX_MAX_FRAME_SIZE:
            raise ValueError("max_frame_size must be from 16384 to 16777215")


# Counters that tell an honest peer from a flood. They are given the time and read no clock.

IDLE_FRAMES_EARNED: Final = 4
"""Idle frames that one reply, or one KiB sent, entitles the peer to: some peers answer each DATA frame with two
WINDOW_UPDATEs."""

_INTERVAL_WITHOUT_CALLS: Final = 7_200.0


class AbuseBudget:
    """A number of events that may happen at once, and how many a second come back."""

    __slots__ = ("_burst", "_left", "_rate", "_spent_at")

    def __init__(self, burst: float, rate: float, now: float) -> None:
        self._burst = burst
        self._left = burst
        self._rate = rate
        self._spent_at = now

    def spend(self, now: float, events: int = 1, earned: int = 0) -> bool:
        """Count ``events``, after adding ``earned`` more; False if there was not enough left for them."""
        self._left = min(self._burst, self._left + (now - self._spent_at) * self._rate + earned) - events
        self._spent_at = now
        return self._left >= 0


class PingStrikes:
    """gRPC's rule for keepalive pings: too soon is a strike, and too many strikes are the end."""

    __slots__ = ("_interval", "_interval_without_calls", "_last_at", "_last_progress", "_max_strikes", "_strikes")

    def __init__(self, limits: Limits) -> None:
        self._interval = limits.min_recv_ping_interval_without_data_ms / 1000
        self._interval_without_calls = self._interval if limits.permit_pings_without_calls else _INTERVAL_WITHOUT_CALLS
        self._max_strikes = limits.max_ping_strikes
        self._strikes = 0
        self._last_at = float("-inf")
        self._last_progress = 0

    def allows(self, now: float, progress: int, calls: int) -> bool:
        """Count a PING; False if it is one strike too many.

        ``progress`` is a number that grows with each reply: what was sent since the last PING wipes the slate clean.
        ``calls`` is the number of open streams.
        """
        if progress != self._last_progress:
            self._last_progress = progress
            self._strikes = 0
            self._last_at = now
            return True
        early = now < self._last_at + (self._interval if calls else self._interval_without_calls)
        self._last_at = now
        if not early:
            return True
        self._strikes += 1
        return self._max_strikes == 0 or self._strikes <= self._max_strikes


class FloodDetector:
    """The budgets of one connection."""

    __slots__ = ("_earned_progress", "_idle_frames", "_resets", "_settings", "pings")

    def __init__(self, limits: Limits, now: float) -> None:
        self._resets = AbuseBudget(limits.resets, limits.resets_per_second, now)
        self._settings = AbuseBudget(limits.settings, limits.settings_per_second, now)
        self._idle_frames = AbuseBudget(limits.idle_frames, limits.idle_frames_per_second, now)
        self._earned_progress = 0
        self.pings = PingStrikes(limits)

    def allows_reset(self, now: float) -> bool:
        """Count a stream that ended without having been worth it."""
        return self._resets.spend(now)

    def allows_settings(self, now: float, entries: int) -> bool:
        """Count a SETTINGS frame."""
        return self._settings.spend(now, max(1, entries))

    def allows_idle_frame(self, now: float, progress: int) -> bool:
        """Count a frame that moves nothing forward. ``progress`` counts replies and KiB sent."""
        earned = (progress - self._earned_progress) * IDLE_FRAMES_EARNED
        self._earned_progress = progress
        return self._idle_frames.spend(now, 1, earned)


# SETTINGS: what the peer tells us, checked, and what we tell the peer.

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
            raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, "SETTINGS is not a multiple of 6 bytes")
        for identifier, value in _entries(payload):
            if identifier == HEADER_TABLE_SIZE:
                self.header_table_size = value
            elif identifier == INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    raise ProtocolError(Http2ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is above 2^31-1")
                self.initial_window_size = value
            elif identifier == MAX_FRAME_SIZE:
                if not frames.MIN_MAX_FRAME_SIZE <= value <= frames.MAX_MAX_FRAME_SIZE:
                    raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of range")
                self.max_frame_size = value
            elif identifier == MAX_HEADER_LIST_SIZE:
                self.max_header_list_size = value
            elif identifier == ENABLE_PUSH and value > 1:
                raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
            # MAX_CONCURRENT_STREAMS limits what we push, which is nothing; unknown identifiers are to be ignored.


def server_preface(limits: Limits) -> bytes:
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
