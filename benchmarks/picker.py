"""What an endpoint picker costs: processor time and latency of each choice, in an open loop.

    python benchmarks/picker.py [--rate 500] [--seconds 10] [--bytes 800]

A picker as a process of its own, before endpoints that only answer health checks. The load is what a gateway sends for
a chat completion: headers, and a body of so many bytes (200 tokens are about 800), which is kept and passed on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from nerite.http2 import Buffer, ReplyHeaders, encode_request
from nerite.router.grpc_channel import GrpcChannel
from nerite.wire import ext_proc as wire

PATH = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
BLOCK = encode_request([
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", PATH), (b":authority", b"picker"),
    (b"content-type", b"application/grpc"), (b"te", b"trailers"),
])  # fmt: skip


def framed(message: wire.ProcessingRequest) -> bytes:
    """Return a message with its length."""
    raw = message.SerializeToString()
    return b"\0" + len(raw).to_bytes(4) + raw


def request(size: int, number: int) -> bytes:
    """Return what a gateway sends for one request."""
    content = f"{number} " + "a prompt " * (size // 9)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], "stream": True}).encode()
    fields = {":path": "/v1/chat/completions", ":method": "POST", "content-type": "application/json", "host": "gateway"}
    values = [wire.HeaderValue(key=key, raw_value=value.encode()) for key, value in fields.items()]
    headers = wire.HttpHeaders(headers=wire.HeaderMap(headers=values))
    parts = [wire.ProcessingRequest(request_headers=headers)]
    parts += [
        wire.ProcessingRequest(
            request_body=wire.HttpBody(body=body[at : at + 60_000], end_of_stream=at + 60_000 >= len(body))
        )
        for at in range(0, len(body), 60_000)
    ]
    return b"".join(map(framed, parts))


class Choice:
    """One call; its latency counts until the first answer."""

    def __init__(self, began: float, latencies: list[float], failures: list[str]) -> None:
        self._began = began
        self._latencies = latencies
        self._failures = failures
        self._answered = False

    def response_started(self, headers: ReplyHeaders, end: bool) -> None:
        """Take a refusal."""
        if end:
            self._failures.append(str(headers.get(b"grpc-message")))

    def response_data(self, data: Buffer, end: bool) -> None:
        """Take an answer."""
        if not self._answered:
            self._answered = True
            self._latencies.append(time.perf_counter() - self._began)

    def trailers_received(self, trailers: ReplyHeaders) -> None:
        """Take the end."""
        if not self._answered:
            self._failures.append(str(trailers.get(b"grpc-message")))

    def call_lost(self, why: str, unprocessed: bool) -> None:
        """Take a failure."""
        self._failures.append(why)

    def member_writable(self) -> None:
        """Do nothing: requests are sent at once."""


async def healthy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer health checks."""
    while line := await reader.readline():
        length = 0
        while (field := await reader.readline()) not in (b"\r\n", b""):
            if field.lower().startswith(b"content-length:"):
                length = int(field.split(b":")[1])
        await reader.readexactly(length)
        body = b'{"object":"list","data":[{"id":"m"}]}' if b"/v1/models" in line else b""
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    writer.close()


def processor_seconds(pid: int) -> float:
    """Return what a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def drive(port: int, pid: int, options: argparse.Namespace) -> None:
    """Send the load, and print what it cost."""
    channel = GrpcChannel(f"127.0.0.1:{port}", 5.0)
    requests = [request(options.bytes, number) for number in range(64)]
    for rate, seconds in ((options.rate, 1.0), (options.rate, options.seconds)):
        latencies: list[float] = []
        failures: list[str] = []
        before = processor_seconds(pid)
        began = time.perf_counter()
        count = int(rate * seconds)
        for number in range(count):
            due = began + number / rate
            if (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            call = channel.start(BLOCK, Choice(time.perf_counter(), latencies, failures))
            call.send((requests[number % 64],), True)
        for _ in range(1000):
            if len(latencies) + len(failures) >= count:
                break
            await asyncio.sleep(0.01)
        used = processor_seconds(pid) - before
    latencies.sort()
    p50, p99 = (latencies[int(len(latencies) * share)] * 1e3 for share in (0.5, 0.99))
    print(f"{rate} requests/s of {options.bytes} bytes: {len(failures)} failures {failures[:1] or ''}")
    print(f"processor time {used / count * 1e6:.0f} us a request, {used / seconds:.3f} cores")
    print(f"latency p50 {p50:.2f} ms, p99 {p99:.2f} ms")
    channel.abort("done")


async def main() -> None:
    """Run a picker, and its load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--bytes", type=int, default=800)
    parser.add_argument("--members", type=int, default=3)
    options = parser.parse_args()
    servers = [await asyncio.start_server(healthy, "127.0.0.1", 0) for _ in range(options.members)]
    members = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(f'[[pool]]\nname = "main"\nkind = "vllm"\nmembers = {json.dumps(members)}\n')
        log = Path(folder) / "log"
        command = ["-m", "nerite.cli.main", "pick", str(file), "--port", "0", "--metrics-port", "0"]
        with log.open("wb") as sink:
            picker = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=sink, stderr=sink)
        try:
            found = None
            for _ in range(200):
                if found := re.search(r"ext_proc [\d.]+:(\d+)", log.read_text()):
                    break
                await asyncio.sleep(0.05)
            if found is None:
                raise SystemExit(log.read_text())
            await drive(int(found[1]), picker.pid, options)
        finally:
            picker.terminate()
            await picker.wait()


if __name__ == "__main__":
    asyncio.run(main())
