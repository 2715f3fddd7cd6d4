"""Tensors of 602 KB in system shared memory, both ways: against the same tensors over HTTP, and against Triton.

python benchmarks/shared_memory.py [--seconds S] [--rounds N] [--print]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from contestants import Contestant, identity_repository, nerite, real_triton
from loads import LARGE, need, write_bodies, wrk
from page import bring_up_to_date, machine

BYTES = 4 * LARGE
REGIONS = ("in", "out")


def main() -> None:
    """Run, and write or print the section of docs/benchmarks.md."""
    need("wrk")
    bring_up_to_date("shared memory", __doc__, report, 3.0)


def report(seconds: float, rounds: int) -> str:
    """Return the table."""
    lines = [
        f"Measured on {machine()}; {rounds} rounds of {seconds:g} s; requests a second.",
        "",
        "| | HTTP | shared memory | ratio | wanted | Triton, shared memory | ratio | wanted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        write_bodies(folder)
        write_body(folder)
        stack.enter_context(files())
        models = identity_repository(folder / "worker")
        inside = identity_repository(folder / "inside", in_process=True)
        reference = stack.enter_context(real_triton(models, folder))
        contestants = {
            "worker": stack.enter_context(nerite("worker", models, folder, "--allow-client-shm=true")),
            "in process": stack.enter_context(nerite("inside", inside, folder, "--allow-client-shm=true")),
        }
        for server in (reference, *contestants.values()):
            register(server)
        for connections in (1, 16):
            there = wrk(folder, "large", connections, seconds)
            shared = wrk(folder, "shared", connections, seconds)
            runs = [(reference, shared)] + [
                (server, load) for server in contestants.values() for load in (there, shared)
            ]
            rates = [[load(server).rate for server, load in runs] for _ in range(rounds)]
            theirs, *ours = (statistics.median(column) for column in zip(*rates, strict=True))
            for name, http, memory in zip(contestants, ours[::2], ours[1::2], strict=True):
                lines.append(
                    f"| {name}, c={connections} | {http:,.0f} | {memory:,.0f} | **{memory / http:.2f}** | 4.0 "
                    f"| {theirs:,.0f} | **{memory / theirs:.2f}** | 2.0 |"
                )
    return "\n".join(lines) + "\n"


@contextmanager
def files() -> Iterator[None]:
    """Have the client's two files of shared memory."""
    paths = [Path("/dev/shm", f"nerite_bench_{name}") for name in REGIONS]
    for path in paths:
        path.write_bytes(b"\0\0\x80?" * LARGE)
    try:
        yield
    finally:
        for path in paths:
            path.unlink()


def register(server: Contestant) -> None:
    """Tell a server of the client's memory."""
    for name in REGIONS:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.http}/v2/systemsharedmemory/region/{name}/register",
            json.dumps({"key": f"nerite_bench_{name}", "byte_size": BYTES}).encode(),
        )
        urllib.request.urlopen(request).close()


def write_body(folder: Path) -> None:
    """Write the request that wrk posts: it only says where the tensors are."""
    place = [{"shared_memory_region": name, "shared_memory_byte_size": BYTES} for name in REGIONS]
    body = {
        "inputs": [{"name": "INPUT0", "shape": [1, LARGE], "datatype": "FP32", "parameters": place[0]}],
        "outputs": [{"name": "OUTPUT0", "parameters": place[1]}],
    }
    (folder / "shared.lua").write_text(
        f'wrk.body = [[{json.dumps(body)}]]\nwrk.method = "POST"\nwrk.headers["Content-Type"] = "application/json"\n'
    )


if __name__ == "__main__":
    main()
