"""ONNX models under saturation: rows a second through the server, beside a bare ``session.run`` loop.

For each model and batch size the server gets more requests than it can do, of two kinds:

- ``whole``:  each request carries a batch;
- ``joined``: each request carries one row, and the dynamic batcher makes the batches.

The bare loop runs in a process of its own, with a session opened with the same options (one thread, as one instance
with ``intra_op_thread_count: 1``), on a batch that is ready, its results thrown away. Loop and server take turns; a
ratio is of medians. The server's loop and the load, ``wrk`` over HTTP with binary tensors, have the other processor.

    python benchmarks/onnx_served.py [--seconds S] [--rounds N] [--only MODEL ...] [--print]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from contestants import nerite
from loads import need, write_http, wrk
from onnx_models import cnn, mlp, resnet
from page import machine, write

_CONFIG = """
backend: "onnxruntime"
max_batch_size: {batch}
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
instance_group [{{ kind: KIND_CPU count: 1 }}]
parameters {{ key: "intra_op_thread_count" value: {{ string_value: "1" }} }}
parameters {{ key: "inter_op_thread_count" value: {{ string_value: "1" }} }}
"""
_BARE = """
import sys, time
import numpy as np
from onnxruntime import InferenceSession, SessionOptions

options = SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
batch = int(sys.argv[2])
shape = [batch, *session.get_inputs()[0].shape[1:]]
rows = np.random.default_rng(1).random(shape, dtype=np.float32)
for _ in range(3):
    session.run(None, {"IN": rows})
calls, began = 0, time.perf_counter()
while time.perf_counter() - began < float(sys.argv[3]):
    session.run(None, {"IN": rows})
    calls += 1
print(calls * batch / (time.perf_counter() - began))
"""


class Shape(NamedTuple):
    """One row of the table before it is measured."""

    model: str
    batch: int


class Rates(NamedTuple):
    """Medians, in rows a second."""

    shape: Shape
    bare: float
    whole: float
    joined: float


MODELS = {"mlp": mlp, "cnn": cnn, "resnet": resnet}
SHAPES = [
    *(Shape("mlp", batch) for batch in (1, 8, 32)),
    *(Shape("cnn", batch) for batch in (1, 8, 32)),
    *(Shape("resnet", batch) for batch in (1, 8)),
]


def _bare(path: Path, batch: int, seconds: float) -> float:
    command = [sys.executable, "-c", _BARE, str(path), str(batch), str(seconds)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(shape: Shape, folder: Path, seconds: float, rounds: int) -> Rates:
    """Serve one model, and let the loop and the two kinds of requests take turns."""
    proto, dims = MODELS[shape.model]()
    model = folder / "models" / "m"
    (model / "1").mkdir(parents=True)
    path = model / "1" / "model.onnx"
    onnx.save(proto, path)
    (model / "config.pbtxt").write_text(_CONFIG.format(batch=shape.batch))
    rows = np.random.default_rng(1).random((shape.batch, *dims), dtype=np.float32)
    write_http(folder, "whole", ("IN", list(rows.shape), rows.tobytes()), "OUT")
    write_http(folder, "joined", ("IN", [1, *dims], rows[:1].tobytes()), "OUT")
    rates: dict[str, list[float]] = {"bare": [], "whole": [], "joined": []}
    with nerite("Nerite", model.parent, folder) as server:
        # Two or three batches in the server at any time: one computes, the next is ready when it ends.
        whole = wrk(folder, "whole", 3, seconds, "m")
        joined = wrk(folder, "joined", 3 * shape.batch, seconds, "m")
        for _ in range(rounds):
            rates["bare"].append(_bare(path, shape.batch, seconds))
            rates["whole"].append(whole(server).rate * shape.batch)
            rates["joined"].append(joined(server).rate)
    return Rates(shape, *(statistics.median(rates[name]) for name in ("bare", "whole", "joined")))


def table(found: list[Rates]) -> str:
    """Return the table."""
    lines = [
        "| model | batch | bare loop, rows/s | whole batches | ratio | joined rows | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for (model, batch), bare, whole, joined in found:
        cells = f"{whole:,.0f} | **{whole / bare:.2f}** | {joined:,.0f} | **{joined / bare:.2f}**"
        lines.append(f"| {model} | {batch} | {bare:,.0f} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="ONNX models under saturation, beside a bare session.run loop")
    parser.add_argument("--seconds", type=float, default=2.0, help="one run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--only", nargs="*", choices=MODELS, help="just these models")
    parser.add_argument("--print", action="store_true", help="print the table and leave the page alone")
    arguments = parser.parse_args()
    need("wrk")
    intro = f"Measured on {machine()}; {arguments.rounds} rounds of {arguments.seconds:g} s.\n\n"
    found = []
    for shape in SHAPES:
        if arguments.only and shape.model not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as directory:
            found.append(measure(shape, Path(directory), arguments.seconds, arguments.rounds))
        print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if arguments.print:
        print(table(found))
    else:
        write("onnx", intro + table(found))


if __name__ == "__main__":
    main()
