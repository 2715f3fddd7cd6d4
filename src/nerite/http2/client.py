"""Client side of a connection: requests out, responses in, and what becomes of them when the server leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nerite.http2 import frames
from nerite.http2.endpoint import Http2Endpoint
from nerite.http2.frames import END_STREAM, MAX_STREAM_ID, Buffer, Http2ErrorCode, ProtocolError
from nerite.http2.headers import MalformedHeaders, RememberHeaders, ReplyHeaders, ResponseReader
from nerite.http2.limits import Limits, client_preface
from nerite.http2.stream import ANSWERED, LOCAL_CLOSED, MEASURED, REMOTE_CLOSED, Http2Stream, ResponseHandler

_BEFORE_SETTINGS: Final = 100
"""Streams that are opened before the server has said how many it allows; RFC 9113 recommends to allow no fewer."""
_WITHOUT_BODY: Final = (204, 304)


class Http2ClientConnection(Http2Endpoint):
    """Client side of one connection. The owner treats it as it treats a server's, and opens streams.

    A stream is open from ``open_stream`` until its response is complete, or one side has reset it. If a response ends
    before its request, we reset the stream with NO_ERROR: the server needs no more of it.
    """

    __slots__ = ("_handler_data", "_responses", "leaving", "settled")

    def __init__(self, handler: ResponseHandler, limits: Limits, now: float, keep: RememberHeaders) -> None:
        """``keep`` is called with headers that are worth interning."""
        super().__init__(handler, limits, now)
        self._handler: ResponseHandler = handler
        self._handler_data = handler.data_received
        self._data_received = self._take_response_data
        self._responses = ResponseReader(limits, keep)
        self.leaving = False
        """A GOAWAY was sent or received."""
        self.settled = False
        """The server's SETTINGS were received."""
        self._started = True
        self.outbound.append(client_preface(limits))

    @property
    def finished(self) -> bool:
        """Whether the transport may be closed: after an error, or after GOAWAY once no stream is open."""
        return self.closed or (self.leaving and not self._streams)

    @property
    def room(self) -> int:
        """Number of streams that may be opened now."""
        if self.closed or self.leaving or self._last_stream_id + 2 > MAX_STREAM_ID:
            return 0
        allowed = self._limits.max_concurrent_streams
        if not self.settled:
            allowed = min(allowed, _BEFORE_SETTINGS)
        elif self.peer.max_concurrent_streams is not None:
            allowed = min(allowed, self.peer.max_concurrent_streams)
        return max(0, allowed - len(self._streams))

    def forget_headers(self) -> None:
        """Drop the interned headers, so that all further blocks yield new ``ReplyHeaders`` without memos."""
        self._responses.forget()

    # -- requests

    def open_stream(self, block: bytes, *, end_stream: bool = False) -> int:
        """Send the headers of a request, made by ``encode_request``; with ``end_stream`` they are all of it.

        Returns the number of the stream. Raises ``RuntimeError`` if there is no ``room``.
        """
        if not self.room:
            raise RuntimeError("the connection has no room for another stream")
        self._last_stream_id += 1 if not self._last_stream_id else 2
        stream_id = self._last_stream_id
        stream = self._streams[stream_id] = Http2Stream()
        self._write_block(stream_id, block, END_STREAM if end_stream else 0)
        if end_stream:
            stream.state = LOCAL_CLOSED
        return stream_id

    def goaway(self) -> None:
        """Tell the server that we open no more streams; open ones go on."""
        if not self.closed and not self.leaving:
            self.leaving = True
            self.outbound.append(frames.goaway(0, Http2ErrorCode.NO_ERROR, b""))

    def _send(self, stream_id: int, stream: Http2Stream, buffers: Sequence[Buffer], ending: bytes | None) -> None:
        if stream.state & LOCAL_CLOSED:
            raise RuntimeError(f"stream {stream_id} has already ended")
        super()._send(stream_id, stream, buffers, ending)

    def _ended(self, stream_id: int, stream: Http2Stream) -> None:
        stream.state |= LOCAL_CLOSED

    # -- responses

    def _take_preface(self, data: bytes | memoryview) -> bytes | memoryview:
        raise AssertionError("a server has no preface but its SETTINGS")

    def _take_block(self, flags: int, stream_id: int, block: bytes) -> None:
        """Process a complete header block: of a response, of an interim response, or of trailers."""
        stream = self._streams.get(stream_id)
        if stream is None:
            self._check_not_idle(stream_id)
            if not self._is_forgiven(stream_id):
                raise ProtocolError(Http2ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
            self._count_idle_frame()
            self._responses.discard(block)
            return
        try:
            headers = self._responses.response(block)
        except MalformedHeaders as error:
            self._fail_stream(stream_id, error.code)
            return
        ends = bool(flags & END_STREAM)
        if stream.state & ANSWERED:
            self._take_trailers(stream_id, stream, headers, ends)
        elif headers.status < 200:
            # Interim responses say nothing that a gateway needs. 101 does not exist in HTTP/2.
            if ends or headers.status in (0, 101):
                self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
            else:
                self._count_idle_frame()
        else:
            stream.state |= ANSWERED
            if ends:
                self._response_ended(stream_id, stream)
            elif headers.content_length >= 0 and headers.status not in _WITHOUT_BODY:
                stream.state |= MEASURED
                stream.missing = headers.content_length
            self._handler.response_started(stream_id, headers, ends)

    def _take_trailers(self, stream_id: int, stream: Http2Stream, trailers: ReplyHeaders, ends: bool) -> None:
        if trailers.status or not ends or (stream.state & MEASURED and stream.missing):
            self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
            return
        self._response_ended(stream_id, stream)
        self._handler.trailers_received(stream_id, trailers)

    def _take_response_data(self, stream_id: int, data: bytes | memoryview, end_stream: bool) -> None:
        stream = self._streams[stream_id]
        if not stream.state & ANSWERED:
            self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
            return
        if end_stream:
            self._response_ended(stream_id, stream)
        self._handler_data(stream_id, data, end_stream)

    def _response_ended(self, stream_id: int, stream: Http2Stream) -> None:
        """Forget a stream whose response is complete."""
        stream.state |= REMOTE_CLOSED
        self._forget(stream_id, stream)
        if not stream.state & LOCAL_CLOSED:
            self._write_reset(stream_id, Http2ErrorCode.NO_ERROR)

    # -- the end of the connection

    @property
    def _served_stream_id(self) -> int:
        return 0

    def _take_settings(self, flags: int, payload: bytes) -> None:
        super()._take_settings(flags, payload)
        self.settled = True

    def _peer_leaves(self, last_stream_id: int, code: int, reason: str) -> None:
        """Open no more streams, and report those that the server has not processed."""
        self.leaving = True
        self._processed_stream_id = min(self._processed_stream_id, last_stream_id)
        self._handler.connection_closing(code, reason)
        for stream_id, stream in list(self._streams.items()):
            if stream_id > self._processed_stream_id and self._streams.get(stream_id) is stream:
                self._forget(stream_id, stream)
                self._handler.stream_closed(stream_id, Http2ErrorCode.REFUSED_STREAM)
