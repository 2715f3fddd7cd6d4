"""gRPC load generator: slots with a call for each request, or with a stream that carries one after the other."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from time import perf_counter
from typing import Final, cast
from urllib.parse import unquote

from nerite.client.connection import Address
from nerite.http2 import frames
from nerite.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_WINDOW,
    MIN_MAX_FRAME_SIZE,
    ProtocolError,
    block_start,
    pack_header,
    unpack_header,
)
from nerite.http2.headers import FieldDecoder, encode_fields
from nerite.http2.limits import INITIAL_WINDOW_SIZE, PeerSettings
from nerite.tools.bench.forms import Script
from nerite.tools.bench.http_generator import RETRY_SECONDS, RequestSlot, SlotWork
from nerite.wire import grpc_service

# An HTTP/2 connection of a gRPC client, shared by several calls.

_RETURN_AT: Final = MAX_WINDOW // 2
_MAX_BLOCKS: Final = 256
_LARGEST_LIST: Final = 1 << 20
_OPENING: Final = (
    frames.PREFACE
    + frames.settings([(INITIAL_WINDOW_SIZE, MAX_WINDOW)])
    + frames.window_update(0, MAX_WINDOW - frames.DEFAULT_WINDOW)
)
_OK: Final = "0"


class GrpcClientCall(ABC):
    """A call on a connection."""

    def __init__(self, *, reads: bool) -> None:
        self.reads = reads
        """True to receive response messages; False if only the end of the call matters."""
        self.stream_id = 0
        self.window = 0
        """Bytes that flow control allows to send."""
        self.unreturned = 0
        """Received bytes for which no window update was sent yet."""
        self.outbox: deque[tuple[memoryview, bool]] = deque()
        """Messages held back by flow control; the flag marks the last one of the call."""

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Take a part of the response messages."""

    @abstractmethod
    def ended(self, reason: str) -> None:
        """Take the outcome of the call: the reason of a failure, or "" for success."""


class GrpcLine(asyncio.Protocol):
    """A connection that carries calls. It connects, and reconnects, by itself; calls wait until it is connected."""

    def __init__(self, address: Address, context: ssl.SSLContext | None, block: bytes) -> None:
        self._address = address
        self._context = context
        self._headers = block_start(len(block), END_HEADERS), block
        self._transport: asyncio.Transport | None = None
        self._waiting: list[tuple[GrpcClientCall, bytes, bool]] = []
        self._closed = False
        self._begin()
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def _begin(self) -> None:
        self._peer = PeerSettings()
        self._window = frames.DEFAULT_WINDOW
        self._unreturned = 0
        self._leaving = False
        """The server has sent GOAWAY: calls in progress end here, and others begin on a new connection."""
        self._next_id = 1
        self._calls: dict[int, GrpcClientCall] = {}
        self._held = b""
        self._decoder = FieldDecoder(_LARGEST_LIST)
        self._outcomes: dict[bytes, str] = {}
        """Outcome of each header block, while the dynamic table is unchanged."""

    # Calls.

    def open(self, call: GrpcClientCall, message: bytes, *, last: bool) -> None:
        """Begin a call with a length-prefixed message. ``last``: no more messages follow."""
        transport = self._transport
        if transport is None or self._leaving:
            self._waiting.append((call, message, last))
            return
        stream_id = call.stream_id = self._next_id
        self._next_id += 2
        self._calls[stream_id] = call
        call.window = self._peer.initial_window_size
        number = stream_id.to_bytes(4)
        start, block = self._headers
        size = len(message)
        if size > MIN_MAX_FRAME_SIZE or size > self._window or size > call.window:
            transport.write(start + number + block)
            self.send(call, message, last=last)
            return
        self._window -= size
        call.window -= size
        data = pack_header(size << 8 | DATA, END_STREAM if last else 0, stream_id)
        transport.write(b"".join((start, number, block, data, message)))

    def send(self, call: GrpcClientCall, message: bytes, *, last: bool = False) -> None:
        """Send a message on an open call, as soon as flow control allows."""
        call.outbox.append((memoryview(message), last))
        self._flush(call)

    def cancel(self, call: GrpcClientCall) -> None:
        """Cancel a call, without a call of its ``ended``."""
        if self._calls.pop(call.stream_id, None) is call and self._transport is not None:
            self._transport.write(frames.rst_stream(call.stream_id, frames.Http2ErrorCode.CANCEL))
        self._waiting = [waiting for waiting in self._waiting if waiting[0] is not call]

    def close(self) -> None:
        """Close the connection, without a call of ``ended`` of its calls."""
        self._closed = True
        self._connecting.cancel()
        self._calls.clear()
        if self._transport is not None:
            self._transport.abort()

    def _flush(self, call: GrpcClientCall) -> None:
        transport = self._transport
        if transport is None:
            return
        outbox = call.outbox
        while outbox:
            message, last = outbox[0]
            size = min(len(message), self._peer.max_frame_size, self._window, call.window)
            if size <= 0:
                return
            self._window -= size
            call.window -= size
            ends = size == len(message)
            flags = END_STREAM if ends and last else 0
            transport.writelines([pack_header(size << 8 | DATA, flags, call.stream_id), message[:size]])
            if ends:
                outbox.popleft()
            else:
                outbox[0] = message[size:], last

    # Connection.

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closed and self._transport is None:
            try:
                await loop.create_connection(lambda: self, self._address.host, self._address.port, ssl=self._context)
            except OSError as error:
                waiting, self._waiting = self._waiting, []
                for call, _, _ in waiting:
                    call.ended(f"cannot reach {self._address}: {error.strerror or error}")
                await asyncio.sleep(RETRY_SECONDS)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface, and begin the waiting calls."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_OPENING)
        waiting, self._waiting = self._waiting, []
        for call, message, last in waiting:
            self.open(call, message, last=last)

    def connection_lost(self, error: Exception | None) -> None:
        """End all calls, and reconnect."""
        self._transport = None
        if self._closed:
            return
        calls = list(self._calls.values())
        self._begin()
        self._connecting = asyncio.get_running_loop().create_task(self._connect())
        for call in calls:
            call.ended(f"the server closed the connection{f': {error}' if error else ''}")

    # Frames.

    def data_received(self, data: bytes) -> None:
        """Handle each complete frame."""
        if self._held:
            data = self._held + data
        at, size = 0, len(data)
        calls = self._calls
        while size - at >= frames.HEADER_SIZE:
            word, flags, stream_id = unpack_header(data, at)
            body = at + frames.HEADER_SIZE
            at = body + (word >> 8)
            if at > size:
                at = body - frames.HEADER_SIZE
                break
            kind = word & 0xFF
            if kind == DATA:
                self._take_data(calls.get(stream_id), data, body, at)
                if flags & END_STREAM and stream_id in calls:
                    calls.pop(stream_id).ended("the server ended the call without a status")
            elif kind == HEADERS:
                outcome = self._outcomes.get(data[body:at])
                if outcome is None:
                    outcome = self._read(data[body:at])
                if flags & END_STREAM and stream_id in calls:
                    calls.pop(stream_id).ended("" if outcome == _OK else outcome)
            else:
                self._take_control(kind, flags, stream_id, data[body:at])
        self._held = data[at:] if at < size else b""
        if self._unreturned >= _RETURN_AT and self._transport is not None:
            self._transport.write(frames.window_update(0, self._unreturned))
            self._unreturned = 0
        if self._leaving and not self._calls and self._transport is not None:
            self._transport.close()

    def _take_data(self, call: GrpcClientCall | None, data: bytes, begin: int, end: int) -> None:
        self._unreturned += end - begin
        if call is None or not call.reads:
            return
        call.unreturned += end - begin
        if call.unreturned >= _RETURN_AT and self._transport is not None:
            self._transport.write(frames.window_update(call.stream_id, call.unreturned))
            call.unreturned = 0
        call.received(data[begin:end])

    def _read(self, block: bytes) -> str:
        """Return the outcome in a header block: ``0`` for success, the reason of a failure, or "" if it has none."""
        changes = self._decoder.changes
        try:
            fields = dict(self._decoder.decode(block))
        except ProtocolError as error:
            return error.reason
        status = fields.get(b"grpc-status", b"").decode()
        if status and status != _OK:
            outcome = f"status {status}: {unquote(fields.get(b'grpc-message', b'').decode())}"
        elif fields.get(b":status", b"200") != b"200":
            outcome = f"HTTP status {fields[b':status'].decode()}: is that the port for gRPC?"
        else:
            outcome = status
        if self._decoder.changes != changes or len(self._outcomes) >= _MAX_BLOCKS:
            self._outcomes.clear()
        if self._decoder.changes == changes:
            self._outcomes[block] = outcome
        return outcome

    def _take_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        assert self._transport is not None
        if kind == frames.WINDOW_UPDATE:
            self._take_credit(stream_id, int.from_bytes(payload))
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            before = self._peer.initial_window_size
            self._peer.update(payload)
            self._transport.write(frames.SETTINGS_ACK)
            for call in self._calls.values():
                call.window += self._peer.initial_window_size - before
                self._flush(call)
        elif kind == frames.PING and not flags & frames.ACK:
            self._transport.write(frames.ping(payload, frames.ACK))
        elif kind == frames.RST_STREAM and stream_id in self._calls:
            self._calls.pop(stream_id).ended(f"the server reset the call (code {int.from_bytes(payload)})")
        elif kind == frames.GOAWAY:
            self._leaving = True

    def _take_credit(self, stream_id: int, credit: int) -> None:
        if stream_id:
            if stream_id in self._calls:
                self._calls[stream_id].window += credit
                self._flush(self._calls[stream_id])
            return
        self._window += credit
        for call in list(self._calls.values()):
            if call.outbox:
                self._flush(call)


SERVICE: Final = "/inference.GRPCInferenceService/"
_SHARED_BY: Final = 8
"""Number of slots that share a connection."""
_PREFIX: Final = 5


class GrpcPort:
    """Server that slots connect to."""

    def __init__(
        self,
        address: Address,
        context: ssl.SSLContext | None,
        headers: Mapping[str, str],
        *,
        streaming: bool = False,
        decoupled: bool = False,
    ) -> None:
        self._address = address
        self._context = context
        self._block = header_block(address, "ModelStreamInfer" if streaming else "ModelInfer", headers)
        self._streaming = streaming
        self._decoupled = decoupled
        self._lines: list[GrpcLine] = []
        self._slots = 0

    def slot(self, work: SlotWork, script: Script) -> RequestSlot:
        """Return a new slot."""
        if self._slots % _SHARED_BY == 0:
            self._lines.append(GrpcLine(self._address, self._context, self._block))
        self._slots += 1
        line = self._lines[-1]
        if self._streaming:
            return StreamSlot(line, work, script, decoupled=self._decoupled)
        return CallSlot(line, work, script)


def header_block(address: Address, method: str, headers: Mapping[str, str]) -> bytes:
    """Return the encoded headers of a call, without references to the dynamic table."""
    authority = f"{address.host}:{address.port}"
    fields = [(":method", "POST"), (":scheme", "https" if address.tls else "http"), (":path", SERVICE + method)]
    fields += [(":authority", authority), ("content-type", "application/grpc"), ("te", "trailers")]
    fields += [(name.lower(), value) for name, value in headers.items()]
    return encode_fields([(name.encode(), value.encode()) for name, value in fields])


class CallSlot(RequestSlot, GrpcClientCall):
    """Sends each request in its own call."""

    def __init__(self, line: GrpcLine, work: SlotWork, script: Script) -> None:
        RequestSlot.__init__(self, work, script)
        GrpcClientCall.__init__(self, reads=False)
        self._line = line

    def ask(self) -> None:
        """Send the next request."""
        self._line.open(self, self.next(), last=True)

    def abandon(self, reason: str) -> None:
        """Cancel the call."""
        self._line.cancel(self)
        self.ended(reason)

    def cancel(self) -> None:
        """Cancel the call."""
        self._line.cancel(self)
        self.outbox.clear()
        self.work.cancelled(self)

    def close(self) -> None:
        """Close the connection that this slot shares with others."""
        self._line.close()

    def received(self, data: bytes) -> None:
        """Ignore the response."""

    def ended(self, reason: str) -> None:
        """Report the outcome of the request."""
        if reason:
            self.outbox.clear()
            self.work.failed(self, reason)
        else:
            self.work.answered(self)


class StreamSlot(CallSlot):
    """Sends requests on a stream, each after all responses to the previous one."""

    def __init__(self, line: GrpcLine, work: SlotWork, script: Script, *, decoupled: bool) -> None:
        super().__init__(line, work, script)
        self.reads = True
        self._decoupled = decoupled
        self._open = False
        self._received = bytearray()
        self._times: list[float] = []

    def ask(self) -> None:
        """Send the next request; the first one opens the stream."""
        self._times.clear()
        if self._open:
            self._line.send(self, self.next())
        else:
            self._open = True
            self._line.open(self, self.next(), last=False)

    def cancel(self) -> None:
        """Cancel the stream; the next request opens a new one."""
        self._open = False
        self._received.clear()
        super().cancel()

    def received(self, data: bytes) -> None:
        """Take each complete response."""
        received = self._received
        received += data
        while len(received) >= _PREFIX:
            end = _PREFIX + int.from_bytes(received[1:_PREFIX])
            if len(received) < end:
                return
            message = grpc_service.ModelStreamInferResponse.FromString(bytes(received[_PREFIX:end]))
            del received[:end]
            self._take(message)

    def _take(self, message: grpc_service.ModelStreamInferResponse) -> None:
        if message.error_message:
            self.work.failed(self, message.error_message)
            return
        response = message.infer_response
        if response.outputs:
            self._times.append(perf_counter())
        if not self._decoupled or response.parameters["triton_final_response"].bool_param:
            if self._times:
                self.work.recorder.came(self._times, 0)
                self.work.answered(self)
            else:
                self.work.failed(self, "the answer has no content")

    def ended(self, reason: str) -> None:
        """Fail the current request; the next one opens a new stream."""
        self._open = False
        self._received.clear()
        self.outbox.clear()
        if self.sent:
            self.work.failed(self, reason or "the server ended the stream")
