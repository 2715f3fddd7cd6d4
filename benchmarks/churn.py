"""What is left of models that came and went: memory and descriptors over thousands of loads, good and bad.

Each cycle loads a model, asks it, and unloads it; every kind in turn. Some loads fail, as they must. Another model
serves all the while, and is asked without a pause from another thread: every one of its answers is checked.

    python benchmarks/churn.py [--cycles N] [--only KIND ...] [--print]
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
from contestants import Contestant, nerite
from footprint import descendants, resident
from onnx import TensorProto, helper
from page import machine, write

LOOKS = 10
"""How often memory and descriptors are read."""
CONFIG: dict[str, Any] = {
    "backend": "python",
    "max_batch_size": 8,
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]}],
}
INSIDE = {"EXECUTION_MODE": {"string_value": "in_process"}}
DOUBLE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.weights = np.ones(250_000, np.float32)

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy() * 2)])
            for request in requests
        ]
"""
DOUBLE_IN_TORCH = """
import sys, torch
from torch import Tensor


class Double(torch.nn.Module):
    def forward(self, X: Tensor):
        return {"Y": X * 2}


path, rows = sys.argv[1], torch.zeros(2, 3)
sizes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("size")},)
"""
DOUBLE_IN_TENSORFLOW = """
import sys, tempfile
import tensorflow as tf


class Double(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.float32, name="X")])
    def double(self, X):
        return {"Y": X * 2}


path, double = sys.argv[1], Double()
"""
LITE = """
folder = tempfile.mkdtemp()
tf.saved_model.save(double, folder, signatures=double.double)
open(path, "wb").write(tf.lite.TFLiteConverter.from_saved_model(folder).convert())
"""
FOREST = """
import sys, numpy, xgboost
rows, values = numpy.array([[0, 1], [2, 1]], numpy.float32), numpy.array([0, 2])
options = {"learning_rate": 1, "reg_lambda": 0, "base_score": 0, "min_child_weight": 0}
xgboost.train(options, xgboost.DMatrix(rows, values), 1).save_model(sys.argv[1])
"""
RAISES = DOUBLE.replace("self.weights = ", "raise ValueError('not today') #")
KINDS: dict[str, tuple[dict[str, Any], str, int]] = {
    "worker": (CONFIG, DOUBLE, 200),
    "inside": (CONFIG | {"parameters": INSIDE}, DOUBLE, 200),
    "onnx": ({}, "", 200),
    "openvino": ({}, "", 200),
    "exported": (
        {},
        DOUBLE_IN_TORCH + "torch.export.save(torch.export.export(Double(), (rows,), dynamic_shapes=sizes), path)",
        200,
    ),
    "torchscript": (
        CONFIG | {"backend": "pytorch"},
        DOUBLE_IN_TORCH + "torch.jit.trace(Double(), rows, strict=False).save(path)",
        200,
    ),
    "tensorflow": ({}, DOUBLE_IN_TENSORFLOW + "tf.saved_model.save(double, path, signatures=double.double)", 200),
    "litert": ({}, DOUBLE_IN_TENSORFLOW + LITE, 200),
    "forest": ({}, FOREST, 200),
    "sent": (CONFIG | {"parameters": INSIDE}, DOUBLE, 200),
    "raises": (CONFIG, RAISES, 400),
    "raises_inside": (CONFIG | {"parameters": INSIDE}, RAISES, 400),
    "no_python": (CONFIG | {"parameters": INSIDE}, "this is no Python", 400),
    "bad_configuration": (CONFIG | {"max_batch_size": -1}, DOUBLE, 500),
}
"""Configuration, code, and the status of its load."""
QUICK = [kind for kind in KINDS if kind != "tensorflow"]
"""Kinds whose loads take no seconds: TensorFlow is imported anew by each of its workers."""
WRITTEN = {
    "exported": "model.pt2",
    "torchscript": "model.pt",
    "tensorflow": "model.savedmodel",
    "litert": "model.tflite",
    "forest": "xgboost.ubj",
}
"""Kinds whose code writes this file."""


class Client:
    """One connection, and what went wrong on it."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.answered = 0
        self.wrong: list[str] = []

    def post(self, path: str, body: object = None) -> tuple[int, Any]:
        """Send a request; return status and JSON."""
        self._connection.request("POST", path, json.dumps(body) if body is not None else b"")
        answer = self._connection.getresponse()
        data = answer.read()
        return answer.status, json.loads(data) if data else None

    def check(self, model: str, number: int) -> None:
        """Ask a model to double a number; a forest, whether there is one."""
        forest = model == "forest"
        tensor = {"name": "input__0" if forest else "X", "datatype": "FP32", "shape": [1, 2], "data": [number, 1]}
        status, answer = self.post(f"/v2/models/{model}/infer", {"inputs": [tensor]})
        self.answered += 1
        if status != 200 or answer["outputs"][0]["data"] != ([2 * (number > 1)] if forest else [2 * number, 2]):
            self.wrong.append(f"{model}: {status} {answer}")


def main() -> None:
    """Run, and write or print the section of docs/benchmarks.md."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cycles", type=int, default=10_000, help="how many loads (10000)")
    arguments.add_argument("--only", nargs="*", choices=KINDS, default=QUICK, help="just these kinds")
    arguments.add_argument("--print", action="store_true", help="print the table instead of writing the page")
    given = arguments.parse_args()
    text = report(given.cycles, given.only)
    if given.print:
        print(text)
    else:
        write("churn", text)


def report(cycles: int, kinds: Sequence[str]) -> str:
    """Return the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = repository(folder)
        flags = ("--model-control-mode=explicit", "--load-model=steady", "--log-info=false", "--log-error=false")
        with nerite("churn", models, folder, *flags) as server:
            steady = Client(server.http)
            stop = threading.Event()
            asking = threading.Thread(target=ask_all_the_while, args=(steady, stop))
            asking.start()
            began = time.monotonic()
            client = Client(server.http)
            try:
                rows = list(churn(client, server, cycles, kinds))
            finally:
                stop.set()
                asking.join()
            seconds = time.monotonic() - began
    wrong = [*client.wrong, *steady.wrong]
    lines = [
        f"Measured on {machine()}; {cycles:,} cycles in {seconds:.0f} s, {client.answered:,} answers of models that "
        f"came and went and {steady.answered:,} of the one that stayed, {len(wrong)} of them wrong.",
        "",
        "| cycles | server | all processes | open descriptors |",
        "|---|---|---|---|",
        *rows,
    ]
    for each in wrong[:10]:
        print(each)
    return "\n".join(lines) + "\n"


def repository(folder: Path) -> Path:
    """Write the models."""
    models = folder / "models"
    for name, (config, code, _) in {"steady": KINDS["worker"], **KINDS}.items():
        (models / name / "1").mkdir(parents=True)
        if name in ("onnx", "openvino"):
            graph = helper.make_graph(
                [helper.make_node("Add", ["X", "X"], ["Y"])],
                "double",
                [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", "columns"])],
                [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["batch", "columns"])],
            )
            double = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
            onnx.save(double, models / name / "1" / "model.onnx")
            if name == "openvino":
                (models / name / "config.pbtxt").write_text('backend: "openvino"\n')
        elif name in WRITTEN:
            path = models / name / "1" / WRITTEN[name]
            program = [sys.executable, "-W", "ignore", "-c", code, str(path)]
            subprocess.run(program, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if config:
                (models / name / "config.pbtxt").write_text(pbtxt(config))
        elif name != "sent":
            (models / name / "1" / "model.py").write_text(code)
            (models / name / "config.pbtxt").write_text(pbtxt(config))
    return models


def pbtxt(config: dict[str, Any]) -> str:
    """Return a configuration as text."""
    text = f'backend: "{config["backend"]}" max_batch_size: {config["max_batch_size"]}\n'
    text += 'input { name: "X" data_type: TYPE_FP32 dims: -1 }\noutput { name: "Y" data_type: TYPE_FP32 dims: -1 }\n'
    if "parameters" in config:
        text += 'parameters { key: "EXECUTION_MODE" value { string_value: "in_process" } }\n'
    return text + "instance_group { kind: KIND_CPU }\n"


def ask_all_the_while(client: Client, stop: threading.Event) -> None:
    """Ask the model that stays, a few hundred times a second."""
    number = 0
    while not stop.wait(0.002):
        client.check("steady", number)
        number += 1


def churn(client: Client, server: Contestant, cycles: int, names: Sequence[str]) -> Iterator[str]:
    """Load, ask and unload; give a row of the table now and then."""
    kinds = [(name, KINDS[name]) for name in names]
    for number in range(cycles + 1):
        if number % max(cycles // LOOKS, 1) == 0:
            yield row(client, server, number)
        name, (config, code, expected) = kinds[number % len(kinds)]
        parameters = {}
        if name == "sent":
            parameters = {"config": json.dumps(config), "file:1/model.py": base64.b64encode(code.encode()).decode()}
        status, answer = client.post(f"/v2/repository/models/{name}/load", {"parameters": parameters})
        if status != expected:
            client.wrong.append(f"load of {name}: {status} {answer}")
        if expected == 200:
            client.check(name, number)
            client.post(f"/v2/repository/models/{name}/unload")


def row(client: Client, server: Contestant, number: int) -> str:
    """Return memory and descriptors once everything is unloaded."""
    deadline = time.monotonic() + 30
    while "UNLOADING" in str(client.post("/v2/repository/index")[1]) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)  # for the last worker's process
    pid = server.process.pid
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    descriptors = sum(len(os.listdir(f"/proc/{each}/fd")) for each in (pid, *descendants(pid)))
    return f"| {number:,} | {megabytes:.1f} MB | {resident(pid):.1f} MB | {descriptors} |"


if __name__ == "__main__":
    main()
