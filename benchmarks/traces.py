"""What traces cost: small requests with none of them traced, each of them, and one of a hundred.

python benchmarks/traces.py [--seconds S] [--rounds N] [--print]

The collector is a process beside the server that takes everything and reads nothing. Needs wrk.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from contestants import identity_repository, nerite, stopped
from loads import need, write_bodies, wrk
from page import bring_up_to_date, machine

CONNECTIONS = (1, 16, 64)
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
    need("wrk")
    bring_up_to_date("traces", __doc__, report, 2.0)


@contextmanager
def collector() -> Iterator[str]:
    """Run a collector; yield its URL."""
    process = subprocess.Popen(
        [sys.executable, "-c", _COLLECTOR], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with stopped(process):
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1/traces"


def report(seconds: float, rounds: int) -> str:
    """Return the table."""
    lines = [
        f"Measured on {machine()}; {rounds} rounds of {seconds:g} s; requests a second.",
        "",
        "| | off | file, each | ratio | OpenTelemetry, each | ratio | OpenTelemetry, one of 100 | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for where, in_process in (("worker", False), ("in process", True)):
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            folder = Path(temporary)
            write_bodies(folder)
            models = identity_repository(folder, in_process=in_process)
            timed = "--trace-config=level=TIMESTAMPS"
            spans = (timed, "--trace-config=mode=opentelemetry")
            spans += (f"--trace-config=opentelemetry,url={stack.enter_context(collector())}",)
            file = f"--trace-config=triton,file={folder / 'trace'}"
            servers = [
                stack.enter_context(nerite(name, models, folder, *flags))
                for name, flags in {
                    "off": (),
                    "file": (timed, file, "--trace-config=rate=1"),
                    "spans": (*spans, "--trace-config=rate=1"),
                    "some": (*spans, "--trace-config=rate=100"),
                }.items()
            ]
            for connections in CONNECTIONS:
                load = wrk(folder, "small", connections, seconds)
                rates = [[load(server).rate for server in servers] for _ in range(rounds)]
                off, *traced = (statistics.median(column) for column in zip(*rates, strict=True))
                cells = " | ".join(f"{rate:,.0f} | **{rate / off:.2f}**" for rate in traced)
                lines.append(f"| {where}, c={connections} | {off:,.0f} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
