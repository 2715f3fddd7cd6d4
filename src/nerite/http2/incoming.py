"""Receiving half of a connection: parses frames, and assembles header blocks and bodies."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from nerite.http2 import frames
from nerite.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER_SIZE,
    HEADERS,
    MAX_STREAM_ID,
    PADDED,
    PRIORITISED,
    Http2ErrorCode,
    ProtocolError,
    unpack_header,
)
from nerite.http2.headers import PartialBlock
from nerite.http2.limits import FloodDetector, Limits
from nerite.http2.outgoing import Outgoing
from nerite.http2.stream import MEASURED, PAUSED, REMOTE_CLOSED, Http2Stream, StreamEvents


class Inflow(Outgoing):
    """Receives bodies, with flow control and violations of streams.

    Methods raise ``ProtocolError`` if the connection must end.
    """

    __slots__ = (
        "_cut_ends",
        "_cut_left",
        "_cut_stream",
        "_cut_stream_id",
        "_data_received",
        "_floods",
        "_last_stream_id",
        "_limits",
        "_max_frame_size",
        "_now",
        "_processed_stream_id",
        "_return_at",
        "_skipped",
        "_stream_return_at",
        "_stream_window",
        "_unreturned",
    )

    def __init__(self, handler: StreamEvents, limits: Limits, now: float) -> None:
        super().__init__(handler)
        self._data_received = handler.data_received
        self._limits = limits
        self._max_frame_size = limits.max_frame_size
        self._now = now
        self._floods = FloodDetector(limits, now)

        # DATA frames are passed on while they arrive; this is the state of the current one.
        self._cut_stream: Http2Stream | None = None
        self._cut_stream_id = 0
        self._cut_left = 0
        self._cut_ends = False
        self._skipped = 0
        """Bytes to discard after it: padding, frames of unknown types."""

        # Windows that we grant to the peer. Credit is returned when half of a window is used.
        self._unreturned = 0
        """Bytes received on the connection for which no credit was returned."""
        self._return_at = limits.connection_window // 2
        self._stream_window = max(limits.stream_window, frames.DEFAULT_WINDOW)
        """Maximum ``unreturned`` of a stream; at least the default until the peer acknowledges our SETTINGS."""
        self._stream_return_at = max(1, limits.stream_window // 2)

        self._last_stream_id = 0
        """Highest stream id that the client has used."""
        self._processed_stream_id = MAX_STREAM_ID
        """Last stream id that the server promised to serve."""

    # -- backpressure

    def pause(self, stream_id: int) -> None:
        """Return no credit for this stream, so that the peer can send only the rest of the stream's window."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.state |= PAUSED

    def resume(self, stream_id: int) -> None:
        """Return credit again, including the withheld amount."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.state &= ~PAUSED
            self._return_stream_credit(stream_id, stream)

    # -- DATA

    def _take_data(self, flags: int, stream_id: int, length: int, padding: int) -> None:
        """Account for a DATA frame, and set ``_cut_left`` and ``_skipped`` for its payload."""
        content = length
        if flags & PADDED:
            content = length - 1 - padding
            if not length:
                raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, "a padded frame has no room for its padding")
            if content < 0:
                raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "the padding is larger than its frame")
        self._return_credit(length)
        # The payload is discarded unless all checks below pass.
        self._cut_left = 0
        self._skipped = content + padding
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_stray(stream_id)
            # Frames with content were in transit (at most the stream's window), which is no violation.
            if not content:
                self._count_idle_frame()
            return
        if stream.state & REMOTE_CLOSED:
            self._fail_stream(stream_id, Http2ErrorCode.STREAM_CLOSED)
            return
        stream.unreturned += length
        if stream.unreturned > self._stream_window:
            self._fail_stream(stream_id, Http2ErrorCode.FLOW_CONTROL_ERROR)
            return
        ends = bool(flags & END_STREAM)
        if stream.state & MEASURED:
            stream.missing -= content
            if stream.missing < 0 or (ends and stream.missing):
                self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
                return
        if ends:
            stream.state |= REMOTE_CLOSED
        else:
            self._return_stream_credit(stream_id, stream)
        if content:
            self._cut_stream = stream
            self._cut_stream_id = stream_id
            self._cut_left = content
            self._cut_ends = ends
            self._skipped = padding
        elif ends:
            self._data_received(stream_id, b"", True)
        else:
            self._count_idle_frame()

    def _take_payload(self, data: bytes | memoryview, position: int) -> int:
        """Pass on the part of the current DATA frame that is in ``data``, and skip bytes to be discarded."""
        if self._cut_left:
            piece = data[position : position + self._cut_left]
            position += len(piece)
            self._cut_left -= len(piece)
            # The stream may have been reset since the frame began.
            if len(piece) and self._streams.get(self._cut_stream_id) is self._cut_stream:
                self._data_received(self._cut_stream_id, piece, self._cut_ends and not self._cut_left)
        if not self._cut_left:
            self._cut_stream = None
            skipped = min(self._skipped, len(data) - position)
            self._skipped -= skipped
            position += skipped
        return position

    def _return_credit(self, length: int) -> None:
        """Count received bytes of the connection, and return credit once half of the window is used."""
        self._unreturned += length
        if self._unreturned > self._limits.connection_window:
            raise ProtocolError(Http2ErrorCode.FLOW_CONTROL_ERROR, "more than the window of the connection was sent")
        if self._unreturned >= self._return_at:
            self.outbound.append(frames.window_update(0, self._unreturned))
            self._unreturned = 0

    def _return_stream_credit(self, stream_id: int, stream: Http2Stream) -> None:
        """Return credit once half of the window is used, unless the stream is paused or the peer has ended it."""
        if stream.unreturned >= self._stream_return_at and not stream.state & (PAUSED | REMOTE_CLOSED):
            self.outbound.append(frames.window_update(stream_id, stream.unreturned))
            stream.unreturned = 0

    # -- violations

    def _fail_stream(self, stream_id: int, code: Http2ErrorCode) -> None:
        """Reset a stream because of a violation, and count it; notify the handler if it knows the stream."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream_id, stream)
        self._write_reset(stream_id, code)
        if stream is not None:
            self._handler.stream_closed(stream_id, code)
        self._count_reset()

    def _is_forgiven(self, stream_id: int) -> bool:
        """Return whether the peer may have sent frames for this closed stream before it learned that we ended it."""
        return stream_id in self._resets or stream_id > self._processed_stream_id

    def _check_stray(self, stream_id: int) -> None:
        self._check_not_idle(stream_id)
        if not self._is_forgiven(stream_id):
            raise ProtocolError(Http2ErrorCode.STREAM_CLOSED, "DATA on a closed stream")

    def _check_not_idle(self, stream_id: int) -> None:
        if stream_id > self._last_stream_id or not stream_id & 1:
            raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "a frame for a stream that was never opened")

    def _count_idle_frame(self) -> None:
        if not self._floods.allows_idle_frame(self._now, self._progress):
            raise ProtocolError(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many frames that do nothing")

    def _count_reset(self) -> None:
        if not self._floods.allows_reset(self._now):
            raise ProtocolError(Http2ErrorCode.ENHANCE_YOUR_CALM, "too many streams were reset")


# Values of ``Incoming._expected``: the frames that may come next.
ANY: Final = 0
ONLY_SETTINGS: Final = 1
ONLY_CONTINUATION: Final = 2
NOTHING: Final = 3

OVERSIZED: Final = "a frame is larger than MAX_FRAME_SIZE"


class Incoming(Inflow):
    """Parses the peer's frames. Methods raise ``ProtocolError`` if the connection must end."""

    __slots__ = ("_block", "_expected", "_held", "_wanted")

    def __init__(self, handler: StreamEvents, limits: Limits, now: float) -> None:
        super().__init__(handler, limits, now)
        self._expected = ONLY_SETTINGS

        self._held = bytearray()
        """Beginning of an incomplete frame."""
        self._wanted = 0
        """Length of ``_held`` from which parsing can continue."""

        self._block: PartialBlock | None = None
        """Header block that is continued in CONTINUATION frames."""

    @abstractmethod
    def _take_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Process a complete frame other than DATA, HEADERS and CONTINUATION."""

    @abstractmethod
    def _take_block(self, flags: int, stream_id: int, block: bytes) -> None:
        """Process a complete header block: of a request, of a response, or of trailers."""

    # -- frames

    def _take_frames(self, data: bytes | memoryview) -> None:
        """Process each frame in ``data``, and hold the beginning of an incomplete one."""
        size = len(data)
        position = self._take_payload(data, 0) if self._cut_left or self._skipped else 0
        while size - position >= HEADER_SIZE:
            word, flags, stream_id = unpack_header(data, position)
            stream_id &= MAX_STREAM_ID
            if self._expected:
                if self._expected == NOTHING:
                    return
                self._check_expected(word & 0xFF, stream_id)
            if word >> 8 > self._max_frame_size:
                raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, OVERSIZED)
            position = self._take_frame(data, position, word & 0xFF, flags, stream_id, word >> 8)
        if position < size:
            self._hold(data, position, HEADER_SIZE)

    def _take_frame(
        self, data: bytes | memoryview, position: int, kind: int, flags: int, stream_id: int, length: int
    ) -> int:
        """Process one frame of any type, or hold it if it is incomplete. Returns the position after it."""
        size = len(data)
        body = position + HEADER_SIZE
        if kind == DATA:
            if flags & PADDED and length and body == size:
                return self._hold(data, position, HEADER_SIZE + 1)
            padding = data[body] if flags & PADDED and length else 0
            self._take_data(flags, stream_id, length, padding)
            return self._take_payload(data, body + 1 if flags & PADDED else body)
        if kind > CONTINUATION:
            self._count_idle_frame()
            self._skipped = length
            return self._take_payload(data, body)
        if length > self._limits.max_header_block:
            raise ProtocolError(Http2ErrorCode.ENHANCE_YOUR_CALM, "a frame is too large")
        if body + length > size:
            return self._hold(data, position, HEADER_SIZE + length)
        payload = bytes(data[body : body + length])
        if kind == HEADERS:
            self._take_headers(flags, stream_id, payload)
        elif kind == CONTINUATION:
            self._take_continuation(flags, payload)
        else:
            self._take_control(kind, flags, stream_id, payload)
        return body + length

    def _hold(self, data: bytes | memoryview, position: int, wanted: int) -> int:
        """Hold the rest of ``data`` until it has ``wanted`` bytes. Returns the end of ``data``."""
        self._held += data[position:]
        self._wanted = wanted
        return len(data)

    def _check_expected(self, kind: int, stream_id: int) -> None:
        if self._expected == ONLY_SETTINGS:
            if kind != frames.SETTINGS:
                raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        elif kind != CONTINUATION or self._block is None or stream_id != self._block.stream_id:
            raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")

    # -- HEADERS and CONTINUATION

    def _take_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that is not a client's")
        start = (1 if flags & PADDED else 0) + (5 if flags & PRIORITISED else 0)
        if len(payload) < start:
            raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, "HEADERS is too short for its flags")
        end = len(payload) - (payload[0] if flags & PADDED else 0)
        if end < start:
            raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "the padding is larger than its frame")
        block = payload[start:end]
        if flags & END_HEADERS:
            self._take_block(flags, stream_id, block)
            return
        self._block = PartialBlock(self._limits, flags, stream_id, block, self._now)
        self._expected = ONLY_CONTINUATION

    def _take_continuation(self, flags: int, payload: bytes) -> None:
        partial = self._block
        if partial is None:
            raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        partial.add(payload, self._now)
        if flags & END_HEADERS:
            self._block = None
            self._expected = ANY
            self._take_block(partial.flags, partial.stream_id, bytes(partial.block))
