"""A client made of bare bytes, and a handler that writes down what it is told."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from nerite.http2 import Buffer, Http2Connection, Http2ErrorCode, Limits, RequestHeaders, encode_headers
from nerite.http2.frames import PREFACE

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITISED = 0x20

REQUEST = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b":authority", b"localhost"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)
HEAD = encode_headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
TRAILERS = encode_headers([(b"grpc-status", b"0")])


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream_id.to_bytes(4) + payload


def literal(fields) -> bytes:
    """HPACK without any table or Huffman: each field is a literal, so that tests may say anything."""
    block = b""
    for name, value in fields:
        assert len(name) < 127
        block += b"\0" + bytes((len(name),)) + name
        if len(value) < 127:
            block += bytes((len(value),)) + value
        else:
            length = len(value) - 127
            block += b"\x7f"
            while length >= 128:
                block += bytes((length & 127 | 128,))
                length >>= 7
            block += bytes((length,)) + value
    return block


def headers(stream_id: int, fields=REQUEST, *, end: bool = False, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags | (END_STREAM if end else 0), stream_id, literal(fields))


def data(stream_id: int, payload: bytes, *, end: bool = False) -> bytes:
    return frame(DATA, END_STREAM if end else 0, stream_id, payload)


def settings(*entries: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *entry) for entry in entries))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))


def rst_stream(stream_id: int, code: int = Http2ErrorCode.CANCEL) -> bytes:
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4))


def parse(buffers: list[Buffer]) -> list[Frame]:
    """Cut bytes into frames; fails if they do not end with one."""
    stream = b"".join(bytes(buffer) for buffer in buffers)
    frames = []
    while stream:
        length = int.from_bytes(stream[:3])
        assert len(stream) >= 9 + length, "a frame is incomplete"
        frames.append(Frame(stream[3], stream[4], int.from_bytes(stream[5:9]), stream[9 : 9 + length]))
        stream = stream[9 + length :]
    return frames


@dataclass
class Recorder:
    """Keeps the events; what it does with them is up to the tests, through ``connection``."""

    events: list[tuple[object, ...]] = field(default_factory=list)
    bodies: dict[int, bytes] = field(default_factory=dict)
    connection: Http2Connection = field(init=False)

    def request_started(self, stream_id: int, headers: RequestHeaders, end_stream: bool) -> None:
        assert stream_id not in self.bodies
        self.bodies[stream_id] = b""
        self.events.append(("started", stream_id, headers, end_stream))

    def request_received(self, stream_id: int, headers: RequestHeaders, body: bytes | memoryview) -> None:
        self.request_started(stream_id, headers, False)
        self.data_received(stream_id, body, True)

    def data_received(self, stream_id: int, data: bytes | memoryview, end_stream: bool) -> None:
        assert data or end_stream
        self.bodies[stream_id] += data
        self.events.append(("data", stream_id, bytes(data), end_stream))

    def stream_closed(self, stream_id: int, error_code: int) -> None:
        self.events.append(("closed", stream_id, error_code))

    def writable(self, stream_id: int) -> None:
        self.events.append(("writable", stream_id))

    def connection_closing(self, error_code: int, reason: str) -> None:
        self.events.append(("closing", error_code, reason))

    def take(self) -> list[tuple[object, ...]]:
        """Return the events since the last time."""
        events, self.events = self.events, []
        return events


def keep_all(kept: dict[bytes, RequestHeaders], block: bytes, headers: RequestHeaders, size: int) -> None:
    """Keep what may come again, however much it is."""
    kept[block] = headers


class Peer:
    """A connection after the prefaces, and both of its ends."""

    def __init__(
        self, limits: Limits | None = None, *entries: tuple[int, int], now: float = 0.0, handler: Recorder | None = None
    ) -> None:
        self.handler = handler or Recorder()
        self.connection = self.handler.connection = Http2Connection(self.handler, limits or Limits(), now, keep_all)
        self.now = now
        self.opening = self.send(PREFACE + settings(*entries))

    def send(self, *frames: bytes) -> list[Frame]:
        """Deliver frames in one piece; return what the connection says to that."""
        self.connection.receive(b"".join(frames), self.now)
        return self.sent()

    def sent(self) -> list[Frame]:
        """Return what the connection has put out since the last time."""
        frames = parse(self.connection.outbound)
        self.connection.outbound.clear()
        return frames

    def goaway(self, frames: list[Frame]) -> tuple[Http2ErrorCode, str]:
        """Check that ``frames`` end with a GOAWAY that closes the connection; return what it says."""
        assert frames and frames[-1].kind == GOAWAY, frames
        assert self.connection.closed and self.connection.finished
        code, reason = Http2ErrorCode(int.from_bytes(frames[-1].payload[4:8])), frames[-1].payload[8:].decode()
        assert self.handler.events[-1] == ("closing", code, reason)
        return code, reason


def reset_frame(stream_id: int, code: Http2ErrorCode) -> Frame:
    return Frame(RST_STREAM, 0, stream_id, code.to_bytes(4))
