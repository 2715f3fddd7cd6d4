"""A client that sends at a steady pace, whatever comes back: what a server gets that serves many.

Public generators wait for an answer before they ask again, or do not tell the answers of gRPC apart. This one is small
because it has one request to send, whose answer fits into a frame: it looks at where answers begin and end, no more.

    python benchmarks/open_loop.py http|grpc PORT BODY HEAD_SIZE RATE SECONDS
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import hpack
import uvloop

USEFUL = 1.0
"""Seconds after which nobody waits for an answer any more."""
_GRACE = 2.0
"""Seconds after the last request, in which answers still count."""
_MAX_CONNECTIONS = 14_000
"""HTTP/1.1 has one request on a connection. More wait for one to become free."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_CHANNELS = 16


class Tally:
    """What was sent, and how it was answered."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.sent = 0
        self.refused = 0
        self.answered: list[tuple[float, float]] = []
        """When each request that succeeded was sent, in seconds from the beginning, and how long it took."""

    def note(self, sent_at: float, ok: bool) -> None:
        """Note an answer."""
        if ok:
            self.answered.append((sent_at - self.began, time.perf_counter() - sent_at))
        else:
            self.refused += 1


class HttpChannel(asyncio.Protocol):
    """A connection of HTTP/1.1, with one request at a time."""

    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self._received = b""
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be ready for the first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._pool.free(self)

    def ask(self, due: float) -> None:
        """Send the request, which was due at a time."""
        self._sent_at = due
        self._transport.write(self._pool.message)

    def data_received(self, data: bytes) -> None:
        """Wait until the answer is complete."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) >= size:
            ok = head.startswith(b"HTTP/1.1 200")
            self._received = b""
            self._pool.tally.note(self._sent_at, ok)
            self._pool.free(self)


class HttpPool:
    """As many connections as there are requests under way."""

    def __init__(self, tally: Tally, port: int, message: bytes) -> None:
        self.tally = tally
        self.message = message
        self._port = port
        self._idle: list[HttpChannel] = []
        self._due: deque[float] = deque()
        self._open = 0
        self._opening: set[asyncio.Task[object]] = set()

    def ask(self) -> None:
        """Send a request as soon as there is a connection for it."""
        now = time.perf_counter()
        if self._idle:
            self._idle.pop().ask(now)
            return
        self._due.append(now)
        if self._open < _MAX_CONNECTIONS:
            self._open += 1
            loop = asyncio.get_running_loop()
            task = loop.create_task(loop.create_connection(lambda: HttpChannel(self), "127.0.0.1", self._port))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def free(self, channel: HttpChannel) -> None:
        """Give a connection its next request."""
        if self._due:
            channel.ask(self._due.popleft())
        else:
            self._idle.append(channel)


class GrpcChannel(asyncio.Protocol):
    """A connection of HTTP/2, with any number of requests under way."""

    def __init__(self, tally: Tally, message: bytes) -> None:
        self._tally = tally
        self._message = message
        self._block = _block()
        self._received = bytearray()
        self._next = 1
        self._sent: dict[int, float] = {}
        self._answers: set[int] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Shake hands, and let the server send as much as it will."""
        self._transport = cast(asyncio.Transport, transport)
        window = (2**31 - 2**16).to_bytes(4)
        self._transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_WINDOW, 0, 0, window))

    def ask(self) -> None:
        """Send the request on a stream of its own."""
        stream, self._next = self._next, self._next + 2
        self._sent[stream] = time.perf_counter()
        self._transport.write(_frame(_HEADERS, 4, stream, self._block) + _frame(_DATA, 1, stream, self._message))

    def data_received(self, data: bytes) -> None:
        """Look at each frame that is complete."""
        received = self._received
        received += data
        at = 0
        while len(received) - at >= 9:
            size = int.from_bytes(received[at : at + 3])
            if len(received) - at < 9 + size:
                break
            kind, flags, stream = received[at + 3], received[at + 4], int.from_bytes(received[at + 5 : at + 9])
            self._frame_received(kind, flags, stream, received[at + 9 : at + 9 + size])
            at += 9 + size
        del received[:at]

    def _frame_received(self, kind: int, flags: int, stream: int, payload: bytearray) -> None:
        if kind == _DATA and payload:
            self._answers.add(stream)
        elif kind == _SETTINGS and not flags & 1:
            self._transport.write(_frame(_SETTINGS, 1, 0, b""))
        elif kind == _PING and not flags & 1:
            self._transport.write(_frame(_PING, 1, 0, bytes(payload)))
        if (kind in (_DATA, _HEADERS) and flags & 1) or kind == _RESET:
            sent_at = self._sent.pop(stream, None)
            if sent_at is not None:
                self._tally.note(sent_at, stream in self._answers)
            self._answers.discard(stream)


def _block() -> bytes:
    """Return the headers of a call, in a form that does not depend on what was sent before."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer")]
    fields += [(":authority", "localhost"), ("content-type", "application/grpc"), ("te", "trailers")]
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*field) for field in fields])


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


async def run(protocol: str, port: int, body: bytes, head_size: str, rate: float, seconds: float) -> Tally:
    """Send at a pace for a time; return what came of it."""
    loop = asyncio.get_running_loop()
    tally = Tally()
    if protocol == "http":
        head = f"POST /v2/models/steady/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        head += f"Inference-Header-Content-Length: {head_size}\r\n\r\n"
        asks = [HttpPool(tally, port, head.encode() + body).ask]
    else:
        channels = [
            await loop.create_connection(lambda: GrpcChannel(tally, body), "127.0.0.1", port) for _ in range(_CHANNELS)
        ]
        await asyncio.sleep(0.2)
        asks = [channel.ask for _, channel in channels]
    tally.began = time.perf_counter()
    while (passed := time.perf_counter() - tally.began) < seconds:
        for _ in range(int(passed * rate) - tally.sent):
            asks[tally.sent % len(asks)]()
            tally.sent += 1
        await asyncio.sleep(0.001)
    await asyncio.sleep(_GRACE)
    return tally


def main() -> None:
    """Send, and print what came of it as JSON."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    protocol, port, body, head_size, rate, seconds = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        tally = runner.run(run(protocol, int(port), Path(body).read_bytes(), head_size, float(rate), float(seconds)))
    took = [each for _, each in tally.answered]
    late = [each for sent_at, each in tally.answered if sent_at > float(seconds) / 2]
    told = {"sent": tally.sent, "refused": tally.refused, "answered": len(took)}
    told |= {"useful": sum(each < USEFUL for each in took), "took": _times(took), "took_late": _times(late)}
    print(json.dumps(told))


def _times(took: Sequence[float]) -> str:
    """Return the median and the 99th percentile."""
    if len(took) < 2:
        return "nothing came"
    return f"{statistics.median(took):.2f} s, {statistics.quantiles(took, n=100)[98]:.2f} s"


if __name__ == "__main__":
    main()
