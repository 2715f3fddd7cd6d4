"""ONNX models under saturation: rows a second through the server, beside a bare loop of ONNX Runtime or OpenVINO.

For each model and batch size the server gets more requests than it can do, of two kinds:

- ``whole``:  each request carries a batch;
- ``joined``: each request carries one row, and the dynamic batcher makes the batches.

The bare loop runs in a process of its own, with a model opened with the same options (one thread, as one instance has),
on a batch that is ready, its results thrown away. Loop and server take turns; a ratio is of medians. The server's loop
and the load, ``wrk`` over HTTP with binary tensors, have the other processor.

    python benchmarks/onnx_served.py [--backend NAME] [--seconds S] [--rounds N] [--only MODEL ...] [--print]
"""

from __future__ import annotations

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
from page import command_line, machine, publish

from onnx_models import cnn, mlp, resnet

_CONFIG = """
backend: "{backend}"
max_batch_size: {batch}
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""
_ONE = 'parameters {{ key: "{}" value {{ string_value: "1" }} }}\n'
_LOOP = """
batch = int(sys.argv[2])
rows = np.random.default_rng(1).random([batch, *map(int, sys.argv[4:])], dtype=np.float32)
prepare(rows)
for _ in range(3):
    run()
calls, began = 0, time.perf_counter()
while time.perf_counter() - began < float(sys.argv[3]):
    run()
    calls += 1
print(calls * batch / (time.perf_counter() - began))
"""
_ONNX_RUNTIME = """
import sys, time
import numpy as np
from onnxruntime import InferenceSession, SessionOptions

options = SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
feeds = {}
def prepare(rows): feeds["IN"] = rows
def run(): session.run(None, feeds)
"""
_OPENVINO = """
import sys, time
import numpy as np
from nerite.frameworks.openvino.graph import openvino

ov = openvino()
options = {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": "1", "ENABLE_CPU_PINNING": "NO"}
request = ov.Core().compile_model(sys.argv[1], "CPU", options).create_infer_request()
kept = []
def prepare(rows): kept.append(ov.Tensor(rows)); request.set_input_tensor(0, kept[0])
def run(): request.infer(share_outputs=True)
"""


class Framework(NamedTuple):
    """What serves the models."""

    options: str
    """Of the configuration: one thread."""
    loop: str


FRAMEWORKS = {
    "onnxruntime": Framework(
        _ONE.format("intra_op_thread_count") + _ONE.format("inter_op_thread_count"), _ONNX_RUNTIME + _LOOP
    ),
    "openvino": Framework(_ONE.format("INFERENCE_NUM_THREADS"), _OPENVINO + _LOOP),
}


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


def _bare(loop: str, path: Path, batch: int, dims: list[int], seconds: float) -> float:
    command = [sys.executable, "-c", loop, str(path), str(batch), str(seconds), *map(str, dims)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(backend: str, shape: Shape, folder: Path, seconds: float, rounds: int) -> Rates:
    """Serve one model, and let the loop and the two kinds of requests take turns."""
    proto, dims = MODELS[shape.model]()
    model = folder / "models" / "m"
    (model / "1").mkdir(parents=True)
    path = model / "1" / "model.onnx"
    onnx.save(proto, path)
    framework = FRAMEWORKS[backend]
    (model / "config.pbtxt").write_text(_CONFIG.format(backend=backend, batch=shape.batch) + framework.options)
    rows = np.random.default_rng(1).random((shape.batch, *dims), dtype=np.float32)
    write_http(folder, "whole", ("IN", list(rows.shape), rows.tobytes()), "OUT")
    write_http(folder, "joined", ("IN", [1, *dims], rows[:1].tobytes()), "OUT")
    rates: dict[str, list[float]] = {"bare": [], "whole": [], "joined": []}
    with nerite("Nerite", model.parent, folder) as server:
        # Two or three batches in the server at any time: one computes, the next is ready when it ends.
        whole = wrk(folder, "whole", 3, seconds, "m")
        joined = wrk(folder, "joined", 3 * shape.batch, seconds, "m")
        for _ in range(rounds):
            rates["bare"].append(_bare(framework.loop, path, shape.batch, dims, seconds))
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
    parser = command_line("ONNX models under saturation, beside a bare loop", 2.0, 3)
    parser.add_argument(
        "--backend", choices=FRAMEWORKS, default="onnxruntime", help="what computes (onnxruntime); others are printed"
    )
    parser.add_argument("--only", nargs="*", choices=MODELS, help="just these models")
    arguments = parser.parse_args()
    need("wrk")
    intro = f"Measured on {machine()}; {arguments.rounds} rounds of {arguments.seconds:g} s.\n\n"
    found = []
    for shape in SHAPES:
        if arguments.only and shape.model not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as directory:
            found.append(measure(arguments.backend, shape, Path(directory), arguments.seconds, arguments.rounds))
        print(table(found[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    arguments.print |= arguments.backend != "onnxruntime"
    publish("onnx", intro + table(found), arguments)


if __name__ == "__main__":
    main()
