"""What a server refuses to load, ``nerite check`` finds, in the same words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import openvino.opset13 as ops
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from serving import PATIENCE, Serving, serving
from tree_models import xgboost

CODE = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
IN = 'input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]\n'
OUT = 'output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]\n'
TENSORS = f"max_batch_size: 8\n{IN}{OUT}"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123456\n"
PYTHON = f'backend: "python"\n{TENSORS}'
ONNX = f'platform: "onnxruntime_onnx"\n{TENSORS}'
TORCH = f'platform: "pytorch_libtorch"\n{TENSORS}'
OPENVINO = f'backend: "openvino"\n{TENSORS}'
TENSORFLOW = f'platform: "tensorflow_savedmodel"\n{TENSORS}'
FOREST = (
    'backend: "fil"\nmax_batch_size: 8\ninput [ { name: "input__0" data_type: TYPE_FP32 dims: [ %d ] } ]\n'
    'output [ { name: "output__0" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
)
STRING = 'parameters { key: "%s" value { string_value: "%s" } }\n'


def onnx_model() -> onnx.ModelProto:
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("IN", "OUT")]
    weights = numpy_helper.from_array(np.ones((1000, 4), np.float32), "weights")
    zero = numpy_helper.from_array(np.array(0), "zero")
    nodes = [helper.make_node("Gather", ["weights", "zero"], ["row"]), helper.make_node("Mul", ["IN", "row"], ["OUT"])]
    graph = helper.make_graph(nodes, "graph", sides[:1], sides[1:], [weights, zero])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def write_onnx(path: Path) -> None:
    path.write_bytes(onnx_model().SerializeToString())


def write_part_of_onnx(path: Path) -> None:
    path.write_bytes(onnx_model().SerializeToString()[:-1000])


def write_onnx_without_weights(path: Path) -> None:
    """Leave the file away that the weights are in."""
    onnx.save(onnx_model(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (path.parent / "weights.bin").unlink()


def write_forest(path: Path) -> None:
    xgboost("reg:squarederror", "value").save(path)


def write_openvino(path: Path) -> None:
    given = ops.parameter([-1, 4], openvino.Type.f32, "IN")
    given.output(0).set_names({"IN"})
    scaled = ops.multiply(given, ops.constant(np.arange(4, dtype=np.float32)))
    scaled.output(0).set_names({"OUT"})
    openvino.save_model(openvino.Model([scaled], [given], "m"), path)


def write_torch(path: Path) -> None:
    program = torch.export.export(
        torch.nn.ReLU(), (torch.ones(2, 4),), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},)
    )
    torch.export.save(program, path)


# What a model consists of: its configuration, and what is in its directory.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # The configuration.
    "field": (f"{PYTHON}maxBatchSize: 8\n", {"1/model.py": CODE}),
    "placeholder": ('backend: "python"\nmax_batch_size: ${size}\n', {"1/model.py": CODE}),
    "empty_value": (f'backend: "python"\nmax_batch_size:\n{IN}', {"1/model.py": CODE}),
    "unclosed": (f'backend: "python"\ninput [ {{ name: "A"\n{OUT}', {"1/model.py": CODE}),
    "name": (f'name: "other"\n{PYTHON}', {"1/model.py": CODE}),
    "platform": (f'platform: "onnx"\n{TENSORS}', {"1/model.onnx": write_onnx}),
    "backend": (f'backend: "onnx"\n{TENSORS}', {"1/model.onnx": write_onnx}),
    "pair": (f'backend: "onnxruntime" platform: "pytorch_libtorch"\n{TENSORS}', {"1/model.onnx": write_onnx}),
    "no_backend": (TENSORS, {"1/weights.dat": b"0"}),
    "no_dims": ('backend: "python"\ninput [ { name: "A" data_type: TYPE_FP32 } ]\n', {"1/model.py": CODE}),
    "batch_size": (f'backend: "python" max_batch_size: -1\n{IN}{OUT}', {"1/model.py": CODE}),
    "labels": (PYTHON.replace('"OUT"', '"OUT" label_filename: "missing"'), {"1/model.py": CODE}),
    "decoupled_cache": (
        f"{PYTHON}model_transaction_policy {{ decoupled: true }} response_cache {{ enable: true }}\n",
        {"1/model.py": CODE},
    ),
    "queue": (PYTHON + STRING % ("MAX_QUEUE_SECONDS", "soon"), {"1/model.py": CODE}),
    "agent": (f'{PYTHON}model_repository_agents {{ agents [ {{ name: "vault" }} ] }}\n', {"1/model.py": CODE}),
    "state": (
        f'{PYTHON}sequence_batching {{ state [ {{ input_name: "SI" output_name: "SO" data_type: TYPE_FP32 dims: 1\n'
        'initial_state { name: "s" data_type: TYPE_FP32 dims: 1 data_file: "missing" } } ] }\n',
        {"1/model.py": CODE},
    ),
    "warm_up": (
        f'{PYTHON}model_warmup [ {{ name: "w" batch_size: 1 inputs {{ key: "IN" value {{ data_type: TYPE_FP32 dims: 4 '
        'input_data_file: "missing" } } } ]\n',
        {"1/model.py": CODE},
    ),
    "recorded": (PYTHON + STRING % ("WARMUP_REQUESTS", "missing"), {"1/model.py": CODE}),
    "mode": (PYTHON + STRING % ("EXECUTION_MODE", "coroutine"), {"1/model.py": CODE}),
    "environment": (PYTHON + STRING % ("EXECUTION_ENV_PATH", "/no/such/environment.tar.gz"), {"1/model.py": CODE}),
    "own_parameter": (ONNX + STRING % ("intra_op_thread_count", "many"), {"1/model.onnx": write_onnx}),
    # Versions.
    "no_version": (PYTHON, {}),
    "v1": (PYTHON, {"v1/model.py": CODE}),
    "policy": (f"{PYTHON}version_policy {{ specific {{ versions: 7 }} }}\n", {"1/model.py": CODE}),
    "pipeline_without_version": (
        f'platform: "ensemble"\n{TENSORS}ensemble_scheduling {{ step [ {{ model_name: "fine" model_version: -1 '
        'input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } ] }\n',
        {},
    ),
    "pipeline": (
        f'platform: "ensemble"\n{TENSORS}ensemble_scheduling {{ step [ {{ model_name: "nowhere" model_version: -1 '
        'input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } ] }\n',
        {"1/": None},
    ),
    # Code.
    "code_missing": (PYTHON, {"1/other.py": CODE}),
    "code_syntax": (
        PYTHON,
        {"1/model.py": "class TritonPythonModel:\n    def execute(self, requests)\n        pass\n"},
    ),
    "code_without_class": (PYTHON, {"1/model.py": "class Model:\n    pass\n"}),
    "code_raises": (PYTHON, {"1/model.py": f"WEIGHTS = 1 / 0\n{CODE}"}),
    "code_completes_wrongly": (
        'backend: "python"\n',
        {"1/model.py": f"{CODE}\n    @staticmethod\n    def auto_complete_config(config):\n        return None\n"},
    ),
    "code_pointer": (PYTHON, {"1/model.py": POINTER}),
    # ONNX.
    "onnx_missing": (ONNX, {"1/": None}),
    "onnx_elsewhere": (ONNX, {"1/resnet.onnx": write_onnx}),
    "onnx_input": (ONNX.replace('"IN"', '"INPUT"'), {"1/model.onnx": write_onnx}),
    "onnx_output": (ONNX.replace('"OUT"', '"OUTPUT"'), {"1/model.onnx": write_onnx}),
    "onnx_type": (ONNX.replace("FP32", "INT64"), {"1/model.onnx": write_onnx}),
    "onnx_dims": (ONNX.replace("[ 4 ]", "[ 5 ]"), {"1/model.onnx": write_onnx}),
    "onnx_cut_off": (ONNX, {"1/model.onnx": write_part_of_onnx}),
    "onnx_nothing": (ONNX, {"1/model.onnx": b""}),
    "onnx_pointer": (ONNX, {"1/model.onnx": POINTER}),
    "onnx_weights": (ONNX, {"1/model.onnx": write_onnx_without_weights}),
    "onnx_weights_pointer": (ONNX, {"1/model.onnx": write_onnx_without_weights, "1/weights.bin": POINTER}),
    # PyTorch.
    "torch_missing": (TORCH, {"1/": None}),
    "torch_input": (TORCH.replace('"IN"', '"NONE"').replace("[ 4 ]", "[ 5 ]"), {"1/model.pt2": write_torch}),
    "torch_other": (TORCH, {"1/model.pt": b"not a program"}),
    "torch_pointer": (TORCH, {"1/model.pt": POINTER}),
    # OpenVINO.
    "openvino_missing": (OPENVINO, {"1/": None}),
    "openvino_input": (OPENVINO.replace('"IN"', '"INPUT"'), {"1/model.xml": write_openvino}),
    "openvino_pointer": (OPENVINO, {"1/model.xml": POINTER}),
    "openvino_weights_pointer": (OPENVINO, {"1/model.xml": write_openvino, "1/model.bin": POINTER}),
    # TensorFlow.
    "tensorflow_missing": (TENSORFLOW, {"1/": None}),
    "tensorflow_pointer": (TENSORFLOW, {"1/model.savedmodel/saved_model.pb": POINTER}),
    "tensorflow_other": (TENSORFLOW, {"1/model.savedmodel/keras_metadata.pb": b"0"}),
    # Trees.
    "forest_missing": (FOREST % 4, {"1/": None}),
    "forest_dims": (FOREST % 99, {"1/xgboost.json": write_forest}),
    "forest_pointer": (FOREST % 4, {"1/xgboost.json": POINTER}),
    # Language models.
    "llm_missing": ('backend: "vllm"\n', {"1/other": b""}),
}

REMEDIES = {
    **{name: "git lfs pull --include" for name in MODELS if name.endswith("_pointer")},
    "no_version": "Put the model's files into ",
    "v1": "The name of a version's directory is a number and nothing else: mv ",
    "pipeline_without_version": "An ensemble needs the directory of a version, too, with nothing in it: mkdir -p ",
    "onnx_cut_off": "the file is truncated: 994 bytes are missing. Copy or download it again",
    "onnx_elsewhere": "Found 'resnet.onnx' instead: rename it to model.onnx, or set default_model_filename",
    "platform": 'Write platform: "onnxruntime_onnx"',
    "backend": 'Did you mean platform: "onnxruntime_onnx"?',
}
"""What follows Triton's text in the answer to a load."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, (config, files) in {**MODELS, "fine": (PYTHON, {"1/model.py": CODE})}.items():
        directory = root / name
        directory.mkdir()
        (directory / "config.pbtxt").write_text(config)
        for file, content in files.items():
            write(directory / file, content, is_directory=file.endswith("/"))
    return root


def write(path: Path, content: Any, *, is_directory: bool) -> None:
    (path if is_directory else path.parent).mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    elif not is_directory:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture(scope="module")
def rows(repository: Path) -> dict[str, list[dict[str, Any]]]:
    """What ``nerite check`` finds, by model."""
    command = [sys.executable, "-m", "nerite.tools.check", str(repository), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    found: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(done.stdout):
        found.setdefault(row["model"], []).append(row)
    return found


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(repository, log, "--model-control-mode=explicit") as running:
        yield running


@pytest.mark.parametrize("name", MODELS)
def test_the_refusal_of_a_load_is_found(name: str, server: Serving, rows: dict[str, list[dict[str, Any]]]) -> None:
    status, _, answer = server.ask("POST", f"/v2/repository/models/{name}/load")
    refusal = json.loads(answer)["error"]
    assert status >= 400
    assert any(row["message"] in refusal for row in rows.get(name, ())), (refusal, rows.get(name))
    assert all(row["remedy"] for row in rows[name])
    if name in REMEDIES:
        assert REMEDIES[name] in refusal


def test_what_is_wrong_in_code_stands_there(repository: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    (row,) = rows["code_syntax"]
    assert (row["file"], row["line"], row["column"]) == (f"{repository}/code_syntax/1/model.py", 2, 32)
    (row,) = rows["code_raises"]
    assert (row["file"], row["line"]) == (f"{repository}/code_raises/1/model.py", 1)


def test_code_is_read_where_it_is_not_run(repository: Path) -> None:
    command = [sys.executable, "-m", "nerite.tools.check", str(repository), "--disable-auto-complete-config", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    found = {row["model"]: row["message"] for row in json.loads(done.stdout)}
    assert "code_raises" not in found
    assert found["code_syntax"] == "SyntaxError: expected ':' (model.py, line 2)"
    assert found["code_without_class"] == "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"
    assert found["code_missing"].startswith("Python model file not found in ")


def test_what_loads_has_no_mistake(server: Serving, rows: dict[str, list[dict[str, Any]]]) -> None:
    assert server.ask("POST", "/v2/repository/models/fine/load")[0] == 200
    assert rows.keys() == MODELS.keys()
