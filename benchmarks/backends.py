"""Frameworks under saturation: rows a second through the server, beside a bare loop of the same framework.

For each cell (a framework, a model, a batch size) the server gets more requests than it can do, of two kinds:

- ``whole``:  each request carries a batch;
- ``joined``: each request carries one row, and the dynamic batcher makes the batches.

The bare loop runs in a process of its own, with as many threads as the one instance has, on a batch that is ready, its
results thrown away. Loop and server take turns; a ratio is of medians. The load is ``wrk``, over HTTP
with binary tensors.

A framework takes part with a ``Contestant``: how a model is written, and what its loop is.

    python benchmarks/backends.py [--seconds S] [--rounds N] [--only CONTESTANT ...] [--print]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from contestants import nerite
from loads import need, write_http, wrk
from page import machine, write
from torch_models import EAGER, EXPORTED, SCRIPTED, WRITE


class Contestant(NamedTuple):
    """A kind of model, as a framework serves it."""

    write: str
    """A program that writes a version: it is given the name of the model, the folder, and the largest batch."""
    bare: str
    """A program that defines ``call(rows)``, given what ``write`` was given. Threads: one."""
    config: str
    """Of the model, besides batches, instances and, if ``complete``, its tensors."""
    complete: bool = False
    """Inputs and outputs are in ``config``, which is formatted with ``row``."""


class Model(NamedTuple):
    """What every contestant computes in its own way."""

    row: tuple[int, ...]
    """Shape of one row of its input, X, of FP32; its output is OUT."""
    batches: Sequence[int]


MODELS = {
    "cnn": Model((3, 32, 32), (1, 8, 32)),
    "encoder": Model((64, 768), (1, 8)),
}
"""``cnn``: two convolutions over 32 x 32 colour images. ``encoder``: a block of BERT's size over 64 tokens."""

_TENSORS = """
input {{ name: "X" data_type: TYPE_FP32 dims: [ {row} ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
"""
_ONE_THREAD = """
parameters {{ key: "INTRA_OP_THREAD_COUNT" value: {{ string_value: "1" }} }}
"""
CONTESTANTS = {
    "pytorch, exported": Contestant(WRITE + EXPORTED.write, EXPORTED.bare, 'backend: "pytorch"' + _ONE_THREAD),
    "pytorch, TorchScript": Contestant(
        WRITE + SCRIPTED.write, SCRIPTED.bare, 'backend: "pytorch"' + _ONE_THREAD + _TENSORS
    ),
    "pytorch, Python": Contestant(WRITE + EAGER.write, EAGER.bare, 'backend: "pytorch"' + _ONE_THREAD + _TENSORS),
}
_SERVED = """
max_batch_size: {batch}
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""
_LOOP = """
import time
import numpy as np

batch, shape, seconds = int(sys.argv[3]), [int(size) for size in sys.argv[4].split(",")], float(sys.argv[5])
rows = np.random.default_rng(1).random([batch, *shape], dtype=np.float32)
for _ in range(5):
    call(rows)
calls, began = 0, time.perf_counter()
while time.perf_counter() - began < seconds:
    call(rows)
    calls += 1
print(calls * batch / (time.perf_counter() - began))
"""


class Rates(NamedTuple):
    """Medians, in rows a second."""

    contestant: str
    model: str
    batch: int
    bare: float
    whole: float
    joined: float


def _run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", "-c", "import sys\n" + program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


def measure(name: str, model: str, batch: int, folder: Path, seconds: float, rounds: int) -> Rates:
    """Serve one model, and let the loop and the two kinds of requests take turns."""
    contestant, row = CONTESTANTS[name], MODELS[model].row
    shape = ",".join(map(str, row))
    version = folder / "models" / "m" / "1"
    version.mkdir(parents=True)
    _run(contestant.write, model, version, batch)
    config = (contestant.config + _SERVED).format(batch=batch, row=shape)
    (version.parent / "config.pbtxt").write_text(config)
    rows = np.random.default_rng(1).random((batch, *row), dtype=np.float32)
    write_http(folder, "whole", ("X", list(rows.shape), rows.tobytes()), "OUT")
    write_http(folder, "joined", ("X", [1, *row], rows[:1].tobytes()), "OUT")
    rates: dict[str, list[float]] = {"bare": [], "whole": [], "joined": []}
    with nerite("Nerite", version.parents[1], folder) as server:
        # Two or three batches in the server at any time: one computes, the next is ready when it ends.
        whole = wrk(folder, "whole", 3, seconds, "m")
        joined = wrk(folder, "joined", 3 * batch, seconds, "m")
        for _ in range(rounds):
            rates["bare"].append(float(_run(contestant.bare + _LOOP, model, version, batch, shape, seconds)))
            rates["whole"].append(whole(server).rate * batch)
            rates["joined"].append(joined(server).rate)
    return Rates(name, model, batch, *(statistics.median(rates[kind]) for kind in ("bare", "whole", "joined")))


def table(found: list[Rates]) -> str:
    """Return the table."""
    lines = [
        "| framework | model | batch | bare loop, rows/s | whole batches | ratio | joined rows | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, model, batch, bare, whole, joined in found:
        cells = f"{whole:,.0f} | **{whole / bare:.2f}** | {joined:,.0f} | **{joined / bare:.2f}**"
        lines.append(f"| {name} | {model} | {batch} | {bare:,.0f} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="one run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, help="just these contestants")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="just these models")
    parser.add_argument("--print", action="store_true", help="print the table and leave the page alone")
    arguments = parser.parse_args()
    need("wrk")
    found = []
    for name in arguments.only or CONTESTANTS:
        for model in arguments.models:
            for batch in MODELS[model].batches:
                with tempfile.TemporaryDirectory() as directory:
                    found.append(measure(name, model, batch, Path(directory), arguments.seconds, arguments.rounds))
                print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    text = f"Measured on {machine()}; {arguments.rounds} rounds of {arguments.seconds:g} s.\n\n{table(found)}"
    if arguments.print:
        print(text)
    else:
        write("backends", text)


if __name__ == "__main__":
    main()
