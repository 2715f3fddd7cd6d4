"""Every bound of a connection in one place."""

from __future__ import annotations

from dataclasses import dataclass

from nerite.http2 import frames


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
