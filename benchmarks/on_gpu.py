"""Whether frameworks work on this machine's GPU: python benchmarks/on_gpu.py [tensorrt] [onnxruntime] [pytorch].

Makes a small model for each, those that are installed unless some are named; of TensorRT an engine with two profiles,
with and without CUDA graphs. Serves them on GPU 0, compares what they answer with numpy, and counts requests. Ends with
status 1 where an answer is wrong. Needs a GPU and, of these, what is to be tried:

    pip install 'nerite[tensorrt,gpu]'        TensorRT
    pip install nerite onnxruntime-gpu onnx   ONNX Runtime: in place of onnxruntime
    pip install 'nerite[torch]'               PyTorch: in its build for the GPU's CUDA

``--kind KIND_CPU`` tries this program itself on processors.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from serving import Serving, serving  # the path has to be set first

WIDTH = 64
CONFIG = """
backend: "{framework}"
max_batch_size: 32
instance_group {{ kind: {kind}{device} }}
"""
ENGINE = """
backend: "tensorrt"
max_batch_size: 32
instance_group {{ kind: KIND_GPU gpus: 0 profile: [ "0", "1" ] }}
optimization {{ cuda {{ graphs: {graphs} }} }}
"""


def weights() -> Any:
    """Return the matrix that the models multiply by: y = max(x W, 0)."""
    return np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)


def write_engine(version: Path) -> None:
    """Write an engine of TensorRT, with a profile for up to 4 rows and one for up to 32."""
    import tensorrt as trt

    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    network = builder.create_network(0)
    given = network.add_input("x", trt.float32, (-1, WIDTH))
    # TensorRT keeps no copy of them.
    values = weights()
    matrix = network.add_constant((WIDTH, WIDTH), trt.Weights(values))
    none = trt.MatrixOperation.NONE
    product = network.add_matrix_multiply(given, none, matrix.get_output(0), none)
    out = network.add_activation(product.get_output(0), trt.ActivationType.RELU).get_output(0)
    out.name = "y"
    network.mark_output(out)
    config = builder.create_builder_config()
    for most in (4, 32):
        profile = builder.create_optimization_profile()
        profile.set_shape("x", (1, WIDTH), (most // 2, WIDTH), (most, WIDTH))
        config.add_optimization_profile(profile)
    version.mkdir(parents=True)
    (version / "model.plan").write_bytes(bytes(builder.build_serialized_network(network, config)))


def write_graph(version: Path) -> None:
    """Write an ONNX model."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    given, out = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH]) for name in ("x", "y"))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Relu", ["z"], ["y"])]
    graph = helper.make_graph(nodes, "graph", [given], [out], [numpy_helper.from_array(weights(), "w")])
    version.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, version / "model.onnx")


def write_program(version: Path) -> None:
    """Write an exported program of PyTorch."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.from_numpy(weights()))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": torch.relu(x @ self.matrix)}

    rows = torch.export.Dim("rows", max=64)
    version.mkdir(parents=True)
    program = torch.export.export(Net().eval(), (torch.zeros(2, WIDTH),), dynamic_shapes=({0: rows},))
    torch.export.save(program, version / "model.pt2")


FRAMEWORKS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "tensorrt": ("tensorrt", write_engine),
    "onnxruntime": ("onnxruntime", write_graph),
    "pytorch": ("torch", write_program),
}
"""The package, and what writes a version of a model."""


def place(models: Path, framework: str, kind: str) -> list[str]:
    """Write the models of a framework; return their names."""
    write = FRAMEWORKS[framework][1]
    device = " gpus: 0" if kind == "KIND_GPU" else ""
    configs = {framework: CONFIG.format(framework=framework, kind=kind, device=device)}
    if framework == "tensorrt":
        configs = {name: ENGINE.format(graphs=graphs) for name, graphs in (("plain", "false"), ("graphs", "true"))}
        write(models / "completed" / "1")
    for name, config in configs.items():
        write(models / name / "1")
        (models / name / "config.pbtxt").write_text(config)
    return list(configs)


def wrong(server: Serving, model: str) -> int:
    """Return how many of the answers to batches of all sizes are wrong, and print them."""
    found = 0
    random = np.random.default_rng(1)
    for turn in range(3):
        for rows in (1, 2, 4, 5, 32, 1):
            given = random.standard_normal((rows, WIDTH)).astype(np.float32)
            tensor = {"name": "x", "shape": list(given.shape), "datatype": "FP32", "data": given.ravel().tolist()}
            status, _, body = server.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
            answer = json.loads(body)
            if status == 200:
                answer = np.array(answer["outputs"][0]["data"], np.float32).reshape(rows, WIDTH)
                # A GPU may multiply in TF32, of which the mantissa has 10 bits.
                if np.allclose(answer, np.maximum(given @ weights(), 0), rtol=1e-2, atol=5e-2):
                    continue
            found += 1
            print(f"{model}: {rows} rows in turn {turn}: wrong: {answer}")
    return found


def rate(server: Serving, model: str) -> float:
    """Return the requests a second of one caller."""
    tensor = {"name": "x", "shape": [1, WIDTH], "datatype": "FP32", "data": [1.0] * WIDTH}
    count, began = 500, time.perf_counter()
    for _ in range(count):
        server.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
    return count / (time.perf_counter() - began)


def main() -> int:
    """Make, serve, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="*", choices=[*FRAMEWORKS, []], default=[], metavar="FRAMEWORK")
    parser.add_argument("--kind", choices=["KIND_GPU", "KIND_CPU"], default="KIND_GPU")
    options = parser.parse_args()
    installed = [name for name, (package, _) in FRAMEWORKS.items() if importlib.util.find_spec(package) is not None]
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        placed = [place(models, framework, options.kind) for framework in options.frameworks or installed]
        names = [name for some in placed for name in some]
        with serving(models, Path(folder, "log")) as server:
            found = sum(wrong(server, name) for name in names)
            if (models / "completed").exists():
                config = server.json("GET", "/v2/models/completed/config")
                print("completed:", config["max_batch_size"], config["input"], config["output"])
            for name in names:
                print(f"{name}: {rate(server, name):,.0f} requests a second, one caller")
    print("wrong answers:", found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
