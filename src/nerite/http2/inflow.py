"""What comes in on open streams: the bodies of requests, the credit that is given for them, and their mistakes."""

from __future__ import annotations

from nerite.http2 import frames
from nerite.http2.abuse import Floods
from nerite.http2.frames import END_STREAM, MAX_STREAM_ID, PADDED, ErrorCode, ProtocolError
from nerite.http2.handler import Handler
from nerite.http2.limits import Limits
from nerite.http2.outgoing import Outgoing
from nerite.http2.stream import MEASURED, PAUSED, REMOTE_CLOSED, Stream


class Inflow(Outgoing):
    """The accounts of what the peer sends. Methods raise ``ProtocolError`` where the connection has to end."""

    __slots__ = (
        "_cut_ends",
        "_cut_left",
        "_cut_stream",
        "_cut_stream_id",
        "_data_received",
        "_floods",
        "_last_stream_id",
        "_limits",
        "_now",
        "_processed_stream_id",
        "_return_at",
        "_room",
        "_skipped",
        "_stream_return_at",
        "_stream_window",
        "_unreturned",
    )

    def __init__(self, handler: Handler, limits: Limits, now: float) -> None:
        super().__init__(handler)
        self._data_received = handler.data_received
        self._limits = limits
        self._now = now
        self._floods = Floods(limits, now)

        # A DATA frame is passed on while it arrives: this is the rest of the one under way.
        self._cut_stream: Stream | None = None
        self._cut_stream_id = 0
        self._cut_left = 0
        self._cut_ends = False
        self._skipped = 0
        """Bytes after that which nobody wants: padding, frames of unknown types."""

        # What we let the peer send. Credit goes back when half of a window is used.
        self._unreturned = 0
        """Bytes received for which the connection has not given credit back."""
        self._return_at = limits.connection_window // 2
        self._stream_window = max(limits.stream_window, frames.DEFAULT_WINDOW)
        """What a stream may have ``unreturned``: the default counts until the peer acknowledges our SETTINGS."""
        self._stream_return_at = max(1, limits.stream_window // 2)

        self._last_stream_id = 0
        """The highest that the peer has used."""
        self._processed_stream_id = MAX_STREAM_ID
        """The last that we said we would serve."""
        self._room = limits.max_concurrent_streams
        """How many streams may be open; 0 once we have said which is the last."""

    # -- back-pressure

    def pause(self, stream_id: int) -> None:
        """Give no credit back for this stream: the peer may send what is left of the stream's window, and no more."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.state |= PAUSED

    def resume(self, stream_id: int) -> None:
        """Give credit again, including what was held back."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.state &= ~PAUSED
            self._return_stream_credit(stream_id, stream)

    # -- DATA

    def _take_data(self, flags: int, stream_id: int, length: int, padding: int) -> None:
        """Account for a DATA frame, and say in ``_cut_left`` and ``_skipped`` what is to be done with its payload."""
        content = length
        if flags & PADDED:
            content = length - 1 - padding
            if not length:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "a padded frame has no room for its padding")
            if content < 0:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "the padding is larger than its frame")
        self._return_credit(length)
        # Until the checks below are through, nobody wants the payload.
        self._cut_left = 0
        self._skipped = content + padding
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_stray(stream_id)
            # What has content was on its way, as much as the stream's window held, and is nobody's fault.
            if not content:
                self._count_idle_frame()
            return
        if stream.state & REMOTE_CLOSED:
            self._fail_stream(stream_id, ErrorCode.STREAM_CLOSED)
            return
        stream.unreturned += length
        if stream.unreturned > self._stream_window:
            self._fail_stream(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            return
        ends = bool(flags & END_STREAM)
        if stream.state & MEASURED:
            stream.missing -= content
            if stream.missing < 0 or (ends and stream.missing):
                self._fail_stream(stream_id, ErrorCode.PROTOCOL_ERROR)
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
        """Pass on what ``data`` brings of the DATA frame under way, and skip what is to be skipped."""
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
        """Count what came on the connection, and give credit back once half of the window is used."""
        self._unreturned += length
        if self._unreturned > self._limits.connection_window:
            raise ProtocolError(ErrorCode.FLOW_CONTROL_ERROR, "more than the window of the connection was sent")
        if self._unreturned >= self._return_at:
            self.outbound.append(frames.window_update(0, self._unreturned))
            self._unreturned = 0

    def _return_stream_credit(self, stream_id: int, stream: Stream) -> None:
        """Give credit back once half of the window is used, if there is more to come and it is wanted."""
        if stream.unreturned >= self._stream_return_at and not stream.state & (PAUSED | REMOTE_CLOSED):
            self.outbound.append(frames.window_update(stream_id, stream.unreturned))
            stream.unreturned = 0

    # -- trouble

    def _fail_stream(self, stream_id: int, code: ErrorCode) -> None:
        """Reset a stream because of what the peer did, which is counted; tell the handler if it knows the stream."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream_id, stream)
        self._write_reset(stream_id, code)
        if stream is not None:
            self._handler.stream_closed(stream_id, code)
        self._count_reset()

    def _is_forgiven(self, stream_id: int) -> bool:
        """Whether frames for this closed stream only come because the peer did not know yet that we had ended it."""
        return stream_id in self._resets or stream_id > self._processed_stream_id

    def _check_stray(self, stream_id: int) -> None:
        self._check_not_idle(stream_id)
        if not self._is_forgiven(stream_id):
            raise ProtocolError(ErrorCode.STREAM_CLOSED, "DATA on a closed stream")

    def _check_not_idle(self, stream_id: int) -> None:
        if stream_id > self._last_stream_id or not stream_id & 1:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a frame for a stream that was never opened")

    def _count_idle_frame(self) -> None:
        if not self._floods.allows_idle_frame(self._now, self._progress):
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that do nothing")

    def _count_reset(self) -> None:
        if not self._floods.allows_reset(self._now):
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "too many streams were reset")
