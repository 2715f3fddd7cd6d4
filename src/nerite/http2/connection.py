"""Server side of a connection: requests in, replies out, start and graceful shutdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from nerite.http2 import frames
from nerite.http2.endpoint import Http2Endpoint
from nerite.http2.frames import (
    DATA,
    DATA_START,
    END_HEADERS,
    END_STREAM,
    HEADER_SIZE,
    HEADERS,
    MAX_STREAM_ID,
    PADDED,
    PREFACE,
    PRIORITISED,
    Buffer,
    Http2ErrorCode,
    ProtocolError,
    block_start,
    unpack_header,
)
from nerite.http2.headers import HeaderReader, MalformedHeaders, RememberHeaders
from nerite.http2.incoming import NOTHING, OVERSIZED
from nerite.http2.limits import Limits, server_preface
from nerite.http2.stream import MEASURED, REMOTE_CLOSED, Http2Handler, Http2Stream

JOINED: Final = frames.MIN_MAX_FRAME_SIZE
"""Messages up to this size are copied into one bytes object with their frame headers: cheaper than a list of pieces."""

_HEADERS_FLAGS: Final = END_HEADERS | END_STREAM | PADDED | PRIORITISED
"""Flags of a HEADERS frame, of which that of a plain request has END_HEADERS alone."""
_SHUTDOWN_PING: Final = b"shutdown"
_looks_like_http1 = re.compile(rb"(?!PRI )[A-Z]{1,20}(?: |$)").match


class Http2Connection(Http2Endpoint):
    """Server side of one connection. The package docstring explains the design."""

    __slots__ = (
        "_headers",
        "_known_headers",
        "_request_received",
        "_request_started",
        "_room",
        "_shutting_down",
        "http1",
    )

    def __init__(self, handler: Http2Handler, limits: Limits, now: float, keep: RememberHeaders) -> None:
        """``keep`` is called with headers that are worth interning."""
        super().__init__(handler, limits, now)
        self._request_started = handler.request_started
        self._request_received = handler.request_received
        self._headers = HeaderReader(limits, keep)
        self._known_headers = self._headers.kept.get
        """Returns the headers of a block that was seen before."""
        self._room = limits.max_concurrent_streams
        """Maximum number of open streams; 0 after a GOAWAY that names the last stream."""
        self._shutting_down = False
        self.http1 = False
        """The peer speaks HTTP/1. Set with ``closed``; nothing was sent, so the owner can still answer in HTTP/1."""

    @property
    def finished(self) -> bool:
        """Whether the transport may be closed: after an error, or after shutdown once no stream is open."""
        return self.closed or (not self._room and not self._streams)

    @property
    def begun(self) -> bool:
        """Whether the peer's HTTP/2 preface was received."""
        return self._started

    @property
    def last_stream_id(self) -> int:
        """The highest stream that the peer has used."""
        return self._last_stream_id

    def forget_headers(self) -> None:
        """Drop the interned headers, so that all further blocks yield new ``RequestHeaders`` without memos."""
        self._headers.forget()

    # -- shutdown

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

    def _ping_acknowledged(self, payload: bytes) -> None:
        if payload == _SHUTDOWN_PING and self._shutting_down and self._room:
            self.goaway()

    @property
    def _served_stream_id(self) -> int:
        return min(self._last_stream_id, self._processed_stream_id)

    # -- replies

    def reply(self, stream_id: int, head: bytes, buffers: Sequence[Buffer], trailers: bytes) -> None:
        """Send a complete reply: headers, one message in ``buffers``, trailers. Nothing else is sent on the stream.

        ``head`` and ``trailers`` come from ``encode_headers``; without trailers the message ends the stream.
        """
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        size = sum(map(len, buffers))
        if (
            0 < size <= JOINED
            and size <= self._send_window
            and size <= self._peer_window + stream.credit
            and trailers
            and len(head) + len(trailers) <= frames.MIN_MAX_FRAME_SIZE
            and not self._table_update
        ):
            self._send_window -= size
            self._progress += 1
            number = stream_id.to_bytes(4)
            self.outbound.append(
                b"".join(
                    (
                        block_start(len(head), END_HEADERS),
                        number,
                        head,
                        size.to_bytes(3),
                        DATA_START,
                        number,
                        *buffers,
                        block_start(len(trailers), END_HEADERS | END_STREAM),
                        number,
                        trailers,
                    )
                )
            )
            self._ended(stream_id, stream)
            return
        self._write_block(stream_id, head, 0)
        self._send(stream_id, stream, buffers, trailers)

    def send_headers(self, stream_id: int, block: bytes, end_stream: bool = False) -> None:
        """Send the headers of a reply; with ``end_stream`` they are the complete reply."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._write_block(stream_id, block, END_STREAM if end_stream else 0)
        if end_stream:
            self._ended(stream_id, stream)

    def _ended(self, stream_id: int, stream: Http2Stream) -> None:
        """Handle the end of our side. If the request is incomplete, reset the stream: we need no more of it."""
        del self._streams[stream_id]
        if not stream.state & REMOTE_CLOSED:
            self._write_reset(stream_id, Http2ErrorCode.NO_ERROR)

    # -- requests

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

    def _take_frames(self, data: bytes | memoryview) -> None:
        """Do the same as the base class, with a shorter way for the two frames of a plain request.

        This is the hot path. Anything unusual goes to ``_take_frame``, which repeats all checks. A callback may change
        any state, so only ``data`` and constants are kept in local variables across one.
        """
        size = len(data)
        position = self._take_payload(data, 0) if self._cut_left or self._skipped else 0
        streams = self._streams
        while size - position >= HEADER_SIZE:
            word, flags, stream_id = unpack_header(data, position)
            kind = word & 0xFF
            length = word >> 8
            stream_id &= MAX_STREAM_ID
            if self._expected:
                if self._expected == NOTHING:
                    return
                self._check_expected(kind, stream_id)
            if length > self._max_frame_size:
                raise ProtocolError(Http2ErrorCode.FRAME_SIZE_ERROR, OVERSIZED)
            end = position + HEADER_SIZE + length
            if end <= size:
                after = 0
                if kind == HEADERS:
                    if (
                        flags & _HEADERS_FLAGS == END_HEADERS
                        and stream_id & 1
                        and stream_id > self._last_stream_id
                        and len(streams) < self._room
                    ):
                        after = self._take_known_request(data, end - length, end, stream_id)
                elif kind == DATA and length and not flags & PADDED:
                    stream = streams.get(stream_id)
                    if stream is not None:
                        after = self._take_plain_data(data, end - length, end, flags, stream_id, stream)
                if after:
                    position = after
                    continue
            position = self._take_frame(data, position, kind, flags, stream_id, length)
        if position < size:
            self._hold(data, position, HEADER_SIZE)

    def _take_known_request(self, data: bytes | memoryview, start: int, end: int, stream_id: int) -> int:
        """Begin a request whose header block, between ``start`` and ``end``, was seen before; else return 0.

        Usually the complete body follows immediately, and is passed on, too. Returns the position after what was taken.
        """
        headers = self._known_headers(bytes(data[start:end]))
        if headers is None:
            return 0
        self._last_stream_id = stream_id
        stream = self._streams[stream_id] = Http2Stream()
        announced = headers.content_length
        body = end + HEADER_SIZE
        if len(data) > body:
            word, flags, same_id = unpack_header(data, end)
            length = word >> 8
            if (
                same_id == stream_id
                and not word & 0xFF
                and flags == END_STREAM
                and length
                and (announced < 0 or announced == length)
                and body + length <= len(data)
                and length <= self._max_frame_size
                and length < self._stream_return_at
                and self._unreturned + length < self._return_at
            ):
                after: int = body + length
                self._unreturned += length
                stream.state = REMOTE_CLOSED
                self._request_received(stream_id, headers, data[body:after])
                return after
        if announced >= 0:
            stream.state = MEASURED
            stream.missing = announced
        self._request_started(stream_id, headers, False)
        return end

    def _take_plain_data(
        self, data: bytes | memoryview, start: int, end: int, flags: int, stream_id: int, stream: Http2Stream
    ) -> int:
        """Pass on a complete DATA frame for which no credit is returned yet, and return ``end``; else return 0."""
        length = end - start
        if self._unreturned + length >= self._return_at or stream.unreturned + length >= self._stream_return_at:
            return 0
        # A measured stream is plain if this is the complete body that the request declared.
        if stream.state and not (stream.state == MEASURED and stream.missing == length and flags & END_STREAM):
            return 0
        self._unreturned += length
        stream.unreturned += length
        ends = bool(flags & END_STREAM)
        if ends:
            stream.state = REMOTE_CLOSED
        self._data_received(stream_id, data[start:end], ends)
        return end

    def _take_block(self, flags: int, stream_id: int, block: bytes) -> None:
        """Process a complete header block: of a request, or of its trailers."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._take_trailers(flags, stream_id, stream, block)
            return
        if stream_id <= self._last_stream_id:
            if not self._is_forgiven(stream_id):
                raise ProtocolError(Http2ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that was used before")
            self._count_idle_frame()
            self._headers.discard(block)
            return
        self._last_stream_id = stream_id
        if stream_id > self._processed_stream_id:
            self._headers.discard(block)
            return
        try:
            headers = self._known_headers(block) or self._headers.request(block)
        except MalformedHeaders as error:
            self._fail_stream(stream_id, error.code)
            return
        if len(self._streams) >= self._room:
            self._fail_stream(stream_id, Http2ErrorCode.REFUSED_STREAM)
            return
        ends = bool(flags & END_STREAM)
        if ends and headers.content_length > 0:
            self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
            return
        stream = self._streams[stream_id] = Http2Stream()
        if ends:
            stream.state = REMOTE_CLOSED
        elif headers.content_length >= 0:
            stream.state = MEASURED
            stream.missing = headers.content_length
        self._request_started(stream_id, headers, ends)

    def _take_trailers(self, flags: int, stream_id: int, stream: Http2Stream, block: bytes) -> None:
        try:
            self._headers.trailers(block)
        except MalformedHeaders as error:
            self._fail_stream(stream_id, error.code)
            return
        if stream.state & REMOTE_CLOSED:
            self._fail_stream(stream_id, Http2ErrorCode.STREAM_CLOSED)
        elif not flags & END_STREAM or (stream.state & MEASURED and stream.missing):
            self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
        else:
            stream.state |= REMOTE_CLOSED
            self._data_received(stream_id, b"", True)


def refusal_preface(limits: Limits, reason: str) -> bytes:
    """Return everything that a server sends on a connection that it rejects."""
    return server_preface(limits) + frames.goaway(0, Http2ErrorCode.ENHANCE_YOUR_CALM, reason.encode())
