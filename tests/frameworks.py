"""What training saves, of each kind that can be served here, and what its own framework makes of some rows.

The frameworks are imported by the functions that need them: they take seconds.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import tree_models

WIDTH, HIDDEN = 64, 4096
"""Large enough that a few rows are computed by several threads."""

_random = np.random.default_rng(11)
FIRST = _random.standard_normal((WIDTH, HIDDEN)).astype(np.float32)
SECOND = _random.standard_normal((HIDDEN, WIDTH)).astype(np.float32)
ROWS = _random.standard_normal((32, WIDTH)).astype(np.float32)
DOUBLED = ROWS[:, :4]

PERCEPTRON = f"""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(32)
        config.add_input({{"name": "x", "data_type": "TYPE_FP32", "dims": [{WIDTH}]}})
        config.add_output({{"name": "y", "data_type": "TYPE_FP32", "dims": [{WIDTH}]}})
        config.set_dynamic_batching()
        return config

    def initialize(self, args):
        weights = np.load(pb_utils.get_model_dir() + "/weights.npz")
        self.first, self.second = weights["first"], weights["second"]

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", np.maximum(x @ self.first, 0) @ self.second)])
            for x in inputs
        ]
"""


IN_ONE_WORKER = (
    'instance_group { kind: KIND_CPU count: 1 } parameters { key: "WORKER" value { string_value: "tensorflow" } }'
)
"""TensorFlow is imported once."""


class Served(NamedTuple):
    """What a model should answer."""

    backend: str
    rows: NDArray[Any]
    expected: Mapping[str, NDArray[Any]]
    """What its framework makes of the rows, by the name of the output."""
    batch: int = 4
    """How many rows may be asked for at once."""


class Artifact(NamedTuple):
    """What training has saved, what ``nerite add`` has to be told of it, and what the model should answer."""

    path: Path
    served: Served
    flags: tuple[str, ...] = ()


def artifacts(folder: Path, tensorflow_artifacts: Path) -> dict[str, Artifact]:
    """Write artifacts of twelve kinds; return them by the names that the models will have."""
    of_tensorflow = Served("", DOUBLED, {"doubled": DOUBLED * 2, "total": DOUBLED.sum(1, keepdims=True)})
    shutil.copytree(tensorflow_artifacts / "scaled", folder / "saved")
    shutil.copy(tensorflow_artifacts / "scaled.tflite", folder / "tflite.tflite")
    write_perceptron(folder / "python")
    config = folder / "saved.pbtxt"
    config.write_text(f'platform: "tensorflow_savedmodel" {IN_ONE_WORKER}')
    return {
        "python": Artifact(folder / "python", Served("python", ROWS, {"y": np.maximum(ROWS @ FIRST, 0) @ SECOND}, 32)),
        "saved": Artifact(folder / "saved", of_tensorflow._replace(backend="tensorflow"), ("--config", str(config))),
        "tflite": Artifact(folder / "tflite.tflite", of_tensorflow._replace(backend="litert")),
        **_networks(folder),
        **_forests(folder),
    }


def write_perceptron(folder: Path) -> None:
    """Write a Python model, and its weights beside it."""
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(PERCEPTRON)
    np.savez(folder / "weights.npz", first=FIRST, second=SECOND)


def _networks(folder: Path) -> dict[str, Artifact]:
    """One network: exported by PyTorch, and written as ONNX and for OpenVINO. Each framework says what it computes."""
    import onnxruntime
    import torch

    from nerite.frameworks.openvino.graph import openvino

    network = torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, WIDTH))
    given = torch.from_numpy(ROWS)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(network.eval(), (given[:2],), dynamic_shapes=({0: torch.export.Dim("rows")},))
        torch.export.save(exported, folder / "exported.pt2")
        torch.jit.save(torch.jit.trace(network, given[:1]), folder / "torchscript.pt")
        of_torch = Served("pytorch", ROWS, {"OUTPUT__0": network(given).numpy()})
    onnx = _write_onnx(folder / "onnx.onnx", [parameter.detach().numpy() for parameter in network.parameters()])
    session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    of_onnx = Served("onnxruntime", ROWS, {"y": session.run(None, {"x": ROWS})[0]})
    logged = folder / "logged"
    logged.mkdir()
    shutil.copy(onnx, logged / "model.onnx")
    (logged / "MLmodel").write_text("flavors:\n  onnx:\n    data: model.onnx\n")
    directory = folder / "directory" / "3"
    directory.mkdir(parents=True)
    shutil.copy(onnx, directory / "model.onnx")
    ov = openvino()
    core, read = ov.Core(), ov.Core().read_model(onnx)
    ov.save_model(read, folder / "openvino.xml", compress_to_fp16=False)
    of_openvino = Served("openvino", ROWS, {"y": core.compile_model(read, "CPU")(ROWS)[0]})
    tensors = (f"--input=x:FP32:-1,{WIDTH}", f"--output=OUTPUT__0:FP32:-1,{WIDTH}")
    return {
        "exported": Artifact(folder / "exported.pt2", of_torch),
        "torchscript": Artifact(folder / "torchscript.pt", of_torch, tensors),
        "onnx": Artifact(onnx, of_onnx),
        "logged": Artifact(logged, of_onnx),
        "directory": Artifact(directory.parent, of_onnx),
        "openvino": Artifact(folder / "openvino.xml", of_openvino),
    }


def _write_onnx(path: Path, weights: list[NDArray[Any]]) -> Path:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("Gemm", ["x", "0", "1"], ["hidden"], transB=1),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "2", "3"], ["y"], transB=1),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH]) for name in ("x", "y")]
    constants = [numpy_helper.from_array(each, str(number)) for number, each in enumerate(weights)]
    graph = helper.make_graph(nodes, "network", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def _forests(folder: Path) -> dict[str, Artifact]:
    rows = np.tile(tree_models.ROWS[6:], (8, 1))
    made = {}
    for name, forest in (
        ("boosted.ubj", tree_models.xgboost("multi:softprob", "three", trees=20)),
        ("lightgbm.txt", tree_models.lightgbm("binary", "two", trees=20)),
        ("sklearn.tl", tree_models.sklearn("RandomForestClassifier", "three", trees=20)),
    ):
        forest.save(folder / name)
        expected = np.reshape(forest.predict(rows), (len(rows), -1))
        path = folder / name
        made[path.stem] = Artifact(path, Served("fil", rows, {"output__0": expected}, len(rows)))
    return made


class Summing(NamedTuple):
    """A model with a state: what it answers to ones that belong to a sequence."""

    filename: str
    source: str
    output: str
    width: int
    config: str
    answers: list[float]

    def place(self, version: Path, tensorflow_artifacts: Path) -> None:
        """Put it into a repository."""
        version.mkdir(parents=True)
        shutil.copy(tensorflow_artifacts / self.source, version / self.filename)
        state = f'{{ input_name: "b" output_name: "{self.output}" data_type: TYPE_FP32 dims: {self.width} }}'
        (version.parent / "config.pbtxt").write_text(
            f"{self.config}\nmax_batch_size: 4\n"
            f'input {{ name: "a" data_type: TYPE_FP32 dims: {self.width} }}\n'
            f'output {{ name: "{self.output}" data_type: TYPE_FP32 dims: {self.width} }}\n'
            f"sequence_batching {{ oldest {{ max_candidate_sequences: 4 }} state {state} }}\n"
        )


SUMMING = {
    "summing_lite": Summing("model.tflite", "pair.tflite", "both", 3, 'backend: "litert"', [1, 3, 7]),
    "summing_graph": Summing(
        "model.graphdef", "frozen.pb", "sum", 4, f'platform: "tensorflow_graphdef" {IN_ONE_WORKER}', [1, 2, 3]
    ),
}
