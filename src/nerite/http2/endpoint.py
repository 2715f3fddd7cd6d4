"""What both sides of a connection share: input in pieces, control frames, keepalive, failure and loss."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from nerite.http2 import frames, headers
from nerite.http2.frames import MAX_STREAM_ID, MAX_WINDOW, Http2ErrorCode, ProtocolError
from nerite.http2.incoming import ANY, NOTHING, ONLY_SETTINGS, Incoming
from nerite.http2.limits import DEFAULT_HEADER_TABLE_SIZE, Limits
from nerite.http2.stream import StreamEvents

COPIED: Final = 16_384
"""Chunks up to this size are copied into bytes first: slices of bytes are cheaper than views, and can be kept."""


class Http2Endpoint(Incoming):
    """One side of a connection.

    After each call the owner writes ``outbound`` and clears it; if ``finished``, it closes the transport. It passes
    bytes from the transport to ``receive`` and calls ``lost`` at their end.
    """

    __slots__ = ("_started", "_table_emptied", "closed", "pings_unanswered")

    def __init__(self, handler: StreamEvents, limits: Limits, now: float) -> None:
        super().__init__(handler, limits, now)
        self._started = False
        """Our preface was sent and, to a server, the peer's was received."""
        self._table_emptied = False
        self.closed = False
        """Input is ignored, and ``outbound`` gets no more data."""
        self.pings_unanswered = 0

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the transport may be closed: after an error, or after shutdown once no stream is open."""

    @property
    def incomplete(self) -> bool:
        """Whether the rest of the preface, of a frame other than DATA, or of a header block is outstanding."""
        return not self.closed and (not self._started or self._expected != ANY or bool(self._held))

    @property
    def held_bytes(self) -> int:
        """Number of received bytes that are kept until the rest of their frame or header block arrives."""
        return len(self._held)

    # -- for the owner

    def receive(self, data: bytes | bytearray | memoryview, now: float) -> None:
        """Process bytes from the peer, in pieces of any size; they may be overwritten after the call.

        Never raises for anything that a peer sends: violations are answered and reported to the handler. ``now`` is in
        seconds of any monotonic clock.
        """
        if self.closed:
            return
        self._now = now
        if self._held:
            self._held += data
            if len(self._held) < self._wanted:
                return
            data, self._held = self._held, bytearray()
        chunk = bytes(data) if len(data) <= COPIED else memoryview(data)
        try:
            if not self._started:
                chunk = self._take_preface(chunk)
            self._take_frames(chunk)
        except ProtocolError as error:
            self._fail(error.code, error.reason)

    def lost(self) -> None:
        """Handle the loss of the transport: close each open stream with CANCEL."""
        if not self.closed:
            self._close(Http2ErrorCode.CANCEL)
        self.outbound.clear()
        self.forget_headers()

    @abstractmethod
    def forget_headers(self) -> None:
        """Drop the interned headers, so that all further blocks yield new objects without memos."""

    def ping(self, payload: bytes = bytes(8)) -> None:
        """Send a PING; ``pings_unanswered`` counts it until the peer acknowledges."""
        if self._started and not self.closed:
            self.pings_unanswered += 1
            self.outbound.append(frames.ping(payload))

    def give_up(self, reason: str) -> None:
        """End the connection because the peer is too slow."""
        if not self.closed:
            self._fail(Http2ErrorCode.ENHANCE_YOUR_CALM, reason)

    # -- preface, failure and close

    @abstractmethod
    def _take_preface(self, data: bytes | memoryview) -> bytes | memoryview:
        """Check the first bytes of the peer, and return those after them."""

    @property
    @abstractmethod
    def _served_stream_id(self) -> int:
        """The last stream of the peer that was processed, for GOAWAY."""

    def _fail(self, code: Http2ErrorCode, reason: str) -> None:
        """End the connection because the peer violated the protocol."""
        if self._started:
            self.outbound.append(frames.goaway(self._served_stream_id, code, reason.encode()))
        self._close(code)
        self._handler.connection_closing(code, reason)

    def _close(self, code: Http2ErrorCode) -> None:
        self.closed = True
        self._expected = NOTHING
        self._held.clear()
        streams = list(self._streams)
        self._streams.clear()
        self._waiting.clear()
        self.queued = 0
        for stream_id in streams:
            self._handler.stream_closed(stream_id, code)

    # -- control frames

    def _take_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.WINDOW_UPDATE:
            self._take_window_update(stream_id, payload)
        elif kind == frames.RST_STREAM:
            self._take_rst_stream(stream_id, payload)
        elif kind == frames.PRIORITY:
            self._take_priority(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "the peer may not push")
        elif stream_id:
            raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "a frame for the connection came on a stream")
        elif kind == frames.SETTINGS:
            self._take_settings(flags, payload)
        elif kind == frames.PING:
            self._take_ping(flags, payload)
        else:
            self._take_goaway(payload)

    def _take_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE is not 4 bytes")
        self._count_idle_frame()
        increment = int.from_bytes(payload) & MAX_WINDOW
        if not stream_id:
            if not increment:
                raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            if self._send_window + increment > MAX_WINDOW:
                raise ProtocolError(Http2ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is above 2^31-1")
            self._send_window += increment
            self._drain_waiting()
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id)
        elif not increment:
            self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
        elif self._peer_window + stream.credit + increment > MAX_WINDOW:
            self._fail_stream(stream_id, Http2ErrorCode.FLOW_CONTROL_ERROR)
        else:
            stream.credit += increment
            self._drain(stream_id, stream)

    def _take_rst_stream(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM is not 4 bytes")
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id)
            self._count_idle_frame()
            return
        self._forget(stream_id, stream)
        self._handler.stream_closed(stream_id, int.from_bytes(payload))
        self._count_reset()

    def _take_priority(self, stream_id: int, payload: bytes) -> None:
        """Ignore a PRIORITY frame, which is deprecated, apart from checking its format."""
        if not stream_id:
            raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "PRIORITY on the connection")
        if len(payload) != 5:
            # The RFC calls this a stream error, but a stream that is not open cannot be reset.
            if stream_id not in self._streams:
                raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is not 5 bytes")
            self._fail_stream(stream_id, Http2ErrorCode.FRAME_SIZE_ERROR)
        self._count_idle_frame()

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS has content")
            if self._expected == ONLY_SETTINGS:
                raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._count_idle_frame()
            self._stream_window = self._limits.stream_window
            return
        self._expected = ANY
        if not self._floods.allows_settings(self._now, len(payload) // 6):
            raise ProtocolError(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many SETTINGS")
        self.peer.update(payload)
        self.outbound.append(frames.SETTINGS_ACK)
        if self.peer.header_table_size < DEFAULT_HEADER_TABLE_SIZE and not self._table_emptied:
            self._table_emptied = True
            self._table_update = headers.EMPTY_TABLE
        if self.peer.initial_window_size != self._peer_window:
            self._take_initial_window(self.peer.initial_window_size)

    def _take_initial_window(self, window: int) -> None:
        """Apply a new initial window to all open streams, whose windows may become negative."""
        self._peer_window = window
        if max((stream.credit for stream in self._streams.values()), default=0) + window > MAX_WINDOW:
            raise ProtocolError(Http2ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is above 2^31-1")
        for stream_id, stream in list(self._streams.items()):
            self._drain(stream_id, stream)

    def _take_ping(self, flags: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, "PING is not 8 bytes")
        self._count_idle_frame()
        if not flags & frames.ACK:
            if not self._floods.pings.allows(self._now, self._progress, len(self._streams)):
                raise ProtocolError(Http2ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
            self.outbound.append(frames.ping(payload, frames.ACK))
            return
        self.pings_unanswered = max(0, self.pings_unanswered - 1)
        self._ping_acknowledged(payload)

    def _ping_acknowledged(self, payload: bytes) -> None:
        """Handle the acknowledgement of a PING that we sent."""

    def _take_goaway(self, payload: bytes) -> None:
        if len(payload) < 8:
            raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is too short")
        self._count_idle_frame()
        last_stream_id = int.from_bytes(payload[:4]) & MAX_STREAM_ID
        self._peer_leaves(last_stream_id, int.from_bytes(payload[4:8]), payload[8:].decode("utf-8", "replace"))

    def _peer_leaves(self, last_stream_id: int, code: int, reason: str) -> None:
        """Handle that the peer will accept no more streams."""
        self._handler.connection_closing(code, reason)
