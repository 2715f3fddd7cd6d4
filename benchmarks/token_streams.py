"""Streams of tokens through gRPC ModelStreamInfer, or as chats of OpenAI's API: a client with one process and one loop.

So many streams each have a request under way all the time. Prints "warm" and then, as JSON, the parts of answers that
came (a token each), in how many seconds, the percentiles of the time from one part to the next, in milliseconds, and
the processor time of the client for one.

    python benchmarks/token_streams.py grpc|chat PORT STREAMS SECONDS
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import time
from typing import cast

import uvloop
from contestants import ROOT

sys.path.insert(0, str(ROOT / "src"))

from nerite.client.connection import Address
from nerite.tools.bench.grpc_generator import GrpcClientCall, GrpcLine, header_block
from nerite.wire.grpc_service import ModelInferRequest

MODEL = "tokens"
TOKENS = 256
"""Of an answer."""
_CONNECTIONS = 16
"""Of gRPC, at the most."""
_WARM_UP = 1.0
_EVERY = 16
"""One of so many times between two parts is kept."""
_EVENT = b"data: {"
_END = b"0\r\n\r\n"


class Parts:
    """Counts the parts of all answers."""

    def __init__(self) -> None:
        self.count = 0
        self.gaps: list[float] = []

    def came(self, count: int, last: float) -> float:
        """Count parts of one stream, whose previous ones came at ``last``; return the time."""
        now = time.perf_counter()
        self.count += count
        if last and count and self.count % _EVERY < count:
            self.gaps.append(now - last)
        return now


class GrpcStream(GrpcClientCall):
    """A call with one request. When it is answered, the next one begins."""

    def __init__(self, line: GrpcLine, parts: Parts, message: bytes) -> None:
        super().__init__(reads=True)
        self._line = line
        self._parts = parts
        self._message = message
        self._last = 0.0
        self._held = b""
        line.open(self, message, last=True)

    def received(self, data: bytes) -> None:
        """Count messages."""
        held = self._held + data if self._held else data
        at, count = 0, 0
        while len(held) - at >= 5:
            end = at + 5 + int.from_bytes(held[at + 1 : at + 5])
            if end > len(held):
                break
            at, count = end, count + 1
        self._held = held[at:]
        if count:
            self._last = self._parts.came(count, self._last)

    def ended(self, reason: str) -> None:
        """Ask again."""
        if reason:
            sys.exit(reason)
        self._last = 0.0
        self._line.open(self, self._message, last=True)


class ChatStream(asyncio.Protocol):
    """A connection with one request. When it is answered, the next one begins."""

    def __init__(self, parts: Parts, message: bytes) -> None:
        self._parts = parts
        self._message = message
        self._last = 0.0
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        """Count events."""
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            sys.exit(data[:500].decode(errors="replace"))
        held = self._held + data
        count = held.count(_EVENT)
        # The end of a piece may hold the beginning of what is looked for, but nothing that was counted.
        self._held = held[max(held.rfind(_EVENT) + 1, len(held) - len(_EVENT) + 1) :]
        if count:
            self._last = self._parts.came(count, self._last)
        if held.endswith(_END):
            self._held, self._last = b"", 0.0
            self._transport.write(self._message)


def grpc_message(tokens: int = TOKENS) -> bytes:
    """Return a request, with the prefix of gRPC."""
    inputs = {
        "text_input": ("BYTES", _string(b"a prompt of some words")),
        "sampling_parameters": ("BYTES", _string(json.dumps({"max_tokens": tokens}).encode())),
        "stream": ("BOOL", b"\1"),
        "exclude_input_in_output": ("BOOL", b"\1"),
    }
    message = ModelInferRequest(
        model_name=MODEL,
        inputs=[{"name": name, "datatype": datatype, "shape": [1]} for name, (datatype, _) in inputs.items()],
        raw_input_contents=[data for _, data in inputs.values()],
    ).SerializeToString()
    return b"\0" + len(message).to_bytes(4) + message


def _string(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text


def chat_message(tokens: int = TOKENS) -> bytes:
    """Return a request as it is sent."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a prompt of some words"}]}
    body = json.dumps(chat | {"max_tokens": tokens, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def run(protocol: str, port: int, streams: int, seconds: float) -> dict[str, float]:
    """Have so many streams under way for a time; return what came."""
    parts = Parts()
    lines: list[GrpcLine] = []
    if protocol == "grpc":
        address = Address.parse(f"127.0.0.1:{port}")
        block = header_block(address, "ModelStreamInfer", {})
        lines += [GrpcLine(address, None, block) for _ in range(min(streams, _CONNECTIONS))]
        message = grpc_message()
        for number in range(streams):
            GrpcStream(lines[number % len(lines)], parts, message)
    else:
        loop = asyncio.get_running_loop()
        message = chat_message()
        for _ in range(streams):
            await loop.create_connection(lambda: ChatStream(parts, message), "127.0.0.1", port)
    await asyncio.sleep(_WARM_UP)
    print("warm", flush=True)
    count, began, spent = parts.count, time.perf_counter(), time.process_time()
    parts.gaps.clear()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    found = parts.count - count
    if len(parts.gaps) < 2:
        sys.exit("no tokens came")
    percentiles = statistics.quantiles(parts.gaps, n=100)
    for line in lines:
        line.close()
    return {
        "parts": found,
        "seconds": took,
        "p50": percentiles[49] * 1000,
        "p99": percentiles[98] * 1000,
        "client": (time.process_time() - spent) / found,
    }


def main() -> None:
    """Read the streams, and print what came."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    protocol, port, streams, seconds = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(run(protocol, int(port), int(streams), float(seconds)))))


if __name__ == "__main__":
    main()
