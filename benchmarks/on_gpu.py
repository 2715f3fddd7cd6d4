"""Whether the TensorRT backend works on this machine's GPU: python benchmarks/tensorrt_engine.py .

Builds a small engine with two profiles, serves it with and without CUDA graphs, compares what it answers with numpy,
and counts requests. Needs a GPU and: pip install 'nerite[tensorrt,gpu]'. Ends with status 1 where an answer is wrong.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from serving import Serving, serving  # the path has to be set first

WIDTH = 64
CONFIG = """
backend: "tensorrt"
max_batch_size: {rows}
instance_group {{ kind: KIND_GPU gpus: 0 profile: [ "0", "1" ] }}
optimization {{ cuda {{ graphs: {graphs} }} }}
"""


def weights() -> Any:
    """Return the matrix that the engine multiplies by."""
    return np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)


def build(path: Path) -> None:
    """Write an engine for OUT = max(IN x W, 0), with a profile for up to 4 rows and one for up to 32."""
    import tensorrt as trt

    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    network = builder.create_network(0)
    given = network.add_input("IN", trt.float32, (-1, WIDTH))
    # TensorRT keeps no copy of them.
    values = weights()
    matrix = network.add_constant((WIDTH, WIDTH), trt.Weights(values))
    none = trt.MatrixOperation.NONE
    product = network.add_matrix_multiply(given, none, matrix.get_output(0), none)
    out = network.add_activation(product.get_output(0), trt.ActivationType.RELU).get_output(0)
    out.name = "OUT"
    network.mark_output(out)
    config = builder.create_builder_config()
    for most in (4, 32):
        profile = builder.create_optimization_profile()
        profile.set_shape("IN", (1, WIDTH), (most // 2, WIDTH), (most, WIDTH))
        config.add_optimization_profile(profile)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(builder.build_serialized_network(network, config)))


def wrong(server: Serving, model: str) -> int:
    """Return how many of the answers to batches of all sizes are wrong, and print them."""
    found = 0
    random = np.random.default_rng(1)
    for turn in range(3):
        for rows in (1, 2, 4, 5, 32, 1):
            given = random.standard_normal((rows, WIDTH)).astype(np.float32)
            tensor = {"name": "IN", "shape": list(given.shape), "datatype": "FP32", "data": given.ravel().tolist()}
            status, _, body = server.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
            answer = json.loads(body)
            if status == 200:
                answer = np.array(answer["outputs"][0]["data"], np.float32).reshape(rows, WIDTH)
                # TensorRT may multiply in TF32, of which the mantissa has 10 bits.
                if np.allclose(answer, np.maximum(given @ weights(), 0), rtol=1e-2, atol=5e-2):
                    continue
            found += 1
            print(f"{model}: {rows} rows in turn {turn}: wrong: {answer}")
    return found


def rate(server: Serving, model: str) -> float:
    """Return the requests a second of one caller."""
    tensor = {"name": "IN", "shape": [1, WIDTH], "datatype": "FP32", "data": [1.0] * WIDTH}
    count, began = 500, time.perf_counter()
    for _ in range(count):
        server.ask("POST", f"/v2/models/{model}/infer", {"inputs": [tensor]})
    return count / (time.perf_counter() - began)


def main() -> int:
    """Build, serve, compare."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        for name, graphs in (("plain", "false"), ("graphs", "true")):
            build(models / name / "1" / "model.plan")
            (models / name / "config.pbtxt").write_text(CONFIG.format(rows=32, graphs=graphs))
        build(models / "completed" / "1" / "model.plan")
        with serving(models, Path(folder, "log")) as server:
            found = wrong(server, "plain") + wrong(server, "graphs")
            config = server.json("GET", "/v2/models/completed/config")
            print("completed:", config["max_batch_size"], config["input"], config["output"])
            for model in ("plain", "graphs"):
                print(f"{model}: {rate(server, model):,.0f} requests a second, one caller")
    print("wrong answers:", found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
