"""What traces cost: requests of the first section with none of them traced, each of them, and one of a hundred.

    python benchmarks/traces.py [--seconds S] [--rounds N] [--in worker|process|triton] [--loads LOAD ...] [--print]

The collector is a process beside the server that takes everything and reads nothing. The servers are asked in turn, and
each of them is first at times; a ratio is the median of those within a round, as machines change their pace. Triton has
no collector here, and where it writes a file it stops answering now and then, mostly with several requests at once:
it is measured where it is asked for, by ``--in triton --loads http-1 grpc-1``. Needs wrk and h2load.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import truediv
from pathlib import Path

from contestants import Contestant, identity_repository, nerite, real_triton, stopped
from loads import Load, h2load, need, write_bodies, wrk
from page import command_line, machine, publish

_HTTP = {
    "http-1": ("HTTP, c=1", "small", 1),
    "http-16": ("HTTP, c=16", "small", 16),
    "http-64": ("HTTP, c=64", "small", 64),
    "large-http-16": ("602 KB, HTTP, c=16", "large", 16),
}
_GRPC = {
    "grpc-1": ("gRPC, c=1", "small", 1),
    "grpc-16": ("gRPC, 16 streams", "small", 16),
    "large-grpc-16": ("602 KB, gRPC, 16 streams", "large", 16),
}
LOADS = ("http-1", "http-16", "http-64", "grpc-1", "grpc-16", "large-http-16", "large-grpc-16")
_PLACES = {"worker": "worker", "process": "in process", "triton": "Triton"}
"""Where the model runs, by what the flag calls it."""
_PAGE = ("worker", "process")
"""Those of them that the page shows."""
_COLLECTOR = """
import asyncio

async def serve(reader, writer):
    while head := await reader.readuntil(b"\\r\\n\\r\\n"):
        size = next(int(line[15:]) for line in head.lower().split(b"\\r\\n") if line.startswith(b"content-length:"))
        await reader.readexactly(size)
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def main() -> None:
    """Run, and write or print the section of docs/benchmarks.md."""
    need("wrk", "h2load")
    flags = command_line(__doc__, 2.0, 5)
    flags.add_argument("--in", dest="where", choices=tuple(_PLACES), help="measure this alone")
    flags.add_argument("--loads", nargs="+", choices=LOADS, metavar="LOAD", help=f"of {', '.join(LOADS)}")
    given = flags.parse_args()
    if (given.where or given.loads) and not given.print:
        flags.error("a part of the table is not for the page: add --print")
    places = (given.where,) if given.where else _PAGE
    publish("traces", report(given.seconds, given.rounds, places, given.loads or LOADS), given)


@contextmanager
def collector() -> Iterator[str]:
    """Run a collector; yield its URL."""
    process = subprocess.Popen(
        [sys.executable, "-c", _COLLECTOR], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with stopped(process):
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1/traces"


def report(seconds: float, rounds: int, places: Sequence[str], loads: Sequence[str]) -> str:
    """Return the table."""
    lines = [
        f"Measured on {machine()}; {rounds} rounds of {seconds:g} s; requests a second.",
        "",
        "| | off | file, each | ratio | OpenTelemetry, each | ratio | OpenTelemetry, one of 100 | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for place in places:
        where = _PLACES[place]
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            folder = Path(temporary)
            write_bodies(folder)
            models = identity_repository(folder, in_process=place == "process")
            timed = "--trace-config=level=TIMESTAMPS"
            each = "--trace-config=rate=1"
            file = f"--trace-config=triton,file={folder / 'trace'}"
            if place == "triton":
                servers = [
                    stack.enter_context(real_triton(models, folder, name="off")),
                    stack.enter_context(real_triton(models, folder, timed, file, each, name="file")),
                ]
            else:
                spans = (timed, "--trace-config=mode=opentelemetry")
                spans += (f"--trace-config=opentelemetry,url={stack.enter_context(collector())}",)
                servers = [
                    stack.enter_context(nerite(name, models, folder, *flags))
                    for name, flags in {
                        "off": (),
                        "file": (timed, file, each),
                        "spans": (*spans, each),
                        "some": (*spans, "--trace-config=rate=100"),
                    }.items()
                ]
            for name in loads:
                called, load = _load(name, folder, seconds)
                rates = [_round(load, servers, first=number % len(servers)) for number in range(rounds)]
                off, *traced = zip(*rates, strict=True)
                cells = " | ".join(
                    f"{statistics.median(column):,.0f} | **{statistics.median(map(truediv, column, off)):.2f}**"
                    for column in traced
                )
                without = " | |" * (3 - len(traced))
                lines.append(f"| {where}, {called} | {statistics.median(off):,.0f} | {cells} |{without}")
    return "\n".join(lines) + "\n"


def _load(name: str, folder: Path, seconds: float) -> tuple[str, Load]:
    """Return a load, and what the table calls it."""
    if name in _GRPC:
        called, size, streams = _GRPC[name]
        return called, h2load(folder, size, 1, streams, seconds)
    called, size, connections = _HTTP[name]
    return called, wrk(folder, size, connections, seconds)


def _round(load: Load, servers: Sequence[Contestant], first: int) -> list[float]:
    """Return the rate of each server; which of them is asked first changes."""
    rates = {server.name: load(server).rate for server in (*servers[first:], *servers[:first])}
    return [rates[server.name] for server in servers]


if __name__ == "__main__":
    main()
