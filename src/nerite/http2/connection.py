"""HTTP/2 connection: combines both halves, handles control frames, and implements start, shutdown and failure."""

from __future__ import annotations

import re
from typing import Final

from nerite.http2 import frames, headers
from nerite.http2.frames import MAX_STREAM_ID, MAX_WINDOW, PREFACE, Http2ErrorCode, ProtocolError
from nerite.http2.headers import RememberHeaders
from nerite.http2.incoming import ANY, NOTHING, ONLY_SETTINGS, Incoming
from nerite.http2.limits import DEFAULT_HEADER_TABLE_SIZE, Limits, server_preface
from nerite.http2.stream import Http2Handler

COPIED: Final = 16_384
"""Chunks up to this size are copied into bytes first: slices of bytes are cheaper than views, and can be kept."""

_SHUTDOWN_PING: Final = b"shutdown"
_looks_like_http1 = re.compile(rb"(?!PRI )[A-Z]{1,20}(?: |$)").match


class Http2Connection(Incoming):
    """Server side of one connection. The package docstring explains the design.

    After each call the owner writes ``outbound`` and clears it; if ``closed`` is then set, it closes the transport. It
    passes bytes from the transport to ``receive`` and calls ``lost`` at their end.
    """

    __slots__ = ("_shutting_down", "_started", "_table_emptied", "closed", "http1", "pings_unanswered")

    def __init__(self, handler: Http2Handler, limits: Limits, now: float, keep: RememberHeaders) -> None:
        """``keep`` is called with headers that are worth interning."""
        super().__init__(handler, limits, now, keep)
        self._started = False
        """The peer's preface was received, and ours was sent."""
        self._table_emptied = False
        self._shutting_down = False
        self.closed = False
        """Input is ignored, and ``outbound`` gets no more data."""
        self.http1 = False
        """The peer speaks HTTP/1. Set with ``closed``; nothing was sent, so the owner can still answer in HTTP/1."""
        self.pings_unanswered = 0

    @property
    def finished(self) -> bool:
        """Whether the transport may be closed: after an error, or after shutdown once no stream is open."""
        return self.closed or (not self._room and not self._streams)

    @property
    def begun(self) -> bool:
        """Whether the peer's HTTP/2 preface was received."""
        return self._started

    @property
    def incomplete(self) -> bool:
        """Whether the rest of the preface, of a frame other than DATA, or of a header block is outstanding."""
        return not self.closed and (not self._started or self._expected != ANY or bool(self._held))

    @property
    def held_bytes(self) -> int:
        """Number of received bytes that are kept until the rest of their frame or header block arrives."""
        return len(self._held)

    @property
    def last_stream_id(self) -> int:
        """The highest stream that the peer has used."""
        return self._last_stream_id

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

    def forget_headers(self) -> None:
        """Drop the interned headers, so that all further blocks yield new ``RequestHeaders`` without memos."""
        self._headers.kept.clear()

    def ping(self, payload: bytes = bytes(8)) -> None:
        """Send a PING; ``pings_unanswered`` counts it until the peer acknowledges."""
        if self._started and not self.closed:
            self.pings_unanswered += 1
            self.outbound.append(frames.ping(payload))

    def shutdown(self) -> None:
        """Shut down gracefully: announce it, and accept no new streams once the peer has acknowledged.

        The final GOAWAY follows the peer's acknowledgement; ``goaway`` sends it at once. See ``finished``.
        """
        if not self._started:
            self.goaway()
        elif not self._shutting_down and not self.closed:
            self._shutting_down = True
            self.outbound.append(frames.goaway(MAX_STREAM_ID, Http2ErrorCode.NO_ERROR, b""))
            self.ping(_SHUTDOWN_PING)

    def goaway(self, code: int = Http2ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Accept no new streams: later ones are ignored, and the client knows that it may retry them."""
        if self.closed:
            return
        if not self._started:
            self._close(Http2ErrorCode.NO_ERROR)
            return
        if self._room:
            self._processed_stream_id = self._last_stream_id
            self._room = 0
        self.outbound.append(frames.goaway(self._processed_stream_id, code, reason.encode()))

    def give_up(self, reason: str) -> None:
        """End the connection because the peer is too slow."""
        if not self.closed:
            self._fail(Http2ErrorCode.ENHANCE_YOUR_CALM, reason)

    # -- preface, failure and close

    def _take_preface(self, data: bytes | memoryview) -> bytes | memoryview:
        """Check the first bytes, answer a complete preface with ours, and return the bytes after it."""
        head = bytes(data[: len(PREFACE)])
        if not PREFACE.startswith(head):
            self.http1 = _looks_like_http1(head) is not None
            raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "the peer does not speak HTTP/2")
        if len(head) < len(PREFACE):
            self._hold(head, 0, len(head) + 1)
            return b""
        self._started = True
        self.outbound.append(server_preface(self._limits))
        return data[len(PREFACE) :]

    def _fail(self, code: Http2ErrorCode, reason: str) -> None:
        """End the connection because the peer violated the protocol."""
        if self._started:
            last = min(self._last_stream_id, self._processed_stream_id)
            self.outbound.append(frames.goaway(last, code, reason.encode()))
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
            raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "a client cannot push")
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
        if payload == _SHUTDOWN_PING and self._shutting_down and self._room:
            self.goaway()

    def _take_goaway(self, payload: bytes) -> None:
        if len(payload) < 8:
            raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is too short")
        self._count_idle_frame()
        code = int.from_bytes(payload[4:8])
        self._handler.connection_closing(code, payload[8:].decode("utf-8", "replace"))


def refusal_preface(limits: Limits, reason: str) -> bytes:
    """Return everything that a server sends on a connection that it rejects."""
    return server_preface(limits) + frames.goaway(0, Http2ErrorCode.ENHANCE_YOUR_CALM, reason.encode())
