"""The loads of fronts.py, the models that they ask, and the processor time of a server by kind of process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

from before import family
from contestants import ROOT, Contestant, identity_repository
from loads import SMALL, Load, h2load, write_bodies, wrk
from token_streams import MODEL

sys.path.insert(0, str(ROOT / "src"))

from nerite.client.connection import Address
from nerite.tools.bench.forms import RoundRobin
from nerite.tools.bench.measurement import BenchPlan, BenchTarget, LoadLevel, Records
from nerite.tools.bench.session import Fleet

STAND_IN = ROOT / "tests" / "stand_ins" / "vllm"
_ENGINE = {"model": "m", "mortal": False, "max_model_len": 1000, "max_num_seqs": 4096, "num_gpu_blocks_override": 2**18}
_LATENCY_AT = 0.7
"""Of what the same client gets of the slowest server with ``_CONCURRENCY`` requests at a time."""
_CONCURRENCY = 32
_WARM_UP = 0.5
Noted = TypeVar("Noted")
_TICK = os.sysconf("SC_CLK_TCK")


class Times(NamedTuple):
    """Processor time of a server's processes, in seconds, or microseconds a request; and how often they slept."""

    core: float = 0.0
    fronts: float = 0.0
    others: float = 0.0
    """Workers, their fork server, helpers."""
    core_sleeps: float = 0.0
    """Number of times that it waited and was awakened, or that number for a request."""
    fronts_sleeps: float = 0.0
    others_sleeps: float = 0.0

    def per(self, before: Times, count: float) -> Times:
        """Return the figures for a request since ``before``."""
        units = (1e6, 1e6, 1e6, 1.0, 1.0, 1.0)
        changes = (now - then for now, then in zip(self, before, strict=True))
        return Times(*(change / count * unit for change, unit in zip(changes, units, strict=True)))


class Pace(NamedTuple):
    """One run of a load."""

    rate: float
    """Requests, or tokens, a second."""
    client: float
    """Microseconds of processor time of the client for one."""
    at: float = 0.0
    """Requests a second with which latency was measured; 0 for the full rate."""
    p50: float = 0.0
    """Milliseconds."""
    p99: float = 0.0


class FrontLoad(NamedTuple):
    """A load."""

    name: str
    run: Callable[[Contestant], tuple[Pace, Times]]
    """Returns the pace, and the processor times of the server for one request."""
    target: float
    """What the core is to take at the most, in proportion to a single process; 0 for no target."""
    message: tuple[str, bytes] | None = None
    """Protocol and request of the open loop."""


def spent(server: Contestant) -> Times:
    """Return the seconds of processor time that the processes of a server have used, and how often they slept."""
    totals = dict.fromkeys(Times._fields, 0.0)
    of_fronts = front_processes(server)
    for process in family(server.process.pid):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        kind = "core" if process == server.process.pid else "fronts" if process in of_fronts else "others"
        totals[kind] += (int(fields[11]) + int(fields[12])) / _TICK
        totals[f"{kind}_sleeps"] += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return Times(**totals)


def front_processes(server: Contestant) -> list[int]:
    """Return the front processes of a server, by their names."""
    found = {}
    for process in family(server.process.pid):
        try:
            name = Path(f"/proc/{process}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("front_"):
            found[name] = process
    return [found[name] for name in sorted(found)]


def repository(folder: Path) -> Path:
    """Write the models: identities in a worker and in the core, and the stand-in of a language model."""
    models = identity_repository(folder)
    (identity_repository(folder / "in process", in_process=True) / "identity").rename(models / "inside")
    config = models / "inside" / "config.pbtxt"
    config.write_text(config.read_text().replace('"identity"', '"inside"'))
    version = models / MODEL / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps(_ENGINE))
    (models / MODEL / "config.pbtxt").write_text('backend: "vllm" instance_group [{ kind: KIND_CPU }]')
    places = (str(STAND_IN), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    return models


def write_requests(folder: Path) -> None:
    """Write what wrk and h2load post."""
    (folder / "inside").mkdir(exist_ok=True)
    write_bodies(folder / "inside", "inside")
    write_bodies(folder)
    tensor = {"name": "INPUT0", "shape": [1, SMALL], "datatype": "FP32", "data": [1.0] * SMALL}
    (folder / "json.http").write_text(json.dumps({"inputs": [tensor]}))
    (folder / "json.lua").write_text(
        f'local file = io.open("{folder}/json.http", "rb")\n'
        'wrk.body = file:read("*a")\nfile:close()\nwrk.method = "POST"\n'
        'wrk.headers["Content-Type"] = "application/json"\n'
    )


def http_message(folder: Path, body: str, model: str) -> bytes:
    """Return the request as wrk sends it."""
    content = (folder / f"{body}.http").read_bytes()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    if body != "json":
        head += f"Inference-Header-Content-Length: {content.index(b'}]}') + 3}\r\n"
    return f"{head}\r\n".encode() + content


def public(load: Load, seconds: float) -> Callable[[Contestant], tuple[Pace, Times]]:
    """Return the run of a public generator."""

    def run(server: Contestant) -> tuple[Pace, Times]:
        before = spent(server)
        found = load(server)
        return Pace(found.rate, found.client * 1e6), spent(server).per(before, found.rate * seconds)

    return run


def tokens(
    protocol: str, streams: int, seconds: float, processes: int = 1
) -> Callable[[Contestant], tuple[Pace, Times]]:
    """Return the run of streams of tokens, which so many client processes read."""

    def run(server: Contestant) -> tuple[Pace, Times]:
        port = server.grpc if protocol == "grpc" else server.http
        command = ["token_streams.py", protocol, port, streams // processes, seconds]
        before, after, said = warmed([command] * processes, lambda: spent(server))
        count = sum(each["parts"] for each in said)
        rate = sum(each["parts"] / each["seconds"] for each in said)
        client = sum(each["client"] * each["parts"] for each in said) / count
        p50, p99 = (max(each[name] for each in said) for name in ("p50", "p99"))
        return Pace(rate, client * 1e6, p50=p50, p99=p99), after.per(before, count)

    return run


def warmed(
    commands: Sequence[Sequence[object]], note: Callable[[], Noted]
) -> tuple[Noted, Noted, list[dict[str, float]]]:
    """Run clients of this folder.

    Returns what there was to note when all were warm, what there was after them, and what each says.
    """
    with ExitStack() as stack:
        clients = []
        for program, *arguments in commands:
            line = [sys.executable, str(ROOT / "benchmarks" / str(program)), *map(str, arguments)]
            clients.append(stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True)))
        _lines(clients)
        before = note()
        said = _lines(clients)
        after = note()
    if any(client.returncode for client in clients):
        raise RuntimeError(f"{commands[0][0]} has failed")
    return before, after, [json.loads(line) for line in said]


def _lines(clients: Sequence[subprocess.Popen[str]]) -> list[str]:
    return [client.stdout.readline() for client in clients if client.stdout is not None]


def tls_flags(certificate: Path) -> list[str]:
    """Return the flags of a server that uses TLS, with a file that has its key as well."""
    flags = []
    for port in ("http", "grpc"):
        flags += [f"--{port}-use-ssl=true"]
        flags += [f"--{port}-server-{what}={certificate}" for what in ("cert", "key")]
    return flags


def loads(folder: Path, seconds: int, streams: Sequence[int], *, tls: bool = False) -> list[FrontLoad]:
    """Return all loads; with ``tls`` those of models that are no language models."""

    def http(name: str, body: str, connections: int, target: float, model: str = "identity") -> FrontLoad:
        run = public(wrk(folder, body, connections, seconds, model, tls=tls), seconds)
        return FrontLoad(name, run, target, ("http", http_message(folder, body, model)))

    def grpc(name: str, size: str, calls: int, target: float, model: str = "identity") -> FrontLoad:
        at = folder if model == "identity" else folder / model
        run = public(h2load(at, size, 8, calls, seconds, tls=tls), seconds)
        return FrontLoad(name, run, target, ("grpc", (at / f"{size}.grpc").read_bytes()))

    found = [
        http("HTTP, binary, 64 bytes, 32 connections", "small", 32, 0.45),
        http("HTTP, JSON, 16 numbers, 32 connections", "json", 32, 0.25),
        grpc("gRPC, 64 bytes, 8 connections x 8", "small", 8, 0.45),
        http("HTTP, binary, 602 KB, 16 connections", "large", 16, 0.0),
        grpc("gRPC, 602 KB, 8 connections x 2", "large", 2, 0.0),
        http("in the core: HTTP, binary, 64 bytes, 32 connections", "small", 32, 0.0, "inside"),
        grpc("in the core: gRPC, 64 bytes, 8 connections x 8", "small", 8, 0.0, "inside"),
    ]
    if tls:
        return found
    for protocol, title in (("grpc", "ModelStreamInfer"), ("chat", "/v1/chat")):
        found += [FrontLoad(f"tokens, {title}, {count} streams", tokens(protocol, count, seconds), 0.0)
                  for count in streams]  # fmt: skip
    return found


def latencies(
    servers: dict[int, Contestant], message: tuple[str, bytes], seconds: float, processes: int = 1
) -> dict[int, tuple[float, float, float]]:
    """Return, by server, a rate that all can keep, and p50 and p99 in milliseconds with it.

    ``processes``: of the client.
    """
    protocol, content = message
    plans = {}
    for count, server in servers.items():
        port = server.http if protocol == "http" else server.grpc
        target = BenchTarget("http" if protocol == "http" else "grpc", Address.parse(f"127.0.0.1:{port}"))
        plans[count] = BenchPlan(target, RoundRobin((content,)))
    closed = LoadLevel(concurrency=_CONCURRENCY)
    capacities = [len(_records(plan, closed, seconds, processes).ended) / seconds for plan in plans.values()]
    rate = _LATENCY_AT * min(capacities)
    found = {}
    for count, plan in plans.items():
        records = _records(plan, LoadLevel(rate=rate, arrivals="poisson"), seconds, processes)
        percentiles = statistics.quantiles(records.latency.tolist(), n=100)
        found[count] = (rate, percentiles[49] * 1000, percentiles[98] * 1000)
    return found


def _records(plan: BenchPlan, level: LoadLevel, seconds: float, processes: int) -> Records:
    """Return what came in ``seconds`` of a load."""
    with Fleet(plan, processes) as fleet:
        fleet.begin(level)
        time.sleep(_WARM_UP)
        fleet.take()
        time.sleep(seconds)
        records = fleet.take().records
        fleet.end()
    if records.reasons:
        raise RuntimeError(records.reasons[0])
    return records
