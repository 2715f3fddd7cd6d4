"""Load on a Service: requests that are sent when they are due, on connections that are kept, and streams of tokens."""

from __future__ import annotations

import asyncio
import json
import statistics
import struct
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

import grpc

from nerite.wire.grpc_service import ModelInferRequest, ModelStreamInferResponse
from serving import PATIENCE, strings

RATE = 200
"""Requests a second."""
STREAMS = 20
"""Half of them over gRPC, each client on a channel of its own that it keeps."""
LENGTH = 60
"""Tokens of a stream."""


class Figures(NamedTuple):
    """What became of the requests and streams of a phase."""

    phase: str
    seconds: float
    requests: int
    streams: int
    failed: int
    cut: int
    median: float
    """Milliseconds."""
    high: float
    """The 99th percentile, in milliseconds."""

    def row(self) -> str:
        """Return a row of a table."""
        numbers = f"{self.requests:,} | {self.failed} | {self.streams} | {self.cut}"
        return f"| {self.phase} | {self.seconds:.0f} s | {numbers} | {self.median:.1f} ms | {self.high:.0f} ms |"


HEADER = "| phase | time | requests | failed | streams | cut | median | p99 |\n|---|---|---|---|---|---|---|---|"


class _Connection:
    """A connection that is kept, as long as the server keeps it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.closes = False
        self._served = 0
        self._free_since = time.monotonic()

    @property
    def usable(self) -> bool:
        """Not closed by the server, as far as is known here."""
        return not (self.closes or self._reader.at_eof() or self._writer.is_closing())

    async def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request; return the status and the whole body of the answer, chunks joined."""
        asked = time.monotonic()
        try:
            return await self._ask(path, body)
        except (OSError, EOFError) as error:
            after, kept = time.monotonic() - asked, asked - self._free_since
            raise ConnectionError(
                f"{error!r:.90} after {after:.3f} s; {self._served} answers before, the last {kept:.3f} s earlier"
            ) from error
        finally:
            self._served += 1
            self._free_since = time.monotonic()

    async def _ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        head = f"POST {path} HTTP/1.1\r\nhost: exam\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if line)
        self.closes = fields.get("connection") == "close"
        if "content-length" in fields:
            return int(lines[0].split()[1]), await self._reader.readexactly(int(fields["content-length"]))
        whole = bytearray()
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            whole += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return int(lines[0].split()[1]), bytes(whole)

    def close(self) -> None:
        """Close it."""
        self._writer.transport.abort()


class ServiceLoad(threading.Thread):
    """Sends ``RATE`` requests a second and holds ``STREAMS`` streams. When it is stopped, it waits for their ends."""

    def __init__(self, address: str, port: int = 8000) -> None:
        super().__init__()
        self.problems: Counter[str] = Counter()
        """What went wrong, over all phases."""
        self._at = address, port
        self._over = threading.Event()
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        self._sent = self._failed = self._whole = self._cut = 0
        self._times: list[float] = []
        self._began = time.monotonic()
        self.start()

    def figures(self, phase: str) -> Figures:
        """Return the figures since the last time that they were asked for."""
        with self._lock:
            now, times = time.monotonic(), self._times or [0.0]
            parts = statistics.quantiles(times, n=100) if len(times) > 1 else times * 99
            found = Figures(
                phase, now - self._began, self._sent, self._whole, self._failed, self._cut,
                1000 * statistics.median(times), 1000 * parts[98],
            )  # fmt: skip
            self._began, self._times = now, []
            self._sent = self._failed = self._whole = self._cut = 0
        print(found.row(), flush=True)
        return found

    def stop(self) -> None:
        """Begin nothing more: what is under way goes on."""
        self._over.set()

    def run(self) -> None:
        asyncio.run(self._all())

    async def _all(self) -> None:
        streams = [
            asyncio.create_task(self._streams() if number % 2 else self._grpc_streams()) for number in range(STREAMS)
        ]
        loop = asyncio.get_running_loop()
        began, sent, tasks = loop.time(), 0, set()
        while not self._over.is_set():
            await asyncio.sleep(began + sent / RATE - loop.time())
            task = asyncio.create_task(self._request(sent))
            sent += 1
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*streams, *tasks)
        for each in self._idle:
            each.close()

    async def _connect(self) -> _Connection:
        while self._idle:
            if (kept := self._idle.pop()).usable:
                return kept
            kept.close()
        return _Connection(*await asyncio.open_connection(*self._at))

    async def _asked(self, path: str, given: dict[str, Any]) -> tuple[int, bytes]:
        async with asyncio.timeout(PATIENCE):
            connection = await self._connect()
            try:
                answer = await connection.ask(path, json.dumps(given).encode())
            except BaseException:
                connection.close()
                raise
            if connection.usable:
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    async def _request(self, number: int) -> None:
        began, problem = time.monotonic(), ""
        tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [number % 1000]}
        try:
            status, body = await self._asked("/v2/models/add/infer", {"inputs": [tensor]})
            if status != 200:
                problem = f"request: {status} {body[:200]!r}"
            elif json.loads(body)["outputs"][0]["data"] != [number % 1000 + 1]:
                problem = f"request: another answer {body[:200]!r}"
        except Exception as error:
            problem = f"request: {error!r:.200}"
        with self._lock:
            self._sent += 1
            self._failed += bool(problem)
            self._times.append(time.monotonic() - began)
            if problem:
                self.problems[problem] += 1

    async def _streams(self) -> None:
        asked = {"prompt": "a", "length": LENGTH}
        while not self._over.is_set():
            problem = ""
            try:
                status, body = await self._asked("/v2/models/babble/generate_stream", asked)
                tokens = body.count(b"data: {")
                if (status, tokens) != (200, LENGTH):
                    problem = f"stream: {status} with {tokens} tokens {body[-200:]!r}"
            except Exception as error:
                problem = f"stream: {error!r:.200}"
            self._end_stream(problem)

    async def _grpc_streams(self) -> None:
        request = ModelInferRequest(model_name="babble")
        request.inputs.add(name="prompt", datatype="BYTES", shape=[1, 1])
        request.inputs.add(name="length", datatype="INT32", shape=[1, 1])
        request.raw_input_contents.extend([strings(b"a"), struct.pack("<i", LENGTH)])
        async with grpc.aio.insecure_channel(f"{self._at[0]}:8001") as channel:
            ask = channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=ModelInferRequest.SerializeToString,
                response_deserializer=ModelStreamInferResponse.FromString,
            )
            while not self._over.is_set():
                problem, tokens = "", 0
                try:
                    async for answer in ask(iter([request]), timeout=PATIENCE):
                        problem = problem or answer.error_message
                        tokens += len(answer.infer_response.raw_output_contents)
                    if tokens != LENGTH:
                        problem = f"gRPC stream: {tokens} tokens {problem}"
                except grpc.RpcError as error:
                    problem = f"gRPC stream: {error.code()} after {tokens} tokens: {error.details()}"
                self._end_stream(problem)

    def _end_stream(self, problem: str) -> None:
        with self._lock:
            self._whole += not problem
            self._cut += bool(problem)
            if problem:
                self.problems[problem] += 1
