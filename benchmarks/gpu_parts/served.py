"""Images and sequences a second through the server, over those of the bare loop in turns with it.

Whole batches: three requests under way, each a batch. Joined rows: as many requests of one row as make three batches,
which the dynamic batcher joins. Two instances, so that one computes while the other's tensors are copied.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from gpu_parts.bare import BareLoop
from gpu_parts.callers import Callers, Protocol
from gpu_parts.device_regions import DeviceRegions
from gpu_parts.part import Part
from gpu_parts.served_nets import MOST, Net, batch, nets
from nerite.client import Client
from nerite.tools.bench.forms import BenchOutput, BenchTensor
from nerite.tools.bench.session import BenchRegions
from serving import Serving

_WHOLE = """
max_batch_size: {most}
backend: "pytorch"
"""
_JOINED = _WHOLE + "dynamic_batching { }\n"
_UNDER_WAY = 3
"""Batches in the server: two compute, the next one is ready when one ends."""
_FLAGS = ("--allow-client-shm=true", f"--http-max-input-size={1 << 28}")
Way = Literal["HTTP", "gRPC", "system shared memory", "CUDA shared memory", "joined over HTTP", "joined over gRPC"]


class Group(NamedTuple):
    """Loads beside one bare loop."""

    net: str
    rows: int
    ways: Sequence[Way]


_ALL: tuple[Way, ...] = ("HTTP", "gRPC", "system shared memory", "CUDA shared memory")
_JOIN: tuple[Way, ...] = ("joined over HTTP", "joined over gRPC")
GROUPS = (
    Group("uint8", 32, (*_ALL, *_JOIN)),
    Group("text", 32, (*_ALL, *_JOIN)),
    Group("fp32", 32, (*_ALL, "joined over HTTP")),
    Group("uint8", 128, _ALL),
    Group("text", 128, _ALL),
    Group("uint8", 8, _ALL),
    Group("text", 8, _ALL),
    Group("fp32", 128, ("HTTP", "system shared memory", "CUDA shared memory")),
    Group("fp32", 8, ("HTTP", "system shared memory")),
    Group("uint8", 1, ("HTTP",)),
    Group("text", 1, ("HTTP", "gRPC")),
)
"""What matters most comes first, as the part may be cut."""
REHEARSED = (Group("uint8", 8, (*_ALL, "joined over HTTP")), Group("text", 8, ("joined over gRPC",)))


def run(part: Part) -> None:
    """Measure all groups."""
    groups = GROUPS if part.gpu else REHEARSED
    found = {name: net for name, net in nets(part.gpu).items() if any(group.net == name for group in groups)}
    writing = (sys.executable, "-m", "gpu_parts.served_nets", part.folder, part.result.kind)
    # Side by side where there are processors for it.
    for job in [part.program(*writing, *names) for names in ([[each] for each in found] if part.gpu else [found])]:
        job.wait()
    models = repository(part, found)
    with ExitStack() as stack:
        loops = {
            name: stack.enter_context(BareLoop(part.folder / f"{name}.pt2", part.result.kind, name)) for name in found
        }
        server = stack.enter_context(part.server(models, *_FLAGS))
        for loop in loops.values():
            loop.rate(1, 0)
        print(f"  models and bare loops are ready {part.left:.0f} s before the limit", flush=True)
        for group in groups:
            with part.attempt(f"{found[group.net].title}, batches of {group.rows}"):
                measure(part, server, loops[group.net], group, found[group.net])


def repository(part: Part, found: dict[str, Net]) -> Path:
    """Write each net as two models, which differ in batching."""
    models = part.folder / "models"
    for name in found:
        for model, config in ((name, _WHOLE), (f"{name}_joined", _JOINED)):
            version = models / model / "1"
            version.mkdir(parents=True)
            (version / "model.pt2").hardlink_to(part.folder / f"{name}.pt2")
            (models / model / "config.pbtxt").write_text(config.replace("{most}", str(MOST)) + part.instances(2))
    return models


def measure(part: Part, server: Serving, loop: BareLoop, group: Group, net: Net) -> None:
    """Let the bare loop and each way take turns."""
    seconds = 1.5 if part.gpu else 0.5
    title = f"{net.title}, batches of {group.rows}"
    bare = [loop.rate(group.rows, seconds / 2)]
    paces = {}
    for way in group.ways:
        with part.attempt(f"{title}, {way}"), callers(part, server, group, net, way) as asking:
            asking.ready()
            joined = way.startswith("joined")
            paces[way] = asking.pace(_UNDER_WAY * (group.rows if joined else 1), seconds)
        bare.append(loop.rate(group.rows, seconds / 3))
    unit = f"{net.rows}/s"
    part.figure(f"{title}, bare loop with copies", statistics.median(bare), unit)
    part.figure(f"{title}, bare loop without copies", loop.rate(group.rows, seconds / 3, copies=False), unit)
    for number, (way, pace) in enumerate(paces.items()):
        rows = pace.rate * (1 if way.startswith("joined") else group.rows)
        wanted = None if group.rows < 8 else ">= 0.9" if way.startswith("joined") else ">= 0.95"
        part.figure(f"{title}, {way}", rows, unit)
        # Of the turns before and after it.
        part.gpu_figure(f"{title}, {way}, over bare", rows / statistics.mean(bare[number : number + 2]), "", wanted)
        part.figure(f"{title}, {way}, p50", pace.p50, "ms")
        part.figure(f"{title}, {way}, p99", pace.p99, "ms")
        part.figure(f"{title}, {way}, busiest client", 100 * pace.client, "% of a processor")


@contextmanager
def callers(part: Part, server: Serving, group: Group, net: Net, way: Way) -> Iterator[Callers]:
    """Have client processes whose tensors are where the way says."""
    joined = way.startswith("joined")
    given = batch(net, 1 if joined else group.rows)
    tensors = [BenchTensor(name, net.inputs[name][0], values.shape, values.tobytes()) for name, values in given.items()]
    size = len(next(iter(given.values()))) * net.columns * 4
    outputs: Sequence[BenchOutput] = [BenchOutput(net.output)]
    protocol: Protocol = "grpc" if "gRPC" in way else "http"
    with ExitStack() as stack:
        if way == "system shared memory":
            regions = stack.enter_context(BenchRegions(stack.enter_context(Client(server.http))))
            tensors, outputs = list(regions.inputs(tensors)), regions.outputs([net.output], size)
        elif way == "CUDA shared memory":
            there = stack.enter_context(DeviceRegions(part, server, "http"))
            tensors, outputs = there.inputs(given), there.outputs({net.output: size})
        model = f"{group.net}_joined" if joined else group.net
        processes = 1 if not part.gpu else 4 if joined else _UNDER_WAY
        yield stack.enter_context(Callers(server, protocol, model, tensors, outputs, processes))
