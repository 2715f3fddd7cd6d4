"""Limits of a connection, the rate limiters that enforce them, and SETTINGS."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from nerite.http2 import frames
from nerite.http2.frames import Http2ErrorCode, ProtocolError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for the peer of one connection. Sizes are bytes, rates are events per second.

    A rate limit is a pair, the burst and the refill rate of a token bucket. Exceeding it ends the connection with
    ENHANCE_YOUR_CALM; the defaults are far above what well-behaved clients were measured to do under load.
    """

    max_concurrent_streams: int = 1_024
    """Concurrent requests; a server rejects more with REFUSED_STREAM, which clients retry, and a client opens no
    more, nor more than its server allows."""
    connection_window: int = 16 * 1024 * 1024
    """Bytes of all requests that the peer may have in flight; at least 65,535, the protocol's initial window."""
    stream_window: int = 4 * 1024 * 1024
    """Bytes of one request that the peer may send ahead of the reader; the most that a paused stream can receive."""
    max_frame_size: int = 256 * 1024
    """Largest frame that the peer may send. DATA is passed on as it arrives, so a large size costs no memory here and
    saves both sides work."""

    max_header_list_size: int = 16 * 1024
    """Names and values of a request plus 32 bytes per field. A larger request is rejected with ENHANCE_YOUR_CALM, which
    gRPC clients report as RESOURCE_EXHAUSTED; the connection continues."""
    max_header_block: int = 64 * 1024
    """Compressed headers of a request with all CONTINUATION frames, and any other frame that is held until it is
    complete. Exceeding it ends the connection."""
    max_continuations: int = 64
    """CONTINUATION frames per header block."""
    header_block_seconds: float = 10.0
    """Time in which all frames of one header block must arrive."""

    resets: int = 2_000
    resets_per_second: float = 1_000.0
    """Streams that the peer opens and then cancels, or makes us reset by a violation (rapid reset)."""
    settings: int = 1_000
    settings_per_second: float = 50.0
    """Entries of SETTINGS frames; an empty frame counts as one."""
    idle_frames: int = 10_000
    idle_frames_per_second: float = 1_000.0
    """Frames that do not advance any request: WINDOW_UPDATE, PRIORITY, PING, GOAWAY, empty DATA, unknown types,
    frames for closed streams. Data that we send earns additional ones (``IDLE_FRAMES_EARNED``)."""

    min_recv_ping_interval_without_data_ms: int = 300_000
    """A PING sooner than this after the previous one, with no reply sent in between, is a strike, as in gRPC."""
    max_ping_strikes: int = 2
    """One more strike ends the connection with "too_many_pings", as in gRPC. 0 allows any number."""
    permit_pings_without_calls: bool = False
    """If false, the interval is two hours while no stream is open. gRPC's ``keepalive_permit_without_calls``."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for values that the protocol does not allow."""
        if self.max_concurrent_streams < 1:
            raise ValueError("max_concurrent_streams must be at least 1")
        if not 1 <= self.stream_window <= frames.MAX_WINDOW:
            raise ValueError("stream_window must be from 1 to 2^31-1")
        if not frames.DEFAULT_WINDOW <= self.connection_window <= frames.MAX_WINDOW:
            raise ValueError("connection_window must be from 65535 to 2^31-1")
        if not frames.MIN_MAX_FRAME_SIZE <= self.max_frame_size <= frames.MAX_MAX_FRAME_SIZE:
            raise ValueError("max_frame_size must be from 16384 to 16777215")


# Rate limiters that distinguish normal peers from floods. They are passed the time and read no clock.

IDLE_FRAMES_EARNED: Final = 4
"""Idle frames that the peer earns per reply or KiB that we send: some peers answer each DATA frame with two
WINDOW_UPDATEs."""

_INTERVAL_WITHOUT_CALLS: Final = 7_200.0


class AbuseBudget:
    """Token bucket: a burst of events, and a refill rate per second."""

    __slots__ = ("_burst", "_left", "_rate", "_spent_at")

    def __init__(self, burst: float, rate: float, now: float) -> None:
        self._burst = burst
        self._left = burst
        self._rate = rate
        self._spent_at = now

    def spend(self, now: float, events: int = 1, earned: int = 0) -> bool:
        """Add ``earned`` tokens, then take one per event; False if too few were left."""
        self._left = min(self._burst, self._left + (now - self._spent_at) * self._rate + earned) - events
        self._spent_at = now
        return self._left >= 0


class PingStrikes:
    """gRPC's rule for keepalive pings: a ping that comes too soon is a strike, and too many strikes are a violation."""

    __slots__ = ("_interval", "_interval_without_calls", "_last_at", "_last_progress", "_max_strikes", "_strikes")

    def __init__(self, limits: Limits) -> None:
        self._interval = limits.min_recv_ping_interval_without_data_ms / 1000
        self._interval_without_calls = self._interval if limits.permit_pings_without_calls else _INTERVAL_WITHOUT_CALLS
        self._max_strikes = limits.max_ping_strikes
        self._strikes = 0
        self._last_at = float("-inf")
        self._last_progress = 0

    def allows(self, now: float, progress: int, calls: int) -> bool:
        """Count a PING; False if it exceeds the allowed strikes.

        ``progress`` grows with each reply: if anything was sent since the last PING, strikes are reset. ``calls`` is
        the number of open streams.
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
    """Rate limiters of one connection."""

    __slots__ = ("_earned_progress", "_idle_frames", "_resets", "_settings", "pings")

    def __init__(self, limits: Limits, now: float) -> None:
        self._resets = AbuseBudget(limits.resets, limits.resets_per_second, now)
        self._settings = AbuseBudget(limits.settings, limits.settings_per_second, now)
        self._idle_frames = AbuseBudget(limits.idle_frames, limits.idle_frames_per_second, now)
        self._earned_progress = 0
        self.pings = PingStrikes(limits)

    def allows_reset(self, now: float) -> bool:
        """Count a stream that was reset; False if the limit is exceeded."""
        return self._resets.spend(now)

    def allows_settings(self, now: float, entries: int) -> bool:
        """Count a SETTINGS frame; False if the limit is exceeded."""
        return self._settings.spend(now, max(1, entries))

    def allows_idle_frame(self, now: float, progress: int) -> bool:
        """Count an idle frame; False if the limit is exceeded. ``progress`` counts replies and KiB sent."""
        earned = (progress - self._earned_progress) * IDLE_FRAMES_EARNED
        self._earned_progress = progress
        return self._idle_frames.spend(now, 1, earned)


# SETTINGS of the peer, validated, and ours.

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

DEFAULT_HEADER_TABLE_SIZE: Final = 4_096

_entries = struct.Struct(">HI").iter_unpack


class PeerSettings:
    """The peer's settings, which apply to what we send; initially the RFC's defaults."""

    __slots__ = (
        "header_table_size",
        "initial_window_size",
        "max_concurrent_streams",
        "max_frame_size",
        "max_header_list_size",
    )

    def __init__(self) -> None:
        self.header_table_size = DEFAULT_HEADER_TABLE_SIZE
        self.initial_window_size = frames.DEFAULT_WINDOW
        self.max_frame_size = frames.MIN_MAX_FRAME_SIZE
        self.max_concurrent_streams: int | None = None
        """Streams that a client may have open; None if unlimited."""
        self.max_header_list_size: int | None = None
        """Advisory limit on our header lists (names and values plus 32 bytes per field); None if unlimited."""

    def update(self, payload: bytes) -> None:
        """Apply the entries of a SETTINGS frame in order. Raises ``ProtocolError`` for a value out of range."""
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
            elif identifier == MAX_CONCURRENT_STREAMS:
                # A server is told how many streams it may push, which it never does.
                self.max_concurrent_streams = value
            elif identifier == ENABLE_PUSH and value > 1:
                raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
            # Unknown identifiers must be ignored.


def server_preface(limits: Limits) -> bytes:
    """Return the first bytes of a server: its SETTINGS, and a WINDOW_UPDATE to our connection window.

    The header table keeps its default size: with a smaller one peers repeat fields, a larger one gains nothing.
    """
    return _opening(limits, (MAX_CONCURRENT_STREAMS, limits.max_concurrent_streams))


def client_preface(limits: Limits) -> bytes:
    """Return the first bytes of a client: the preface, its SETTINGS, and a WINDOW_UPDATE to our connection window."""
    return frames.PREFACE + _opening(limits, (ENABLE_PUSH, 0))


def _opening(limits: Limits, first: tuple[int, int]) -> bytes:
    opening = frames.settings(
        (
            first,
            (INITIAL_WINDOW_SIZE, limits.stream_window),
            (MAX_FRAME_SIZE, limits.max_frame_size),
            (MAX_HEADER_LIST_SIZE, limits.max_header_list_size),
        )
    )
    raised = limits.connection_window - frames.DEFAULT_WINDOW
    return opening + frames.window_update(0, raised) if raised > 0 else opening
