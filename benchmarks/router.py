"""What a router adds: latency and processor time of requests through it, in an open loop, against the same direct.

    python benchmarks/router.py [--rate 500] [--seconds 20] [--prompt TOKENS] [--stream TOKENS]

The members are a stand-in for engines: a process with one loop that answers each request after so many milliseconds, at
once or as a stream of events. Client, members and router share the machine; a processor that is busy for others shows
in the figures, so they are upper bounds. Requests are sent at fixed times, whether or not others were answered, and
their latency counts from the time at which they were due.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import uvloop

CONNECTIONS = 64
_TICKS = os.sysconf("SC_CLK_TCK")
_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" token"}}]}\n\n'
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)


class StandInEngine(asyncio.Protocol):
    """A member: answers a request after ``seconds`` with ``tokens`` events, or at once if there are none."""

    def __init__(self, seconds: float, tokens: int) -> None:
        self.seconds = seconds
        self.tokens = tokens
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take requests."""
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            size = int((re.search(rb"content-length: (\d+)", head) or [b"", b"0"])[1])
            if len(self.buffer) < end + 4 + size:
                return
            self.buffer = self.buffer[end + 4 + size :]
            self.answer(head)

    def answer(self, head: bytes) -> None:
        """Answer one request."""
        loop = asyncio.get_running_loop()
        if not head.startswith(b"post /v1/chat"):
            models = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(models), models))
        elif self.tokens:
            self.transport.write(_STREAM_HEAD)
            loop.call_later(self.seconds, self.token, self.tokens)
        else:
            loop.call_later(self.seconds, self.whole)

    def token(self, left: int) -> None:
        """Send one event, and the next one later."""
        if self.transport.is_closing():
            return
        self.transport.write(_CHUNK if left > 1 else _CHUNK + b"0\r\n\r\n")
        if left > 1:
            asyncio.get_running_loop().call_later(self.seconds, self.token, left - 1)

    def whole(self) -> None:
        """Send the whole answer."""
        body = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"' + b"word " * 40 + b'"}}]}'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)


async def serve(seconds: float, tokens: int) -> None:
    """Run a member."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: StandInEngine(seconds, tokens), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Asked(asyncio.Protocol):
    """A connection of the client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.due = 0.0
        self.first = 0.0
        self.size = 0
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, due: float) -> None:
        """Send a request that was due at a time."""
        self.due, self.first, self.size, self.tail = due, 0.0, 0, b""
        self.transport.write(self.client.next_request())

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer."""
        now = time.perf_counter()
        whole = self.tail + data
        if not self.first:
            self.first = now
            if not data.startswith(b"HTTP/1.1 200"):
                self.client.failures += 1
            length = re.search(rb"[Cc]ontent-[Ll]ength: (\d+)", data)
            if length:
                self.size = int(length[1]) + data.find(b"\r\n\r\n") + 4
        if self.size:
            self.size -= len(data)
            done = self.size <= 0
        else:
            done = whole.endswith(b"0\r\n\r\n")
        self.tail = whole[-5:]
        if done:
            self.client.done(self, now)


class Client:
    """Sends requests at a fixed rate, whether or not others were answered."""

    def __init__(self, rate: float, seconds: float, prompt: int) -> None:
        """``prompt`` is in tokens of four bytes."""
        self.rate = rate
        self.text = "word " * (prompt * 4 // 5)
        self.seconds = seconds
        self.idle: list[Asked] = []
        self.waiting: list[float] = []
        self.firsts: list[float] = []
        self.wholes: list[float] = []
        self.failures = 0
        self.asked = 0
        self.total = int(rate * seconds)
        self.answered = asyncio.Event()

    def next_request(self) -> bytes:
        """Return a request with a prompt of its own."""
        self.asked += 1
        prompt = f"{self.asked:08d} {self.text}"
        body = json.dumps({"messages": [{"role": "user", "content": prompt}], "model": "m", "max_tokens": 16}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return head + b"Authorization: Bearer none\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    def done(self, connection: Asked, now: float) -> None:
        """Note an answer, and use the connection again."""
        self.firsts.append(connection.first - connection.due)
        self.wholes.append(now - connection.due)
        if len(self.wholes) == self.total:
            self.answered.set()
        if self.waiting:
            connection.ask(self.waiting.pop(0))
        else:
            self.idle.append(connection)

    async def run(self, port: int) -> None:
        """Ask for so many seconds."""
        loop = asyncio.get_running_loop()
        for _ in range(CONNECTIONS):
            _, connection = await loop.create_connection(lambda: Asked(self), "127.0.0.1", port)
            self.idle.append(connection)
        began = time.perf_counter()
        total = self.total
        for number in range(total):
            due = began + number / self.rate
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            if self.idle:
                self.idle.pop().ask(due)
            else:
                self.waiting.append(due)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                await self.answered.wait()


class Figures(NamedTuple):
    """Of one run, in milliseconds."""

    p50: float
    p99: float
    first_p50: float
    first_p99: float
    failures: int
    answered: int


async def measure(port: int, rate: float, seconds: float, prompt: int) -> Figures:
    """Run a client in this process."""
    warm = Client(rate, 2, prompt)
    await warm.run(port)
    client = Client(rate, seconds, prompt)
    await client.run(port)
    wholes, firsts = statistics.quantiles(client.wholes, n=100), statistics.quantiles(client.firsts, n=100)
    return Figures(
        wholes[49] * 1e3, wholes[98] * 1e3, firsts[49] * 1e3, firsts[98] * 1e3, client.failures, len(client.wholes)
    )


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextlib.contextmanager
def members(count: int, seconds: float, tokens: int) -> Iterator[list[int]]:
    """Run so many members; yield their ports."""
    command = [sys.executable, __file__, "--member", str(seconds), str(tokens)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [int(process.stdout.readline()) for process in processes if process.stdout is not None]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def router(ports: list[int], settings: str = "", kind: str = "openai") -> Iterator[tuple[int, int]]:
    """Run a router, with more settings; yield its port and its process id."""
    addresses = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(
            f"[router]\nhttp-port = 0\ngrpc-port = 0\n{settings or 'metrics-port = 0'}\n"
            f'[[pool]]\nname = "main"\nkind = "{kind}"\nmembers = [{addresses}]\n'
        )
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            command = [str(Path(sys.executable).with_name("nerite")), "route", str(file)]
            process = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            deadline = time.monotonic() + 30
            while (found := re.search(r"HTTPService at [\d.]+:(\d+)", log.read_text())) is None:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(log.read_text())
                time.sleep(0.02)
            yield int(found[1]), process.pid
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=500)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=200, metavar="TOKENS")
    parser.add_argument("--stream", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--pace", type=float, default=0.02, help="seconds of an answer, or between two tokens")
    parser.add_argument("--ledger", action="store_true", help="measure a router with a ledger, too")
    parser.add_argument("--member", nargs=2, metavar=("SECONDS", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        uvloop.run(serve(float(options.member[0]), int(options.member[1])))
        return
    shape = f"{options.rate:g} requests/s of {options.prompt} tokens"
    print(f"{shape}, {'answered at once' if not options.stream else f'{options.stream} tokens streamed'}")
    print("| | p50 ms | p99 ms | first p50 ms | first p99 ms | failed | router: us of processor a request |")
    print("|---|---|---|---|---|---|---|")
    with members(2, options.pace, options.stream) as ports, contextlib.ExitStack() as stack:
        port, pid = stack.enter_context(router(ports))
        contestants = [("direct", ports[0], pid), ("router", port, pid)]
        if options.ledger:
            contestants.append(
                ("router with a ledger", *stack.enter_context(router(ports, 'metrics-port = 0\nledger = "ledger.db"')))
            )
        for _ in range(options.rounds):
            for name, target, pid in contestants:
                before = processor_seconds(pid)
                found = uvloop.run(measure(target, options.rate, options.seconds, options.prompt))
                spent = (processor_seconds(pid) - before) / (options.rate * (options.seconds + 2)) * 1e6
                cells = [f"{value:.2f}" for value in found[:4]] + [str(found.failures)]
                print(f"| {name} | {' | '.join(cells)} | {'' if name == 'direct' else f'{spent:.0f}'} |", flush=True)


if __name__ == "__main__":
    main()
