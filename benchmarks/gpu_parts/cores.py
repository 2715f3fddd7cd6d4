"""Front processes where there are many processors: requests a second, and what processes take for one.

One process and several front processes, beside each other and asked in turn. The models run on processors: an identity
in one worker for small tensors and in four for large ones, and a stand-in for an engine of language models that makes
a token for each of its streams every millisecond.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from contestants import ASLEEP, Contestant, nerite
from front_loads import (
    FrontLoad,
    http_message,
    latencies,
    public,
    repository,
    tls_flags,
    tokens,
    write_requests,
)
from loads import h2load, write_bodies, wrk

from gpu_parts.environment import write_certificate
from gpu_parts.part import Part, Skipped, need

_WANTED = ">= 3.5"
"""Of six front processes over one process."""
_WANTED_OF = 6
_LARGE_WORKERS = 4


class Sizes(NamedTuple):
    """How much there is to measure."""

    counts: Sequence[int]
    """Numbers of processes, for small requests."""
    few: Sequence[int]
    """For the others."""
    seconds: float
    threads: int
    """Of the client, or processes."""
    streams: Sequence[int]


_SIZES = Sizes((1, 2, 4, 6, 8), (1, 6), 2, 4, (200, 2000))
_REHEARSED = Sizes((1, 2), (1, 2), 1, 1, (8,))


class CoreLoad(NamedTuple):
    """A load, and the numbers of processes that it is tried with."""

    load: FrontLoad
    counts: Sequence[int]
    program: str = ""
    """The generator that it needs."""
    wanted: str | None = None
    rehearsed: bool = False


def run(part: Part) -> None:
    """Measure all loads, those over TLS with servers of their own."""
    sizes = _SIZES if part.gpu else _REHEARSED
    part.figure("processors", len(os.sched_getaffinity(0)))
    folder = part.folder
    write_requests(folder)
    models = repository(folder)
    (folder / "several").mkdir()
    write_bodies(folder / "several", "several")
    shutil.copytree(models / "identity", models / "several")
    config = (models / "several" / "config.pbtxt").read_text().replace('"identity"', '"several"')
    (models / "several" / "config.pbtxt").write_text(config.replace("KIND_CPU", f"KIND_CPU count: {_LARGE_WORKERS}"))
    measure(part, models, plain(folder, sizes), sizes)
    with part.attempt("TLS"):
        certificate = folder / "localhost.pem"
        if part.kit is not None:
            certificate = part.kit.certificate
        elif shutil.which("openssl") is not None:
            write_certificate(certificate)
        else:
            raise Skipped("openssl is not on the path, and there is no kit")
        measure(part, models, over_tls(folder, sizes), sizes, *tls_flags(certificate))


def plain(folder: Path, sizes: Sizes) -> list[CoreLoad]:
    """Return the loads without TLS."""
    seconds, threads = sizes.seconds, sizes.threads
    small, json = (
        FrontLoad(
            f"HTTP, {name}", public(wrk(folder, body, 64, seconds, threads=threads), seconds), 0,
            ("http", http_message(folder, body, "identity")),
        )
        for name, body in (("64 bytes", "small"), ("JSON", "json"))
    )  # fmt: skip
    large = public(wrk(folder / "several", "large", 32, seconds, "several", threads=threads), seconds)
    grpc = public(h2load(folder, "small", 32, 8, seconds, threads=threads), seconds)
    large_grpc = public(h2load(folder / "several", "large", 32, 2, seconds, threads=threads), seconds)
    return [
        CoreLoad(json, sizes.few, "wrk", _WANTED, rehearsed=True),
        CoreLoad(FrontLoad("HTTP, 602 KB", large, 0), sizes.few, "wrk", _WANTED),
        CoreLoad(FrontLoad("gRPC, 602 KB", large_grpc, 0), sizes.few, "h2load", _WANTED),
        CoreLoad(small, sizes.counts, "wrk"),
        CoreLoad(FrontLoad("gRPC, 64 bytes", grpc, 0), sizes.counts, "h2load", rehearsed=True),
        *(
            CoreLoad(FrontLoad(f"tokens, {title}, {count} streams", tokens(protocol, count, seconds, threads), 0),
                     sizes.few, "", _WANTED, protocol == "grpc")
            for protocol, title in (("grpc", "ModelStreamInfer"), ("chat", "/v1/chat"))
            for count in sizes.streams
        ),
    ]  # fmt: skip


def over_tls(folder: Path, sizes: Sizes) -> list[CoreLoad]:
    """Return the loads over TLS."""
    seconds, threads = sizes.seconds, sizes.threads
    http = public(wrk(folder, "small", 64, seconds, tls=True, threads=threads), seconds)
    grpc = public(h2load(folder, "small", 32, 8, seconds, tls=True, threads=threads), seconds)
    return [
        CoreLoad(FrontLoad("TLS, HTTP, 64 bytes", http, 0), sizes.few, "wrk", _WANTED, rehearsed=True),
        CoreLoad(FrontLoad("TLS, gRPC, 64 bytes", grpc, 0), sizes.few, "h2load", _WANTED),
    ]


def measure(part: Part, models: Path, loads: Sequence[CoreLoad], sizes: Sizes, *flags: str) -> None:
    """Run loads on servers with each number of processes."""
    loads = [load for load in loads if part.gpu or load.rehearsed]
    with ExitStack() as stack:
        kind = "tls" if flags else "plain"
        needed = sorted({count for load in loads for count in load.counts})
        servers = {
            count: stack.enter_context(
                nerite(f"cores-{kind}-{count}", models, part.logs, ASLEEP, f"--front-processes={count}", *flags)
            )
            for count in needed
        }
        for load in loads:
            with part.attempt(load.load.name):
                if load.program:
                    need(load.program)
                rates(part, load, servers)
        for load in loads:
            if load.load.message is not None:
                with part.attempt(f"{load.load.name}, latency"):
                    latency(part, load, {count: servers[count] for count in sizes.few}, sizes)


def rates(part: Part, load: CoreLoad, servers: Mapping[int, Contestant]) -> None:
    """Report what each server does at its full rate."""
    unit = "tokens" if load.load.name.startswith("tokens") else "requests"
    found = {count: load.load.run(servers[count]) for count in load.counts}
    for count, (pace, times) in found.items():
        name = f"{load.load.name}, {title(count)}"
        part.figure(name, pace.rate, f"{unit}/s")
        if count > 1:
            wanted = load.wanted if count == _WANTED_OF else None
            part.gpu_figure(f"{name}, over one process", pace.rate / found[1][0].rate, "", wanted)
            part.figure(f"{name}, processor time of all fronts", times.fronts, f"us a {unit[:-1]}")
        part.figure(f"{name}, processor time of the core", times.core, f"us a {unit[:-1]}")
        part.figure(f"{name}, processor time of the client", pace.client, f"us a {unit[:-1]}")


def latency(part: Part, load: CoreLoad, servers: dict[int, Contestant], sizes: Sizes) -> None:
    """Report percentiles at 70 % of what the slowest server does."""
    assert load.load.message is not None
    for count, (rate, p50, p99) in latencies(servers, load.load.message, sizes.seconds, sizes.threads).items():
        name = f"{load.load.name}, {title(count)}, at {rate:,.0f} requests/s"
        part.figure(f"{name}, p50", p50, "ms")
        part.figure(f"{name}, p99", p99, "ms")


def title(count: int) -> str:
    """Return what a server with so many front processes is called."""
    return "one process" if count == 1 else f"{count} fronts"
