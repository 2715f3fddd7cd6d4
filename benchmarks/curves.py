"""What a request costs as there is more of everything: models, connections, requests that wait.

The cost is the processor time of the server and its workers over one run, divided by the requests answered; on a busy
machine it says more than the rate does.

- models: N tiny ONNX models, asked in turn over 16 connections, with the time until all are ready and the memory;
- idle connections: N of them that say nothing, next to 16 that ask;
- connections: N that ask;
- requests that wait: 8 gRPC connections with N / 8 streams each before a model without batching.

    python benchmarks/curves.py [--seconds S] [--rounds N] [--print]
"""

from __future__ import annotations

import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from contestants import ASLEEP, Contestant, identity_repository, nerite
from footprint import processor_seconds, resident
from loads import Load, h2load, need, write_bodies, wrk
from page import command_line, machine, publish

from onnx_models import many

MODELS = (1, 10, 100, 1000)
IDLE = (0, 10, 100, 1000)
CONNECTIONS = (1, 4, 16, 64, 256, 1000)
WAITING = (8, 64, 512, 4096)
"""Waiting awake would count as cost."""


class Point(NamedTuple):
    """One point of a curve: requests a second, and microseconds of processor time a request."""

    rate: float
    cost: float


def measured(server: Contestant, load: Load, seconds: float, rounds: int) -> Point:
    """Run one load a few times; medians."""
    for _ in range(3):
        load(server)
    points = []
    for _ in range(rounds):
        before = processor_seconds(server.process.pid)
        rate = load(server).rate
        spent = processor_seconds(server.process.pid) - before
        points.append((rate, spent / (rate * seconds) * 1e6))
    rates, costs = zip(*points, strict=True)
    return Point(statistics.median(rates), statistics.median(costs))


def of_models(folder: Path, seconds: float, rounds: int) -> str:
    """Return the table for more and more models."""
    lines = ["### Models", ""]
    lines += [
        "| models | ready after | memory | one is asked, requests/s | cost of one | all are asked | cost of one |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for count in MODELS:
        repository = many(folder / f"models-{count}", count)
        turns = f"turns-{count}"
        (folder / f"{turns}.lua").write_text(
            (folder / "small.lua").read_text()
            + f"local requests, last = {{}}, -1\nfunction init()\n  for number = 0, {count - 1} do\n"
            '    requests[number] = wrk.format(nil, "/v2/models/m" .. number .. "/infer")\n  end\nend\n'
            f"function request()\n  last = (last + 1) % {count}\n  return requests[last]\nend\n"
        )
        began = time.monotonic()
        with nerite(f"models-{count}", repository, folder, ASLEEP) as server:
            ready = time.monotonic() - began
            memory = resident(server.process.pid)
            one = measured(server, wrk(folder, "small", 16, seconds, "m0"), seconds, rounds)
            each = measured(server, wrk(folder, turns, 16, seconds), seconds, rounds)
        lines.append(
            f"| {count:,} | {ready:.2f} s | {memory:.0f} MB "
            f"| {one.rate:,.0f} | {one.cost:.1f} us | {each.rate:,.0f} | {each.cost:.1f} us |"
        )
    return "\n".join(lines) + "\n"


def curve(title: str, counts: tuple[int, ...], point: Callable[[int], Point]) -> str:
    """Return the table of one curve."""
    lines = [f"### {title}", "", f"| {title.lower()} | requests/s | cost of one |", "|---|---|---|"]
    for count in counts:
        rate, cost = point(count)
        lines.append(f"| {count:,} | {rate:,.0f} | {cost:.1f} us |")
    return "\n".join(lines) + "\n"


def of_connections(folder: Path, seconds: float, rounds: int) -> str:
    """Return the tables for idle connections and for those that ask."""
    with nerite("connections", identity_repository(folder / "c", in_process=True), folder, ASLEEP) as server:

        def idle(count: int) -> Point:
            with ExitStack() as stack:
                for _ in range(count):
                    stack.enter_context(socket.create_connection(("127.0.0.1", server.http)))
                return measured(server, wrk(folder, "small", 16, seconds), seconds, rounds)

        def asking(count: int) -> Point:
            return measured(server, wrk(folder, "small", count, seconds), seconds, rounds)

        return curve("Idle connections", IDLE, idle) + "\n" + curve("Connections", CONNECTIONS, asking)


def of_waiting(folder: Path, seconds: float, rounds: int) -> str:
    """Return the table for more and more requests that wait."""
    repository = identity_repository(folder / "q")
    config = repository / "identity" / "config.pbtxt"
    config.write_text(config.read_text().replace("dynamic_batching {}", ""))
    with nerite("waiting", repository, folder, ASLEEP) as server:

        def waiting(count: int) -> Point:
            return measured(server, h2load(folder, "small", 8, count // 8, seconds), seconds, rounds)

        return curve("Requests that wait", WAITING, waiting)


def main() -> None:
    """Measure and report."""
    options = command_line(__doc__, 2, 3).parse_args()
    need("wrk", "h2load")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    text = f"Measured on {machine()}; {options.rounds} rounds of {options.seconds} s.\n\n"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_bodies(folder)
        arguments = (folder, options.seconds, options.rounds)
        text += "\n".join(table(*arguments) for table in (of_models, of_connections, of_waiting))
    publish("curves", text, options)


if __name__ == "__main__":
    main()
