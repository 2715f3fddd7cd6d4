"""Nerite and Triton side by side: writes the tables of docs/benchmarks.md.

    python benchmarks/run.py [--seconds S] [--rounds N] [--only NAME ...] [--print]

The servers run at the same time and are asked in turn, Triton, Nerite, Triton, …; a cell is the ratio of the medians.
Needs wrk and h2load (Debian: wrk, nghttp2-client). Triton is installed on first use (400 MB).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import footprint
from contestants import Contestant, identity_repository, nerite, real_triton
from loads import Load, Pace, h2load, need, tritonclient, write_bodies, wrk
from page import command_line, machine, publish

_RECOVERY_SECONDS = 10.0


class Cell(NamedTuple):
    """One load, and the ratios it is to reach in a worker and in process; 0 for none."""

    name: str
    load: Load
    worker: float
    in_process: float


class Result(NamedTuple):
    """Medians of one cell, in requests a second."""

    cell: Cell
    client: float
    """What the client's own processor time allows, were all servers infinitely fast."""
    triton: float
    worker: float
    in_process: float


def tables(folder: Path, seconds: float) -> dict[str, list[Cell]]:
    """Return the cells by table."""

    def http(size: str, connections: int, worker: float, in_process: float) -> Cell:
        return Cell(f"HTTP c={connections}", wrk(folder, size, connections, seconds), worker, in_process)

    def grpc(size: str, connections: int, streams: int, worker: float, in_process: float) -> Cell:
        name = f"gRPC {streams} streams" if connections == 1 else f"gRPC {connections} connections x {streams}"
        name = "gRPC c=1" if connections == streams == 1 else name
        return Cell(name, h2load(folder, size, connections, streams, seconds), worker, in_process)

    def client(protocol: str, size: str) -> Cell:
        label = "HTTP" if protocol == "http" else "gRPC"
        kind = "small" if size == "small" else "602 KB"
        return Cell(f"{label}, {kind}", tritonclient(protocol, size, seconds), 1.4, 1.8)

    return {
        "Small requests (16 x FP32)": [
            http("small", 1, 1.8, 3.0),
            http("small", 16, 2.5, 3.5),
            http("small", 64, 2.5, 3.5),
            grpc("small", 1, 1, 1.8, 2.5),
            grpc("small", 1, 16, 3.0, 3.5),
            grpc("small", 8, 8, 3.0, 3.5),
        ],
        "Large requests (602 KB in, 602 KB out)": [
            http("large", 1, 2.0, 2.5),
            http("large", 16, 2.0, 2.5),
            http("large", 64, 2.0, 2.5),
            grpc("large", 1, 1, 2.0, 2.5),
            grpc("large", 1, 16, 2.0, 2.5),
        ],
        "NVIDIA's tritonclient, one call at a time": [
            client(protocol, size) for protocol in ("http", "grpc") for size in ("small", "large")
        ],
    }


def measure(cell: Cell, servers: list[Contestant], rounds: int) -> Result:
    """Run one load on all servers in turn, a few times."""
    paces: dict[str, list[Pace]] = {server.name: [] for server in servers}
    for _ in range(rounds):
        for server in servers:
            paces[server.name].append(patiently(cell.load, server))
    triton, worker, in_process = (statistics.median(pace.rate for pace in paces[server.name]) for server in servers)
    client = 1 / statistics.median(pace.client for pace in paces[servers[-1].name])
    return Result(cell, client, triton, worker, in_process)


def patiently(load: Load, server: Contestant) -> Pace:
    """Run a load once more if it fails: after 64 connections with large requests Triton now and then answers nobody."""
    try:
        return load(server)
    except RuntimeError as error:
        print(f"once more: {error}", file=sys.stderr, flush=True)
        time.sleep(_RECOVERY_SECONDS)
        return load(server)


def markdown(title: str, results: list[Result]) -> str:
    """Return a table."""
    lines = [
        f"### {title}",
        "",
        "| | Triton | Nerite, worker | ratio | wanted | Nerite, in process | ratio | wanted | client alone | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell, client, triton, worker, in_process in results:
        lines.append(
            f"| {cell.name} | {triton:,.0f} | {worker:,.0f} | **{worker / triton:.2f}** | {cell.worker} "
            f"| {in_process:,.0f} | **{in_process / triton:.2f}** | {cell.in_process} "
            f"| {client:,.0f} | {client / triton:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__, 3, 5)
    parser.add_argument("--only", nargs="*", default=[], help="cells whose name or table contains one of these")
    options = parser.parse_args()
    need("wrk", "h2load")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_bodies(folder)
        repository = identity_repository(folder / "worker")
        inside = identity_repository(folder / "inside", in_process=True)
        servers = [
            stack.enter_context(real_triton(repository, folder)),
            stack.enter_context(nerite("Nerite, worker", repository, folder)),
            stack.enter_context(nerite("Nerite, in process", inside, folder)),
        ]
        text = f"Measured on {machine()}; {options.rounds} rounds of {options.seconds} s; requests a second.\n\n"
        for title, cells in tables(folder, options.seconds).items():
            wanted = [
                cell for cell in cells if not options.only or any(o in f"{title} {cell.name}" for o in options.only)
            ]
            results = []
            for cell in wanted:
                result = measure(cell, servers, options.rounds)
                results.append(result)
                print(
                    f"{cell.name:28} {result.worker / result.triton:5.2f} (wanted {cell.worker})"
                    f" {result.in_process / result.triton:5.2f} (wanted {cell.in_process})",
                    file=sys.stderr,
                    flush=True,
                )
            if results:
                text += markdown(title, results) + "\n"
    if not options.only:
        text += footprint.report()
    publish("side by side", text, options)


if __name__ == "__main__":
    main()
