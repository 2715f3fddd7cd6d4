"""What the HTTP/2 state machine costs: requests a second through memory, without sockets or a handler's work.

Run it as ``python benchmarks/http2.py``. Each figure is the best of several rounds, because other programs on the
machine can only make a round slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import hpack

from nerite.http2 import Buffer, Http2Connection, Limits, RequestHeaders, encode_headers, frames
from nerite.http2.headers import H, HeaderMemo

ROUNDS = 7
HEAD = encode_headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
TRAILERS = encode_headers([(b"grpc-status", b"0")])
REQUEST = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b":authority", b"localhost:8001"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
    (b"user-agent", b"grpc-python/1.60.0 grpc-c/37.0.0 (linux; chttp2)"),
]
SMALL = bytes(160)
LARGE = bytes(602_112)


class Replier:
    """Answers each request at its end with ``reply``, and does nothing else."""

    def __init__(self, reply: Buffer) -> None:
        self.connection: Http2Connection
        self.reply = (reply,)
        self.replies = 0

    def request_started(self, stream_id: int, headers: RequestHeaders, end_stream: bool) -> None:
        """Return the frames of one more request."""
        """Wait for the body."""

    def request_received(self, stream_id: int, headers: RequestHeaders, body: bytes | memoryview) -> None:
        """Reply."""
        self.data_received(stream_id, body, True)

    def data_received(self, stream_id: int, data: bytes | memoryview, end_stream: bool) -> None:
        """Reply at the end of the body."""
        if end_stream:
            self.replies += 1
            self.connection.reply(stream_id, HEAD, self.reply, TRAILERS)

    def stream_closed(self, stream_id: int, error_code: int) -> None:
        """Refuse to measure anything but replies."""
        raise AssertionError(f"stream {stream_id} was closed: {error_code}")

    def writable(self, stream_id: int) -> None:
        """Have nothing more to send."""

    def connection_closing(self, error_code: int, reason: str) -> None:
        """Refuse to measure anything but replies."""
        raise AssertionError(f"the connection was closed: {error_code} {reason}")


class Client:
    """Makes the bytes that a client with a dynamic table would send."""

    def __init__(self, max_frame_size: int = frames.MIN_MAX_FRAME_SIZE) -> None:
        self.stream_id = 1
        self.encoder = hpack.Encoder()
        self.max_frame_size = max_frame_size

    def opening(self) -> bytes:
        """Return the preface and windows that never close."""
        window = frames.MAX_WINDOW - frames.DEFAULT_WINDOW
        return (
            frames.PREFACE
            + frames.settings([(4, frames.MAX_WINDOW), (5, self.max_frame_size)])
            + frames.window_update(0, window)
        )

    def request(self, body: bytes, *more: tuple[bytes, bytes]) -> bytes:
        """Return the frames of one more request."""
        block = self.encoder.encode(REQUEST + list(more))
        parts = [frames.header_block(self.stream_id, block, 0, self.max_frame_size)]
        for start in range(0, len(body), self.max_frame_size):
            piece = body[start : start + self.max_frame_size]
            last = frames.END_STREAM if start + len(piece) == len(body) else 0
            parts.append(frames.pack_header(len(piece) << 8 | frames.DATA, last, self.stream_id) + piece)
        self.stream_id += 2
        return b"".join(parts)


def _keep(memo: HeaderMemo[H], block: bytes, headers: H, size: int) -> None:
    memo[block] = headers


def seconds_per_request(
    make: Callable[[Client, int], list[bytes]], reply: Buffer, client_frame: int, count: int
) -> float:
    """Feed ``make``'s chunks, which hold ``count`` requests, to a new connection; return what one took at best."""
    best = float("inf")
    for _ in range(ROUNDS):
        client = Client(client_frame)
        handler = Replier(reply)
        connection = handler.connection = Http2Connection(handler, Limits(), 0.0, _keep)
        connection.receive(client.opening() + client.request(SMALL), 0.0)
        outbound = connection.outbound
        outbound.clear()
        chunks = make(client, count)
        receive = connection.receive
        start = time.perf_counter()
        now = 0.0
        for chunk in chunks:
            now += 0.001
            receive(chunk, now)
            # The owner's writelines.
            outbound.clear()
            if connection._send_window < 1 << 29:
                receive(frames.window_update(0, 1 << 30), now)
        best = min(best, time.perf_counter() - start)
        assert handler.replies == count + 1, handler.replies
    return best / count


def batched(size: int) -> Callable[[Client, int], list[bytes]]:
    """Return a maker of chunks with ``size`` small requests each."""

    def make(client: Client, count: int) -> list[bytes]:
        return [b"".join(client.request(SMALL) for _ in range(size)) for _ in range(count // size)]

    return make


def with_deadlines(client: Client, count: int) -> list[bytes]:
    """Return small requests each of which inserts a header into the dynamic table, so that no block is seen twice."""
    return [client.request(SMALL, (b"grpc-timeout", b"%du" % (4_999_999 - number))) for number in range(count)]


def read_in(size: int) -> Callable[[Client, int], list[bytes]]:
    """Return a maker of large requests, cut as reads of ``size`` bytes would cut them."""

    def make(client: Client, count: int) -> list[bytes]:
        stream = b"".join(client.request(LARGE) for _ in range(count))
        return [stream[start : start + size] for start in range(0, len(stream), size)]

    return make


def main() -> None:
    """Print the table."""
    for name, maker in (
        ("16 a read", batched(16)),
        ("1 a read", batched(1)),
        ("1 a read, a new deadline each", with_deadlines),
    ):
        cost = seconds_per_request(maker, SMALL, frames.MIN_MAX_FRAME_SIZE, 16_000)
        print(f"160 B in and out, {name:32} {1 / cost:10,.0f} requests/s {cost * 1e6:8.2f} us each")
    for frame_size in (frames.MIN_MAX_FRAME_SIZE, Limits().max_frame_size):
        for read_size in (65_536, 262_144):
            cost = seconds_per_request(read_in(read_size), LARGE, frame_size, 64)
            name = f"{frame_size // 1024} KiB frames, reads of {read_size // 1024} KiB"
            print(f"602 KB in and out, {name:32} {1 / cost:9,.0f} requests/s {cost * 1e6:8.2f} us each")


if __name__ == "__main__":
    main()
