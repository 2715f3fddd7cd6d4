"""One HTTP/1.1 connection: bytes in, one exchange at a time, bytes out. Knows nothing about paths or models.

Theory of operation. The connection is in one of these states:

    HEAD      waits for the empty line that ends a head; the bytes received so far are in ``_stash``
    BODY      receives a body of known size directly into its own buffer (``_missing`` is the part still to come)
    CHUNKED   receives a chunked body through the decoder
    DISCARD   reads and discards the body of a rejected request (``_discard`` bytes remain)
    BUSY      waits for the reply to the current exchange; pipelined bytes go to ``_stash``
    LINGER    has sent its last reply; reads and discards what the client still sends

Small requests stay in HEAD until they are complete. A body is received where it will be used (zero-copy): in memory
that the model's worker maps, if the handler offers it. Only one exchange is open at a time, so replies leave in the
order of requests.

Clients repeat the same request with other tensor data. The connection therefore remembers, for each request length,
the last request that its handler declared repeatable; a request that begins with the same bytes skips parsing.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from nerite.core.byte_budget import HTTP_REPEATS, Memo
from nerite.core.errors import InvalidArgument
from nerite.core.failures import report
from nerite.core.request import CancelReason
from nerite.core.tensor import Buffer
from nerite.transports.http import reply
from nerite.transports.http.content_coding import BadChunk, ChunkDecoder
from nerite.transports.http.handler import HttpShared
from nerite.transports.http.head import MAX_HEAD, BadHead, RememberedRequest, RequestHead
from nerite.transports.http.reply import Reply
from nerite.transports.limits import COUNTED, ArrivalTimeout, ByteReservation

if TYPE_CHECKING:
    from nerite.core.execution_observer import TraceContext
    from nerite.core.request import InferenceRequest
    from nerite.core.response import InferenceResponse
    from nerite.transports.http.handler import HttpWork

_MAX_STASH = 64 * 1024
"""Bytes that a client may pipeline before the connection stops reading (backpressure)."""
_LAST_SECONDS = 0.15
"""Time for a last request on a connection whose end no reply has announced."""


ConnectionState = enum.Enum("ConnectionState", ("HEAD", "BODY", "CHUNKED", "DISCARD", "BUSY", "LINGER"))
# Module globals, because looking up an enum member costs as much as a call.
_HEAD, _BODY, _CHUNKED, _DISCARD, _BUSY, _LINGER = ConnectionState


class HttpConnection(asyncio.BufferedProtocol):
    """Server side of one client connection: receives requests, hands them to the handler and sends its replies."""

    protocol = "HTTP"
    began_ns = 0
    outer_span: TraceContext | None = None

    def __init__(self, shared: HttpShared) -> None:
        self._shared = shared
        self._state = _HEAD
        self._stash = b""
        self._remembered: Memo[int, RememberedRequest] = Memo()
        """Repeatable requests by their length in bytes."""
        self._head: RequestHead | None = None
        self._body = memoryview(b"")
        self._missing = memoryview(b"")
        self._chunks: ChunkDecoder | None = None
        self._discard = 0
        self._partial_requests = 0
        """Number of requests so far that arrived in several reads."""
        self._arrival_timeout = ArrivalTimeout()
        self._reservation = ByteReservation(shared.bounds.bytes)
        """Bytes of the request that is being received or answered, unless it is small."""
        self._stash_reservation = ByteReservation(shared.bounds.bytes)
        """Bytes of ``_stash``."""
        self.served = 0
        """Number of requests that were answered."""
        self._transport: asyncio.Transport
        self._reading = True
        self._writable = True
        self._advancing = False
        self._opened = False
        """Part of the reply to the current exchange has been sent."""
        self._last = False
        """The connection closes after the next reply."""
        self._announced = self._spared = False
        """The head of the current reply says so. / No reply has said so: the connection waits for a last request."""
        self._unread = False
        """The client may still be sending bytes that are no longer parsed."""
        self._lingered = False
        """The connection was already in ``LINGER`` at the previous check."""
        self._closing = False
        self.request: HttpWork | None = None
        """The work that this exchange runs; cancelled if the client disconnects."""

    @property
    def head(self) -> RequestHead:
        """The head of the current exchange."""
        assert self._head is not None
        return self._head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self._shared.connections.add(self)
        self._last = self._shared.draining
        self._shared.bounds.connections.add(self, time.monotonic())

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything and cancel the current request: its client is gone."""
        self._shared.connections.discard(self)
        self._shared.closed()
        self._shared.bounds.connections.remove(self)
        self._closing = True
        self._drop_body()
        self._reservation.give_back()
        self._stash_reservation.give_back()
        self._remembered.clear()
        request, self.request = self.request, None
        if request is not None:
            request.cancel(CancelReason.DISCONNECTED)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes. It is never empty."""
        return self._missing if self._state is _BODY else self._shared.scratch_view

    def buffer_updated(self, nbytes: int) -> None:
        """Process ``nbytes`` received bytes."""
        try:
            state = self._state
            if state is _BODY:
                self._missing = missing = self._missing[nbytes:]
                whole = len(self._body)
                arrived = whole - len(missing)
                if self._reservation.size < arrived and not self._reservation.cover(arrived, whole):
                    self._no_room(arrived)
                elif not missing:
                    self._complete(self._body)
                return
            shared = self._shared
            if self._stash or state is not _HEAD or not self._writable:
                self._receive(bytes(shared.scratch_view[:nbytes]))
                return
            # Fast paths: a known request, and a whole request in one read, parsed in the read buffer.
            known = self._remembered.get(nbytes)
            if known is not None and shared.scratch.startswith(known.beginning):
                self._state = _BUSY
                self._head = known.head
                self.outer_span = None
                if nbytes >= COUNTED and not self._reservation.take(nbytes):
                    self.send([reply.error_reply(shared.bounds.bytes.refusal(nbytes)).encode()])
                    return
                shared.handler.handle_again(self, known.meaning, shared.scratch[len(known.beginning) : nbytes])
            else:
                self._parse(shared.scratch, shared.scratch_view, nbytes)
                if self._stash:
                    self._partial_requests += 1
                    self._count_ahead()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Close the connection after an unexpected exception, with an error reply if none has begun."""
        failure = report("http", error, "in a connection")
        if self._closing:
            return
        if self._opened:
            self.abort()
        else:
            self._hang_up(failure.http_status, failure.message)

    def eof_received(self) -> bool:
        """Close: HTTP treats a client that stops sending as one that no longer reads."""
        return False

    @property
    def secure(self) -> bool:
        """Whether the client is connected over TLS."""
        return self._transport.get_extra_info("sslcontext") is not None

    @property
    def writable(self) -> bool:
        """Whether the client keeps up with what is written."""
        return self._writable

    def pause_writing(self) -> None:
        """Pause the responses of the current request: the client does not read (backpressure)."""
        self._writable = False
        if self.request is not None:
            self.request.pause(True)

    def resume_writing(self) -> None:
        """Resume the responses of the current request."""
        self._writable = True
        if self.request is not None:
            self.request.pause(False)
        if self._state is _HEAD:
            self._next()

    def hold(self, share: ByteReservation) -> None:
        """Take over the bytes that were reserved for the current exchange."""
        self._reservation.absorb(share)

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Have the handler send the response of an inference; drop it if the client is gone."""
        if self.request is request:
            self._shared.handler.answer(self, request, response)

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send the complete reply to the current exchange, then continue with the next request."""
        self.request = None
        head = self._head
        if self._closing or head is None:
            return
        last = self._last or not head.keep_alive
        if last or head.special:
            first = reply.addressed(bytes(parts[0]), head, last=last)
            parts = [first, *parts[1:]]
            if head.method == "HEAD":
                parts = [first.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"]
        try:
            if len(parts) == 1:
                self._transport.write(parts[0])
            else:
                self._transport.writelines(parts)
        except Exception as error:  # part of the reply may have been sent
            self._opened = True
            self._fail(error)
            return
        self._answered(last)

    def open(self, first: bytes, data: bytes = b"") -> None:
        """Begin a reply with a head of ``chunked_head`` and a first chunk; ``send_chunk``, ``close_reply`` follow.

        An HTTP/1.0 client gets the same bytes without chunked framing; the end of the connection ends the reply.
        """
        if self._closing:
            return
        if self.head.version == "1.0":
            self._last = True
            first = first.replace(b"Transfer-Encoding: chunked\r\n", b"")
        self._announced = self._last or not self.head.keep_alive
        first = reply.addressed(first, self.head, last=self._announced)
        self._opened = True
        self._transport.write(first + self._chunk(data) if data else first)

    def send_chunk(self, data: bytes) -> None:
        """Send one chunk of the reply."""
        if not self._closing:
            self._transport.write(self._chunk(data))

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Send one large chunk of the reply without copying it."""
        if self._closing:
            return
        if self.head.version != "1.0":
            pieces = [b"%x\r\n" % sum(map(len, pieces)), *pieces, b"\r\n"]
        self._transport.writelines(pieces)

    def send_bytes(self, data: Buffer) -> None:
        """Send bytes of the reply as they are: the head that was given to ``open`` says how they are framed.

        ``end_reply`` follows instead of ``close_reply``.
        """
        if not self._closing:
            self._transport.write(data)

    def _chunk(self, data: bytes) -> bytes:
        return data if self.head.version == "1.0" else b"%x\r\n%b\r\n" % (len(data), data)

    def close_reply(self) -> None:
        """End the reply that ``open`` began, then continue with the next request."""
        if not self._closing and self._head is not None and self._head.version != "1.0":
            self._transport.write(b"0\r\n\r\n")
        self.end_reply()

    def end_reply(self) -> None:
        """End a reply that is sent as far as its own framing says, then continue with the next request."""
        self.request = None
        head = self._head
        if not self._closing and head is not None:
            unannounced = self._last and not (self._announced or self._unread)
            self._answered(not unannounced and (self._last or not head.keep_alive))
            if unannounced:
                self._spare(_LAST_SECONDS)

    def _spare(self, least: float) -> None:
        """Stay open for a last request, which the client may be sending at this moment."""
        if (seconds := max(least, self._shared.bounds.exit_keepalive)) > 0:
            self._spared = True
            asyncio.get_running_loop().call_later(seconds, self._spare_no_more)
        else:
            self.retire()

    def _spare_no_more(self) -> None:
        self._spared = False
        if self._head is None and not self._stash:
            self.retire()

    def _answered(self, last: bool) -> None:
        self._head = None
        self._opened = False
        self.served += 1
        if self._reservation.size:
            self._reservation.give_back()
        if last:
            self.retire()
            return
        if self._state is _BUSY:
            self._state = _HEAD
            if self._stash or not self._reading:
                self._next()

    def check(self, now: float, seconds: float) -> None:
        """Close the connection if a partly received request has made no progress for ``seconds``."""
        if self._state is _LINGER:
            if self._lingered:
                self.retire()
            self._lingered = True
        elif self._arrival_timeout.exhausted(self._arriving, now, seconds):
            if self._state is _DISCARD:
                self._shared.bounds.closed["stalled"] += 1
                self.retire()  # the error reply was already sent
            else:
                self._shared.bounds.refused["stalled"] += 1
                self._hang_up(408, f"Request Timeout: no more of the request arrived for {seconds:g} s")

    @property
    def _arriving(self) -> tuple[int, int] | None:
        """Number and received size of the request that is arriving; None if none is. Changes on any progress."""
        state = self._state
        if self._closing or state is _BUSY or not self._writable:
            return None
        if state is _HEAD:
            return (self._partial_requests, len(self._stash)) if self._stash else None
        if state is _BODY:
            return self._partial_requests, len(self._body) - len(self._missing)
        if state is _CHUNKED and self._chunks is not None:
            return self._partial_requests, len(self._chunks.body)
        return self._partial_requests, -self._discard

    def forget(self) -> None:
        """Discard remembered requests, because access rules have changed: the next request is parsed in full."""
        self._remembered.clear()

    def abort(self) -> None:
        """Close at once, discarding unsent bytes."""
        self._transport.abort()

    @property
    def gone(self) -> bool:
        """Whether the client no longer waits for a reply."""
        return self._closing

    @property
    def busy(self) -> bool:
        """Whether a request is being received or answered, or reply bytes are still unsent."""
        if self._state is _LINGER:
            return False
        return self._state is not _HEAD or bool(self._stash) or self._transport.get_write_buffer_size() > 0

    def drain(self) -> None:
        """Close after the next reply."""
        self._last = True

    def shut_down(self) -> None:
        """Close once the current exchange is answered, or soon if none is open."""
        self._last = True
        if self._head is None and not self._stash and not self._spared:
            self._spare(0)

    def retire(self) -> None:
        """Close. If the client may still be sending, linger: close the write side and wait for the client or a timeout.

        A client that sends to a closed socket gets a reset, and may lose a reply that it has not read yet.
        """
        if self._unread and not self._closing and self._transport.can_write_eof():
            self._closing = True
            self._state = _LINGER
            self._transport.write_eof()
            if not self._reading:
                self._reading = True
                self._transport.resume_reading()
            return
        self._closing = True
        self._transport.close()

    def _next(self) -> None:
        """Process the pipelined bytes in ``_stash`` and resume reading."""
        if not self._writable or self._advancing:
            return
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        # A loop instead of recursion: a client may pipeline any number of requests.
        self._advancing = True
        try:
            while self._stash and self._state is _HEAD and self._writable and not self._closing:
                data, self._stash = self._stash, b""
                self._parse(data, memoryview(data), len(data))
                if len(self._stash) == len(data):
                    break
            self._count_ahead()
        except Exception as error:
            self._fail(error)
        finally:
            self._advancing = False

    def _count_ahead(self) -> None:
        """Reserve the bytes of ``_stash``. If the limit is reached, reject a partial head, or stop reading."""
        size = len(self._stash) if len(self._stash) > COUNTED else 0
        if size == self._stash_reservation.size:
            return
        self._stash_reservation.give_back()
        if self._closing or self._stash_reservation.take(size):
            return
        if self._state is _HEAD:
            error = self._shared.bounds.bytes.refusal(size)
            self._hang_up(error.http_status, error.message, error.retry_after)
        elif self._reading:
            self._reading = False
            self._transport.pause_reading()

    def _no_room(self, size: int) -> None:
        """Reject a partly received request for lack of memory, and skip the rest of its body."""
        if self._state is _BODY:
            self._state, self._discard = _DISCARD, len(self._missing)
        else:
            self._leave_unread()
            self._state = _BUSY
        self._drop_body()
        self.send([reply.error_reply(self._shared.bounds.bytes.refusal(size)).encode()])
        if not self._closing:
            self._skip(b"")

    def _receive(self, data: bytes) -> None:
        """Process received bytes in any state except BODY."""
        state = self._state
        if state is _CHUNKED:
            self._decode(data)
        elif state is _DISCARD:
            self._skip(data)
        elif state is _LINGER:
            pass
        elif state is _BUSY or not self._writable:
            self._stash += data
            self._count_ahead()
            if len(self._stash) > _MAX_STASH and self._reading:
                self._reading = False
                self._transport.pause_reading()
        else:
            self._stash += data
            self._next()

    def _parse(self, data: bytes | bytearray, view: memoryview, size: int) -> None:
        """Parse and handle requests from ``data`` while they are complete and can be answered; stash the rest."""
        at = 0
        while at < size:
            found = data.find(b"\r\n\r\n", at, size)
            end = found + 4 if found >= 0 else size
            if end - at > MAX_HEAD:
                self._hang_up(400, f"Bad Request: the head is larger than {MAX_HEAD} bytes")
                return
            if found < 0:
                break
            try:
                head, self.outer_span = self._shared.head(bytes(view[at:end]))
            except BadHead as error:
                self._hang_up(400, f"Bad Request: {error}")
                return
            self._head = head
            stop = end + head.content_length
            refusal = self._shared.handler.begin(head)
            if refusal is None and head.content_length > self._shared.max_body:
                refusal = self._shared.too_large(head, head.content_length)
            if refusal is None and head.content_length >= COUNTED:
                taken = self._shared.bounds.bytes
                # A body in several pieces is reserved as it arrives: announcing a size takes nothing from others.
                if not (self._reservation.take if stop <= size else taken.fits)(head.content_length):
                    refusal = reply.error_reply(taken.refusal(head.content_length))
            if refusal is not None:
                self._refuse(refusal, head, view[end:size])
                return
            if stop > size or head.chunked:
                self._open_body(head, view[end:size])
                return
            self._state = _BUSY
            # A copy, because the read buffer is shared; writable, because models may work in place.
            body = memoryview(bytearray(view[end:stop]))
            question = self._shared.handler.handle(self, head, body)
            if question is not None and at == 0 and self.outer_span is None:
                text = bytes(data[:end]) + bytes(body[: question.text_size])
                footprint = len(text) + head.footprint + question.footprint
                HTTP_REPEATS.put(self._remembered, stop, RememberedRequest(text, head, question.meaning), footprint)
            at = stop
            if self._state is not _HEAD or not self._writable:
                break
        if at < size:
            self._stash = bytes(view[at:size]) + self._stash
            if at:
                self._partial_requests += 1

    def _open_body(self, head: RequestHead, rest: memoryview) -> None:
        """Start to receive the body of ``head``, whose first bytes are ``rest``."""
        if not head.chunked and not self._reservation.cover(len(rest), head.content_length):
            self._refuse(reply.error_reply(self._shared.bounds.bytes.refusal(len(rest))), head, rest)
            return
        self._partial_requests += 1
        self.began_ns = time.monotonic_ns()
        if head.expects_continue:
            self._transport.write(reply.CONTINUE)
        if head.chunked:
            self._state = _CHUNKED
            self._chunks = ChunkDecoder(self._shared.max_body)
            self._decode(bytes(rest))
            return
        body = self._shared.handler.receive_buffer(head)
        if body is None:
            body = memoryview(bytearray(head.content_length))
        body[: len(rest)] = rest
        self._state = _BODY
        self._body = body
        self._missing = body[len(rest) :]

    def _decode(self, data: bytes) -> None:
        assert self._chunks is not None and self._head is not None
        if not self._reservation.take(len(data)):
            self._no_room(len(data))
            return
        try:
            rest = self._chunks.feed(data)
        except BadChunk as error:
            self._hang_up(400, f"Bad Request: {error}")
            return
        except InvalidArgument as error:
            self._leave_unread()
            self._chunks = None
            self.send([reply.error_reply(error).encode()])
            return
        if self._chunks.complete:
            body = self._chunks.body
            self._stash = rest
            if len(body) > self._shared.max_body:
                self._state = _BUSY
                self.send([self._shared.too_large(self._head, len(body)).encode()])
            else:
                self._complete(memoryview(body))

    def _skip(self, data: bytes) -> None:
        """Discard the rest of a rejected body."""
        if len(data) < self._discard:
            self._discard -= len(data)
            return
        rest = data[self._discard :]
        self._discard = 0
        self._state = _HEAD
        if rest:
            self._stash = rest
            self._next()

    def _complete(self, body: memoryview) -> None:
        """Hand a request whose body is complete to the handler."""
        assert self._head is not None
        self._state = _BUSY
        self._drop_body()
        self._shared.handler.handle(self, self._head, body)
        self.began_ns = 0

    def _drop_body(self) -> None:
        self._body = self._missing = memoryview(b"")
        self._chunks = None

    def _refuse(self, refusal: Reply, head: RequestHead, rest: memoryview) -> None:
        """Send ``refusal`` before the body has arrived, then discard the body."""
        if head.chunked:
            self._leave_unread()
            self._state = _BUSY
            self.send([refusal.encode()])
            return
        self._state, self._discard = _DISCARD, head.content_length
        self._partial_requests += 1
        self.send([refusal.encode()])
        if not self._closing:
            self._skip(bytes(rest))

    def _leave_unread(self) -> None:
        """Make the next reply the last one: only decoding would show where a chunked body ends."""
        self._last = self._unread = True

    def _hang_up(self, status: int, reason: str, retry_after: int = 0) -> None:
        """Answer and close: the start of the next request is unknown, or nothing more can be read."""
        self._transport.write(reply.farewell(status, reason, retry_after).encode())
        self._unread = True
        self.retire()
