"""How load spreads over processes: connections that the core gives to fronts, and connections that SO_REUSEPORT hashes.

Long gRPC connections of unequal load: the k-th sends 1/k as many requests as the first, at random moments, whatever
comes back. Ours is one server with N fronts. Its rival is N independent servers with `--reuse-grpc-port` on one port,
for which the kernel chooses by a hash of addresses. "busiest / mean" is the number of requests of the busiest process
in proportion to the mean. The first table computes it for connections that are assigned at random, and for the best
assignment there is, in which the largest connections come first.

    python benchmarks/front_spread.py PORT CONNECTIONS RATE SECONDS SEED

is the client: it prints "warm", and then what came as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Final

import uvloop
from contestants import ASLEEP, ROOT, Contestant, nerite
from front_loads import warmed
from loads import SMALL, h2load
from page import machine

sys.path.insert(0, str(ROOT / "src"))

from nerite.client.connection import Address
from nerite.tools.bench.grpc_generator import GrpcClientCall, GrpcLine, header_block
from nerite.tools.bench.loops import ExactTimer
from nerite.wire.grpc_service import ModelInferRequest

CONNECTIONS: Final = (8, 16, 32, 64)
_MEASURED: Final = (8, 64)
_PROCESSES: Final = (2, 4, 8)
_TRIALS: Final = 2000
_WARM_UP: Final = 10.0
"""Seconds in which fronts may pass on connections."""
_PART: Final = 0.25
"""Of the rate that h2load reaches: the client shares the machine."""


def weights(connections: int) -> list[float]:
    """Return the share of each connection in all requests."""
    sizes = [1 / (number + 1) for number in range(connections)]
    return [size / sum(sizes) for size in sizes]


def busiest(shares: Sequence[float]) -> float:
    """Return the largest of the shares of processes, in proportion to their mean."""
    return max(shares) * len(shares) / sum(shares)


def at_random(connections: int, processes: int, chance: random.Random) -> float:
    """Return ``busiest`` for connections that are assigned at random."""
    loads = [0.0] * processes
    for weight in weights(connections):
        loads[chance.randrange(processes)] += weight
    return busiest(loads)


def largest_first(connections: int, processes: int) -> float:
    """Return ``busiest`` if each connection, the largest first, goes to the process with the least load."""
    loads = [0.0] * processes
    for weight in weights(connections):
        loads[loads.index(min(loads))] += weight
    return busiest(loads)


def computed() -> str:
    """Return the table that needs no measurement."""
    text = "| connections | processes | at random: mean | one of twenty is above | largest first |\n"
    text += "|---|---|---|---|---|\n"
    chance = random.Random(1)
    for connections in CONNECTIONS:
        for processes in _PROCESSES:
            found = [at_random(connections, processes, chance) for _ in range(_TRIALS)]
            text += f"| {connections} | {processes} | {statistics.mean(found):.2f} "
            text += f"| {statistics.quantiles(found, n=20)[-1]:.2f} | {largest_first(connections, processes):.2f} |\n"
    return text


# The client.


class Call(GrpcClientCall):
    """One request."""

    def __init__(self, due: float, times: list[float], failures: list[str]) -> None:
        super().__init__(reads=False)
        self._due = due
        self._times = times
        self._failures = failures

    def received(self, data: bytes) -> None:
        """Ignore the response."""

    def ended(self, reason: str) -> None:
        """Note how long it took."""
        if reason:
            self._failures.append(reason)
        else:
            self._times.append(perf_counter() - self._due)


async def ask(port: int, connections: int, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Send requests for a time; return what came."""
    chance = random.Random(seed)
    address = Address.parse(f"127.0.0.1:{port}")
    block = header_block(address, "ModelInfer", {})
    lines = [GrpcLine(address, None, block) for _ in range(connections)]
    shares = weights(connections)
    message = ModelInferRequest(
        model_name="identity",
        inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": [1, SMALL]}],
        raw_input_contents=[b"\0\0\x80?" * SMALL],
    ).SerializeToString()
    framed = b"\0" + len(message).to_bytes(4) + message
    times: list[float] = []
    failures: list[str] = []
    due = perf_counter() + 0.2

    def send() -> None:
        nonlocal due
        now = perf_counter()
        while due <= now:
            (line,) = chance.choices(lines, shares)
            line.open(Call(due, times, failures), framed, last=True)
            due += chance.expovariate(rate)
        timer.set(due)

    timer = ExactTimer(send)
    timer.set(due)
    await asyncio.sleep(_WARM_UP)
    times.clear()
    failures.clear()
    print("warm", flush=True)
    await asyncio.sleep(seconds)
    timer.close()
    found = statistics.quantiles(times, n=100)
    return {"p50": found[49] * 1000, "p99": found[98] * 1000, "answered": len(times), "failed": len(failures)}


# The servers.


def _page(server: Contestant) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text


@contextmanager
def ours(count: int, models: Path, folder: Path) -> Iterator[tuple[Contestant, Callable[[], list[float]]]]:
    """Run a server with fronts; yield it, and what returns the number of requests of each front."""
    with nerite("fronts", models, folder, ASLEEP, f"--front-processes={count}") as server:

        def requests() -> list[float]:
            return [float(number) for number in re.findall(r"nerite_front_requests_total\{.*?\} (\S+)", _page(server))]

        yield server, requests


@contextmanager
def sharing(count: int, models: Path, folder: Path) -> Iterator[tuple[Contestant, Callable[[], list[float]]]]:
    """Run independent servers on one port; yield one of them, and the same."""
    with ExitStack() as stack:
        first = stack.enter_context(nerite("reuse 0", models, folder, ASLEEP, "--reuse-grpc-port=true"))
        flags = (ASLEEP, f"--grpc-port={first.grpc}", "--reuse-grpc-port=true")
        rest = [stack.enter_context(nerite(f"reuse {number}", models, folder, *flags)) for number in range(1, count)]
        pattern = re.compile(r'nv_inference_request_success\{[^}]*model="identity"[^}]*\} (\S+)')

        def requests() -> list[float]:
            return [sum(map(float, pattern.findall(_page(server)))) for server in (first, *rest)]

        yield first, requests


def report(options: argparse.Namespace, folder: Path, models: Path) -> str:
    """Measure both; return the tables."""
    text = f"{computed()}\nMeasured on {machine()}; {options.rounds} rounds of {options.seconds:g} s after "
    text += f"{_WARM_UP:g} s.\n\n"
    text += "| connections | processes | requests/s | | busiest / mean | worst | p50 | p99 | failed |\n"
    text += "|---|---|---|---|---|---|---|---|---|\n"
    for count in options.fronts:
        rate = 0.0
        for connections in _MEASURED:
            for name, running in (("fronts", ours), ("SO_REUSEPORT", sharing)):
                with running(count, models, folder) as (server, requests):
                    rate = rate or h2load(folder, "small", 8, 8, 2)(server).rate * _PART
                    client = ["front_spread.py", server.grpc, connections, rate, options.seconds]
                    runs = [warmed([[*client, number]], requests) for number in range(options.rounds)]
                spreads = [
                    busiest([late - early for early, late in zip(before, after, strict=True)])
                    for before, after, _ in runs
                ]
                p50, p99 = (statistics.median(said[which] for _, _, (said,) in runs) for which in ("p50", "p99"))
                failed = sum(said["failed"] for _, _, (said,) in runs)
                line = f"| {connections} | {count} | {rate:,.0f} | {name} | **{statistics.mean(spreads):.2f}** "
                line += f"| {max(spreads):.2f} | {p50:.2f} ms | {p99:.2f} ms | {failed:.0f} |\n"
                print(line, end="", file=sys.stderr, flush=True)
                text += line
    return text


def main() -> None:
    """Run the client."""
    port, connections, rate, seconds, seed = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(ask(int(port), int(connections), float(rate), float(seconds), int(seed)))))


if __name__ == "__main__":
    main()
