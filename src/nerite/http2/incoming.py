"""The receiving half of a connection: frames out of a stream of bytes, requests out of HEADERS and DATA."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    ErrorCode,
    ProtocolError,
    unpack_header,
)
from nerite.http2.handler import Handler
from nerite.http2.headers import HeaderReader, Keep, Malformed, PartialBlock
from nerite.http2.inflow import Inflow
from nerite.http2.limits import Limits
from nerite.http2.stream import MEASURED, REMOTE_CLOSED, Stream

# What the next frame may be.
ANY: Final = 0
ONLY_SETTINGS: Final = 1
ONLY_CONTINUATION: Final = 2
NOTHING: Final = 3

_PLAIN_HEADERS: Final = END_HEADERS | PADDED | PRIORITISED


class Incoming(Inflow, ABC):
    """What the peer sends. Methods raise ``ProtocolError`` where the connection has to end."""

    __slots__ = (
        "_block",
        "_expected",
        "_headers",
        "_held",
        "_request_received",
        "_request_started",
        "_wanted",
    )

    def __init__(self, handler: Handler, limits: Limits, now: float, keep: Keep) -> None:
        super().__init__(handler, limits, now)
        self._request_started = handler.request_started
        self._request_received = handler.request_received
        self._headers = HeaderReader(limits, keep)
        self._expected = ONLY_SETTINGS

        self._held = bytearray()
        """The beginning of a frame of which a part is missing."""
        self._wanted = 0
        """How long ``_held`` has to be before another look at it is worth it."""

        self._block: PartialBlock | None = None
        """What goes on in CONTINUATION frames."""

    @abstractmethod
    def _take_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Act on a complete frame that is none of DATA, HEADERS, CONTINUATION."""

    # -- frames

    def _take_frames(self, data: bytes | memoryview) -> None:
        """Act on each frame in ``data``, and keep the beginning of one that is incomplete.

        This is where the time goes. The two frames of a plain request are handled here, in line, because a call costs
        as much as all of their checks together; whatever is unusual goes to a method that does it all again, slowly.
        A callback may change anything, so nothing but ``data`` and the constants is remembered across one.
        """
        size = len(data)
        position = self._take_payload(data, 0) if self._cut_left or self._skipped else 0
        streams = self._streams
        kept_headers = self._headers.kept.get
        max_frame_size = self._limits.max_frame_size
        while size - position >= HEADER_SIZE:
            word, flags, stream_id = unpack_header(data, position)
            kind = word & 0xFF
            length = word >> 8
            stream_id &= MAX_STREAM_ID
            body = position + HEADER_SIZE
            end = body + length
            if self._expected:
                if self._expected == NOTHING:
                    return
                self._check_expected(kind, stream_id)
            if length > max_frame_size:
                raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "a frame is larger than MAX_FRAME_SIZE")

            if kind == DATA:
                stream = streams.get(stream_id)
                if (
                    stream is not None
                    and (
                        not stream.state
                        # All of the body that the request announced.
                        or (stream.state == MEASURED and stream.missing == length and flags & END_STREAM)
                    )
                    and end <= size
                    and length
                    and not flags & PADDED
                    and self._unreturned + length < self._return_at
                    and stream.unreturned + length < self._stream_return_at
                ):
                    self._unreturned += length
                    stream.unreturned += length
                    if flags & END_STREAM:
                        stream.state = REMOTE_CLOSED
                        self._data_received(stream_id, data[body:end], True)
                    else:
                        self._data_received(stream_id, data[body:end], False)
                    position = end
                    continue
            elif (
                kind == HEADERS
                and end <= size
                and stream_id > self._last_stream_id
                and flags & _PLAIN_HEADERS == END_HEADERS
                and len(streams) < self._room
            ):
                headers = kept_headers(bytes(data[body:end]))
                if headers is not None and stream_id & 1 and not flags & END_STREAM:
                    self._last_stream_id = stream_id
                    stream = streams[stream_id] = Stream()
                    announced = headers.content_length
                    if size - end > HEADER_SIZE:
                        # Mostly all of the body follows at once.
                        word, flags, same_id = unpack_header(data, end)
                        length = word >> 8
                        body = end + HEADER_SIZE
                        if (
                            same_id == stream_id
                            and not word & 0xFF
                            and flags == END_STREAM
                            and length
                            and (announced < 0 or announced == length)
                            and body + length <= size
                            and length <= max_frame_size
                            and length < self._stream_return_at
                            and self._unreturned + length < self._return_at
                        ):
                            self._unreturned += length
                            stream.state = REMOTE_CLOSED
                            position = body + length
                            self._request_received(stream_id, headers, data[body:position])
                            continue
                    if announced >= 0:
                        stream.state = MEASURED
                        stream.missing = announced
                    self._request_started(stream_id, headers, False)
                    position = end
                    continue
            position = self._take_frame(data, position, kind, flags, stream_id, length)
        if position < size:
            self._hold(data, position, HEADER_SIZE)

    def _take_frame(
        self, data: bytes | memoryview, position: int, kind: int, flags: int, stream_id: int, length: int
    ) -> int:
        """Act on any one frame, or keep what there is of it. Returns the position behind it."""
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
            raise ProtocolError(ErrorCode.ENHANCE_YOUR_CALM, "a frame is too large")
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
        """Keep the rest of ``data`` until there are ``wanted`` bytes of it. Returns the end of ``data``."""
        self._held += data[position:]
        self._wanted = wanted
        return len(data)

    def _check_expected(self, kind: int, stream_id: int) -> None:
        if self._expected == ONLY_SETTINGS:
            if kind != frames.SETTINGS:
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        elif kind != CONTINUATION or self._block is None or stream_id != self._block.stream_id:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")

    # -- HEADERS and CONTINUATION

    def _take_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that is not a client's")
        start = (1 if flags & PADDED else 0) + (5 if flags & PRIORITISED else 0)
        if len(payload) < start:
            raise ProtocolError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS is too short for its flags")
        end = len(payload) - (payload[0] if flags & PADDED else 0)
        if end < start:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "the padding is larger than its frame")
        block = payload[start:end]
        if flags & END_HEADERS:
            self._take_block(flags, stream_id, block)
            return
        self._block = PartialBlock(self._limits, flags, stream_id, block, self._now)
        self._expected = ONLY_CONTINUATION

    def _take_continuation(self, flags: int, payload: bytes) -> None:
        partial = self._block
        if partial is None:
            raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        partial.add(payload, self._now)
        if flags & END_HEADERS:
            self._block = None
            self._expected = ANY
            self._take_block(partial.flags, partial.stream_id, bytes(partial.block))

    def _take_block(self, flags: int, stream_id: int, block: bytes) -> None:
        """Act on a complete header block: a request, or the trailers of one."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._take_trailers(flags, stream_id, stream, block)
            return
        if stream_id <= self._last_stream_id:
            if not self._is_forgiven(stream_id):
                raise ProtocolError(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that was used before")
            self._count_idle_frame()
            self._headers.discard(block)
            return
        self._last_stream_id = stream_id
        if stream_id > self._processed_stream_id:
            self._headers.discard(block)
            return
        try:
            headers = self._headers.kept.get(block) or self._headers.request(block)
        except Malformed as error:
            self._fail_stream(stream_id, error.code)
            return
        if len(self._streams) >= self._room:
            self._fail_stream(stream_id, ErrorCode.REFUSED_STREAM)
            return
        ends = bool(flags & END_STREAM)
        if ends and headers.content_length > 0:
            self._fail_stream(stream_id, ErrorCode.PROTOCOL_ERROR)
            return
        stream = self._streams[stream_id] = Stream()
        if ends:
            stream.state = REMOTE_CLOSED
        elif headers.content_length >= 0:
            stream.state = MEASURED
            stream.missing = headers.content_length
        self._request_started(stream_id, headers, ends)

    def _take_trailers(self, flags: int, stream_id: int, stream: Stream, block: bytes) -> None:
        try:
            self._headers.trailers(block)
        except Malformed as error:
            self._fail_stream(stream_id, error.code)
            return
        if stream.state & REMOTE_CLOSED:
            self._fail_stream(stream_id, ErrorCode.STREAM_CLOSED)
        elif not flags & END_STREAM or (stream.state & MEASURED and stream.missing):
            self._fail_stream(stream_id, ErrorCode.PROTOCOL_ERROR)
        else:
            stream.state |= REMOTE_CLOSED
            self._data_received(stream_id, b"", True)
