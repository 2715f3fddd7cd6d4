"""Two pools before a router: what batch work on lent members costs interactive requests, and what it gains.

    python benchmarks/pools.py [--rate 4] [--seconds 30] [--rounds 3] [--streams 16] [--model SIZE] [--print]

Interactive requests come in an open loop and are streamed; batch requests are always ``--streams`` under way. Each pool
has two members of its own. A member is a stand-in for an engine: it steps through up to eight sequences at once, and a
step takes the longer, the more there are. With ``--model``, members are Nerite with a language model instead, whose
processors they share, so that all work disturbs all other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

import uvloop
from contestants import nerite
from page import command_line, machine, publish

PROMPT: Final = 200
ANSWER: Final = 64
BATCH_ANSWER: Final = 128
"""Tokens."""
_SLOTS: Final = 8
_STEP: Final = 0.008
_EACH: Final = 0.002
"""Seconds of a step, and for each sequence in it."""
_PREFILL: Final = 0.0001
"""Seconds for a token of a prompt."""
_STREAM: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT: Final = b'data: {"choices":[{"index":0,"text":" token"}]}\n\n'
_CHUNK: Final = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
CASES: Final[Mapping[str, str]] = {
    "alone": "",
    "batch on its own members": "lends = 0",
    "lent to batch": "lends = 4",
    "lent, one member in reserve": "lends = 4\nreserve = 1",
    "lent, and interactive preempts": "lends = 4\npreempts = true",
    "lent, preempts, one in reserve": "lends = 4\npreempts = true\nreserve = 1",
}
"""Keys of the interactive pool by what they are for."""


class SteppedEngine:
    """Steps through the sequences of all connections; others wait for a slot."""

    def __init__(self) -> None:
        self.running: list[Sequenced] = []
        self.waiting: deque[Sequenced] = deque()
        self.wanted = asyncio.Event()

    def add(self, sequence: Sequenced) -> None:
        """Take a sequence."""
        self.waiting.append(sequence)
        self.wanted.set()

    async def run(self) -> None:
        """Step for ever."""
        while True:
            self.running = [each for each in self.running if each.left and not each.transport.is_closing()]
            prefill = 0.0
            while self.waiting and len(self.running) < _SLOTS:
                sequence = self.waiting.popleft()
                if not sequence.transport.is_closing():
                    self.running.append(sequence)
                    prefill += sequence.prompt * _PREFILL
            if not self.running:
                self.wanted.clear()
                await self.wanted.wait()
                continue
            await asyncio.sleep(_STEP + _EACH * len(self.running) + prefill)
            for each in self.running:
                each.token()


class Sequenced:
    """A request at a stand-in."""

    def __init__(self, transport: asyncio.Transport, body: bytes) -> None:
        asked = json.loads(body)
        self.transport = transport
        self.streams = bool(asked.get("stream"))
        self.prompt = len(asked["prompt"]) // 4
        self.left = self.tokens = int(asked["max_tokens"])

    def token(self) -> None:
        """Generate a token."""
        if self.transport.is_closing():
            return
        self.left -= 1
        if self.streams:
            head = _STREAM if self.left == self.tokens - 1 else b""
            self.transport.write(head + _CHUNK + (b"" if self.left else b"0\r\n\r\n"))
        elif not self.left:
            usage = {"prompt_tokens": self.prompt, "completion_tokens": self.tokens}
            self.transport.write(whole(json.dumps({"choices": [{"text": "word " * self.tokens}], "usage": usage})))


class MemberSocket(asyncio.Protocol):
    """A connection to a stand-in."""

    def __init__(self, engine: SteppedEngine) -> None:
        self.engine = engine
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
            body = self.buffer[end + 4 : end + 4 + size]
            self.buffer = self.buffer[end + 4 + size :]
            if head.startswith(b"post"):
                self.engine.add(Sequenced(self.transport, body))
            else:
                self.transport.write(whole('{"object":"list","data":[{"id":"m","object":"model"}]}'))


def whole(body: str) -> bytes:
    """Return a response of JSON."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body),
        body.encode(),
    )


async def serve() -> None:
    """Run a stand-in."""
    loop = asyncio.get_running_loop()
    engine = SteppedEngine()
    server = await loop.create_server(lambda: MemberSocket(engine), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await engine.run()


@contextlib.contextmanager
def stand_ins(count: int) -> Iterator[list[int]]:
    """Run so many members; yield their ports."""
    command = [sys.executable, __file__, "--member"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        yield [int(process.stdout.readline()) for process in processes if process.stdout is not None]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def language_models(size: str, count: int, folder: Path) -> Iterator[list[int]]:
    """Run so many servers with a language model; yield their ports."""
    import llm_checkpoint

    checkpoint = folder / "models" / size / "1"
    checkpoint.mkdir(parents=True)
    llm_checkpoint.write(size, checkpoint)
    (checkpoint.parent / "config.pbtxt").write_text(
        'backend: "llm"\nparameters { key: "INFERENCE_NUM_THREADS" value { string_value: "1" } }\n'
    )
    with contextlib.ExitStack() as running:
        servers = [
            running.enter_context(nerite(f"member {place}", folder / "models", folder)) for place in range(count)
        ]
        yield [server.http for server in servers]


@contextlib.contextmanager
def router(ports: Sequence[int], kind: str, keys: str, folder: Path) -> Iterator[tuple[int, int]]:
    """Run a router before two pools of which each has half of the members; yield its port and that of its metrics."""
    half = len(ports) // 2
    first, second = (json.dumps([f"127.0.0.1:{port}" for port in part]) for part in (ports[:half], ports[half:]))
    file, log = folder / "cluster.toml", folder / "router.log"
    file.write_text(
        "[router]\nhttp-port = 0\ngrpc-port = 0\nmetrics-port = 0\n"
        f'[[pool]]\nname = "interactive"\nkind = "{kind}"\nmembers = {first}\nclasses = ["interactive"]\n{keys}\n'
        f'[[pool]]\nname = "batch"\nkind = "{kind}"\nmembers = {second}\nclasses = ["batch"]\nborrows = true\n'
        f"max-requests = {_SLOTS}\n"
    )
    with log.open("wb") as sink:
        command = [str(Path(sys.executable).with_name("nerite")), "route", str(file)]
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        deadline = time.monotonic() + 30
        while (
            found := re.search(r"HTTPService at [\d.]+:(\d+)[\s\S]*Metrics Service at [\d.]+:(\d+)", log.read_text())
        ) is None:
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.02)
        yield int(found[1]), int(found[2])
    finally:
        process.terminate()
        process.wait()


class Figures(NamedTuple):
    """Of one run. Times in milliseconds."""

    first_p50: float
    first_p99: float
    whole_p50: float
    whole_p99: float
    failed: int
    batch_tokens: float
    """A second."""
    batch_failed: int
    preempted: float


class Load:
    """What is asked of a router in one run."""

    def __init__(self, port: int, model: str, seconds: float) -> None:
        self.port = port
        self.model = model
        self.end = time.perf_counter() + seconds
        self.firsts: list[float] = []
        self.wholes: list[float] = []
        self.failed = 0
        self.batch_tokens = 0
        self.batch_failed = 0

    def message(self, level: str, tokens: int, number: int, *, stream: bool) -> bytes:
        """Return a request whose prompt is its own."""
        prompt = f"{level} {number:06d} " + "word " * (PROMPT * 4 // 5)
        asked = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Nerite-Class: {level}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + body

    async def interactive(self, number: int, due: float) -> None:
        """Ask for a stream that was due then."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(self.message("interactive", ANSWER, number, stream=True))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"data: ")
            first = time.perf_counter()
            rest = await reader.read(-1)
            writer.close()
            if not head.startswith(b"HTTP/1.1 200") or b'"error"' in rest:
                raise ConnectionError
            self.firsts.append((first - due) * 1e3)
            self.wholes.append((time.perf_counter() - due) * 1e3)
        except (OSError, EOFError):
            self.failed += 1

    async def batch(self, place: int) -> None:
        """Ask for one answer after the other."""
        number = 0
        while time.perf_counter() < self.end:
            number += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(self.message("batch", BATCH_ANSWER, place * 100_000 + number, stream=False))
            with contextlib.suppress(OSError):
                answer = await reader.read(-1)
                if answer.startswith(b"HTTP/1.1 200") and time.perf_counter() < self.end:
                    self.batch_tokens += BATCH_ANSWER
                elif answer.startswith(b"HTTP/1.1 429"):
                    await asyncio.sleep(0.1)
                elif not answer.startswith(b"HTTP/1.1 200"):
                    self.batch_failed += 1
            writer.close()

    async def run(self, rate: float, streams: int) -> None:
        """Send all of it."""
        chance = random.Random(1)
        async with asyncio.TaskGroup() as group:
            for place in range(streams):
                group.create_task(self.batch(place))
            due, number = time.perf_counter(), 0
            while due < self.end:
                await asyncio.sleep(max(due - time.perf_counter(), 0.0))
                group.create_task(self.interactive(number, due))
                number += 1
                due += chance.expovariate(rate)


def metric(port: int, name: str) -> float:
    """Return the sum of a metric over its labels."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", answer.read().decode(), re.M))


def measured(
    ports: Sequence[int], kind: str, model: str, keys: str, given: argparse.Namespace, streams: int
) -> Figures:
    """Measure one case."""
    with tempfile.TemporaryDirectory() as folder, router(ports, kind, keys, Path(folder)) as (port, metrics):
        load = Load(port, model, given.seconds)
        uvloop.run(load.run(given.rate, streams))
        firsts, wholes = statistics.quantiles(load.firsts, n=100), statistics.quantiles(load.wholes, n=100)
        preempted = metric(metrics, "nerite_router_preempted_total")
        tokens = load.batch_tokens / given.seconds
        return Figures(
            firsts[49], firsts[98], wholes[49], wholes[98], load.failed, tokens, load.batch_failed, preempted
        )


def table(ports: Sequence[int], kind: str, model: str, given: argparse.Namespace) -> str:
    """Measure all cases by turns, and return the table."""
    found: dict[str, list[Figures]] = {case: [] for case in CASES}
    for _ in range(given.rounds):
        for case, keys in CASES.items():
            found[case].append(measured(ports, kind, model, keys, given, 0 if case == "alone" else given.streams))
            print(case, found[case][-1], file=sys.stderr, flush=True)
    lines = [
        "| | first token p50, ms | p99, ms | whole answer p50, ms | p99, ms | failed "
        "| batch, tokens/s | failed | preempted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, runs in found.items():
        cells = [statistics.median(values) for values in zip(*runs, strict=True)]
        lines.append(f"| {case} | " + " | ".join(f"{cell:,.0f}" for cell in cells) + " |")
    return f"{machine()}.\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write or print the table."""
    flags = command_line(__doc__, 30.0, 3)
    flags.add_argument("--rate", type=float, default=4.0, help="interactive requests a second (default: %(default)g)")
    flags.add_argument("--streams", type=int, default=24, help="batch requests at a time (default: %(default)s)")
    flags.add_argument("--model", default="", metavar="SIZE", help="members are Nerite with this language model")
    flags.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.member:
        uvloop.run(serve())
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as members:
        if given.model:
            ports = members.enter_context(language_models(given.model, 2, Path(folder)))
            text = table(ports, "nerite", given.model, given)
        else:
            text = table(members.enter_context(stand_ins(4)), "openai", "m", given)
    publish("pools", text, given)


if __name__ == "__main__":
    main()
