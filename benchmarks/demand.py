"""200 models in the memory of 20: hit rate beside the ideal LRU, and warm models beside a server that has all loaded.

    python benchmarks/demand.py [--seconds N] [--models N] [--rate N] [--print]

Models of four kinds, most of them ONNX and trees, some Python models in workers, and two language models, are asked for
by a Zipf law, at the same times in all runs. The budget is a tenth of what all models take, as the server itself has
measured them. The ideal LRU sees the same requests and sizes, and loads in no time. Hot models get further requests,
so that their p99 is one of thousands. Loads take processor time from them: so the server that has all loaded is
measured once more beside programs that compute whenever there was a load, for as long as it took of the processor.
``--models 12 --seconds 5`` is a smoke test.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from contestants import ROOT, free_ports, stopped, wait_ready
from page import command_line, machine, publish

sys.path.append(str(ROOT / "tests"))

import tree_models
from llm_models import language_model
from onnx_models import wide_mlp

_SKEW: Final = 1.1
_SHARE: Final = 10
"""The models take this many times the budget."""
_WORKERS: Final = 64
_WARM: Final = 4
"""Number of hot models, without a worker of their own, that are pinned and whose latency is compared."""
_WARM_RATE: Final = 40
"""Requests a second that hot models get besides."""
_PROGRAMS: Final = 4
"""Number of programs that compute in place of loads, of which the server has as many at the same time."""
_PINNED: Final = 'parameters { key: "LOAD_ON_DEMAND" value: { string_value: "pinned" } }\n'
_LOADED: Final = 'nerite_demand_loads_total{outcome="loaded"}'
_LOAD: Final = re.compile(r"loaded '(\w+)' on demand in ([\d.]+) s")
_DISTURBED: Final = "the same, and other programs compute in place of loads"
_PYTHON: Final = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.weights = np.ones(8 << 20, np.uint8)

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
"""
_PYTHON_CONFIG: Final = """backend: "python"
max_batch_size: 8
input [{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]
output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU }]
"""


class DemandedModel(NamedTuple):
    """A model, and the request that it gets."""

    name: str
    kind: str
    path: str
    body: bytes


class Outcome(NamedTuple):
    """What became of a request."""

    model: str
    seconds: float
    status: int


def write_models(repository: Path, count: int) -> list[DemandedModel]:
    """Write models of all kinds, and return them in random order: the first is asked for most."""
    models: list[DemandedModel] = []
    onnx = wide_mlp()[0].SerializeToString()
    forest = tree_models.xgboost("reg:squarederror", "value", trees=400)
    for number in range(count):
        if number < 2:
            models.append(_language_model(repository, f"llm{number}"))
        elif number % 10 < 6:
            folder = repository / f"onnx{number}" / "1"
            folder.mkdir(parents=True)
            (folder / "model.onnx").write_bytes(onnx)
            config = 'backend: "onnxruntime"\nmax_batch_size: 8\ninstance_group [{ count: 1 kind: KIND_CPU }]\n'
            (folder.parent / "config.pbtxt").write_text(config)
            models.append(_tensors(folder.parent.name, "ONNX", "IN", 256))
        elif number % 10 < 8:
            tree_models.place(forest, repository, f"trees{number}")
            models.append(_tensors(f"trees{number}", "trees", "input__0", tree_models.FEATURES))
        else:
            folder = repository / f"python{number}" / "1"
            folder.mkdir(parents=True)
            (folder / "model.py").write_text(_PYTHON)
            (folder.parent / "config.pbtxt").write_text(_PYTHON_CONFIG)
            models.append(_tensors(folder.parent.name, "Python", "INPUT0", 16))
    random.Random(2).shuffle(models)
    return models


def _language_model(repository: Path, name: str) -> DemandedModel:
    language_model(repository / name / "1")
    (repository / name / "config.pbtxt").write_text('backend: "llm"\n')
    body = json.dumps({"model": name, "prompt": "def", "max_tokens": 4}).encode()
    return DemandedModel(name, "LLM", "/v1/completions", body)


def _tensors(name: str, kind: str, tensor: str, size: int) -> DemandedModel:
    data = {"name": tensor, "shape": [1, size], "datatype": "FP32", "data": [0.5] * size}
    return DemandedModel(name, kind, f"/v2/models/{name}/infer", json.dumps({"inputs": [data]}).encode())


def schedule(
    models: Sequence[DemandedModel], rate: float, seconds: float, seed: int
) -> list[tuple[float, DemandedModel]]:
    """Return requests and when they are sent: a Poisson process over a Zipf law."""
    chance = random.Random(seed)
    weights = [1 / rank**_SKEW for rank in range(1, len(models) + 1)]
    at, sent = 0.0, []
    while (at := at + chance.expovariate(rate)) < seconds:
        sent.append((at, chance.choices(models, weights)[0]))
    return sent


_BURSTS: Final = """
import json, sys, time

began = time.monotonic()
for at, seconds in json.loads(sys.argv[1]):
    time.sleep(max(began + at - time.monotonic(), 0))
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
"""
"""Computes at given times, for so many seconds each."""


@contextmanager
def computing(bursts: Sequence[tuple[float, float]]) -> Iterator[None]:
    """Run programs that take processor time at given times, each for so many seconds; several at once if need be."""
    free, shares = [0.0] * _PROGRAMS, [list[tuple[float, float]]() for _ in range(_PROGRAMS)]
    for at, seconds in sorted(bursts):
        first = free.index(min(free))
        free[first] = max(free[first], at) + seconds
        shares[first].append((at, seconds))
    programs = [subprocess.Popen([sys.executable, "-c", _BURSTS, json.dumps(share)]) for share in shares]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@contextmanager
def noted_loads(log: Path) -> Iterator[list[tuple[float, str]]]:
    """Follow the log of a server, and list the time of each load from the beginning of the block, and its model."""
    loads: list[tuple[float, str]] = []
    began, over = time.monotonic(), threading.Event()

    def follow() -> None:
        with log.open() as lines:
            lines.seek(0, os.SEEK_END)
            while not over.wait(0.01):
                now = time.monotonic() - began
                loads.extend((now - float(took), model) for model, took in _LOAD.findall(lines.read()))

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        yield loads
    finally:
        over.set()
        follower.join()


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, ended ones included."""
    parents, times = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
        times[int(folder.name)] = sum(map(int, fields[11:15]))
    family = {pid}
    while found := {each for each, parent in parents.items() if parent in family} - family:
        family |= found
    return sum(times[each] for each in family) / os.sysconf("SC_CLK_TCK")


class DemandServer(NamedTuple):
    """A server that runs."""

    pid: int
    http: int
    metrics: int
    log: Path

    def ask(self, model: DemandedModel, connection: http.client.HTTPConnection) -> int:
        """Send the request of a model; return the status."""
        connection.request("POST", model.path, model.body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            print(f"{model.name}: {answer.status} {body[:500].decode(errors='replace')}", file=sys.stderr)
        return answer.status

    def figures(self) -> dict[str, float]:
        """Return the samples of the metrics page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@contextmanager
def started(repository: Path, *flags: str) -> Iterator[DemandServer]:
    """Run a server that keeps its measurements beside the repository."""
    ports = free_ports()
    options = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    nerite = [sys.executable, str(Path(sys.executable).with_name("nerite")), "serve"]
    log = repository.parent / "server.log"
    environment = {**os.environ, "XDG_STATE_HOME": str(repository.parent)}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*nerite, str(repository), *options, *flags], stdout=sink, stderr=sink, env=environment
        )
    with stopped(process):
        wait_ready(ports[0], process, log)
        yield DemandServer(process.pid, ports[0], ports[2], log)


def send(server: DemandServer, sent: Sequence[tuple[float, DemandedModel]]) -> list[Outcome]:
    """Send requests at their times, whatever becomes of those before; return what became of each."""
    outcomes: list[Outcome] = []
    jobs: queue.SimpleQueue[tuple[float, DemandedModel] | None] = queue.SimpleQueue()

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=180)
        while (job := jobs.get()) is not None:
            try:
                status = server.ask(job[1], connection)
            except OSError as error:
                print(f"{job[1].name}: {error!r}", file=sys.stderr)
                status = 0
                connection.close()
            outcomes.append(Outcome(job[1].name, time.monotonic() - job[0], status))
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(_WORKERS)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    for at, model in sent:
        time.sleep(max(began + at - time.monotonic(), 0))
        jobs.put((began + at, model))
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        thread.join()
    return outcomes


def measure(repository: Path, models: Sequence[DemandedModel]) -> tuple[dict[str, int], dict[str, float]]:
    """Have the server load every model once; return what each takes of the memory and, in seconds, of the processor."""
    costs: dict[str, float] = {}
    with started(repository, "--model-control-mode=demand", "--model-load-thread-count=1") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=180)
        for number, model in enumerate(models):
            before = processor_seconds(server.pid)
            assert server.ask(model, connection) == 200, model.name
            while server.figures()[_LOADED] <= number:
                time.sleep(0.01)  # it is still being measured
            costs[model.name] = processor_seconds(server.pid) - before
        connection.close()
    (file,) = (repository.parent / "nerite" / "memory").glob("*.json")
    sizes = {name: sizes["host"] for name, (_, sizes, _) in json.loads(file.read_bytes())["models"].items()}
    return sizes, costs


def ideal_hits(
    first: Sequence[tuple[float, DemandedModel]],
    sent: Sequence[tuple[float, DemandedModel]],
    sizes: Mapping[str, int],
    pinned: Set[str],
    budget: int,
) -> int:
    """Return how many requests find their model in the memory of an LRU that loads and evicts in no time.

    ``first`` are the requests of the warm-up, which do not count.
    """
    memory: OrderedDict[str, int] = OrderedDict()
    hits = 0
    budget -= sum(sizes[name] for name in pinned)
    for number, (_, model) in enumerate([*first, *sent]):
        if model.name in pinned:
            hits += number >= len(first)
            continue
        if model.name in memory:
            memory.move_to_end(model.name)
            hits += number >= len(first)
            continue
        while memory and sum(memory.values()) + sizes[model.name] > budget:
            memory.popitem(last=False)
        memory[model.name] = sizes[model.name]
    return hits


def quantiles(outcomes: Sequence[Outcome], names: Set[str]) -> tuple[float, float]:
    """Return median and 99th percentile of the answers of some models, in milliseconds."""
    took = [each.seconds * 1000 for each in outcomes if each.model in names]
    return float(np.quantile(took, 0.5)), float(np.quantile(took, 0.99))


def report(count: int, rate: float, seconds: float) -> str:
    """Measure, and return the section."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        models = write_models(repository, count)
        warm = {model.name for model in [each for each in models if each.kind in ("ONNX", "trees")][:_WARM]}
        for name in warm:
            with (repository / name / "config.pbtxt").open("a") as config:
                config.write(_PINNED)
        sizes, costs = measure(repository, models)
        budget = max(sum(sizes.values()) // _SHARE, 2 * max(sizes.values()))
        sent = schedule(models, rate, seconds, 3)
        first = schedule(models, rate, min(seconds, 20), 4)
        besides = schedule([model for model in models if model.name in warm], _WARM_RATE, seconds, 5)
        everything = sorted([*sent, *besides], key=lambda each: each[0])
        with started(repository, "--model-control-mode=demand", f"--demand-host-memory={budget}") as server:
            send(server, first)
            before, took = server.figures(), -processor_seconds(server.pid)
            with noted_loads(server.log) as loads:
                outcomes = send(server, everything)
            after, took = server.figures(), took + processor_seconds(server.pid)
        with started(repository) as server:
            send(server, first)
            took += processor_seconds(server.pid)
            loaded = send(server, everything)
            took -= processor_seconds(server.pid)
            # What evictions take is not among the costs of a single load.
            scale = took / max(sum(costs[model] for _, model in loads), 0.01)
            with computing([(max(at, 0.0), costs[model] * scale) for at, model in loads]):
                disturbed = send(server, everything)
    print(f"{len(loads)} loads took {took:.1f} s of the processor", file=sys.stderr)
    return _tables(
        models,
        sizes,
        budget,
        ideal_hits(first, sent, sizes, warm, budget),
        sent,
        outcomes,
        {"all models loaded at start": loaded, _DISTURBED: disturbed},
        before,
        after,
        warm,
    )


def _tables(
    models: Sequence[DemandedModel],
    sizes: Mapping[str, int],
    budget: int,
    ideal: int,
    sent: Sequence[tuple[float, DemandedModel]],
    outcomes: Sequence[Outcome],
    others: Mapping[str, Sequence[Outcome]],
    before: Mapping[str, float],
    after: Mapping[str, float],
    warm: Set[str],
) -> str:
    def grown(name: str) -> int:
        return int(after[name] - before.get(name, 0))

    loads = grown(_LOADED)
    evictions = grown('nerite_demand_evictions_total{reason="memory"}')
    drained = grown('nerite_demand_evictions_total{reason="drained"}')
    waits = grown("nerite_demand_waits_total")
    kinds: dict[str, list[int]] = {}
    for model in models:
        kinds.setdefault(model.kind, []).append(sizes[model.name])
    described = ", ".join(
        f"{len(found)} {kind} of {np.median(found) / 2**20:.0f} MiB" for kind, found in sorted(kinds.items())
    )
    failed = sum(each.status != 200 for each in outcomes)
    used = after['nerite_memory_used_bytes{place="host"}']
    waited = [each.seconds for each in outcomes if each.model not in warm]
    hot = sum(each.model in warm for each in outcomes)
    lines = [
        f"{len(sent):,} requests to {len(models)} models in {sent[-1][0]:.0f} s, and {_WARM_RATE} a second besides to "
        f"hot ones; {machine()}.\n",
        "| | |",
        "|---|---|",
        f"| models | {described}; {sum(sizes.values()) / 2**20:.0f} MiB in all |",
        f"| budget; used at the end | {budget / 2**20:.0f} MiB; {used / 2**20:.0f} MiB |",
        f"| requests that failed | {failed} |",
        f"| loads | {loads}: {loads / len(sent):.1%} of the requests |",
        f"| requests that found their model in memory | {1 - waits / len(sent):.1%} |",
        f"| requests without a load of their own; ideal LRU | {1 - loads / len(sent):.1%}; {ideal / len(sent):.1%} |",
        f"| evictions of idle models; of models that were busy | {evictions}; {drained} |",
        f"| p99 of models that are not always in memory | {np.quantile(waited, 0.99):.2f} s |",
        "",
        f"| {len(warm)} hot models, pinned: {hot:,} requests | median | p99 |",
        "|---|---|---|",
    ]
    for what, found in {"other models come and go": outcomes, **others}.items():
        median, late = quantiles(found, warm)
        lines.append(f"| {what} | {median:.2f} ms | {late:.2f} ms |")
    return "\n".join(lines) + "\n"


def main(about: str | None) -> None:
    """Read the command line, measure, and write or print the section."""
    flags = command_line(about, 120.0, 1)
    flags.add_argument("--models", type=int, default=200, help="number of models (default: %(default)s)")
    flags.add_argument("--rate", type=float, default=10.0, help="requests a second (default: %(default)g)")
    given: Any = flags.parse_args()
    publish("demand", report(given.models, given.rate, given.seconds), given)


if __name__ == "__main__":
    main(__doc__)
