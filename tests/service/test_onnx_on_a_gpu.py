"""ONNX Runtime's models on a GPU, and ensembles there: with a stand-in for CUDA, which counts copies."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from cuda_machine import CONFIG, CudaMachine, copies, ensemble, infer, torch_model
from onnx_models import constant, model, node, save, tensor
from serving import Serving, serving

pytest.importorskip("torch")

ONNX = CONFIG.replace("pytorch", "onnxruntime")


def onnx_model(models: Path, name: str) -> None:
    """Write a model: y = x * 2."""
    proto = model(
        [node("Mul", ["x", "two"], ["y"])],
        [tensor("x", ["rows", 256])],
        [tensor("y", ["rows", 256])],
        [constant("two", np.float32(2))],
    )
    save(models / name, proto)
    (models / name / "config.pbtxt").write_text(ONNX)


def labelled_model(models: Path) -> None:
    """Write a model with strings beside numbers: y = x * 2."""
    proto = model(
        [node("Mul", ["x", "two"], ["y"]), node("Identity", ["label"], ["same"])],
        [tensor("x", ["rows", 256]), tensor("label", ["rows", 1], TensorProto.STRING)],
        [tensor("y", ["rows", 256]), tensor("same", ["rows", 1], TensorProto.STRING)],
        [constant("two", np.float32(2))],
    )
    save(models / "labelled", proto)
    (models / "labelled" / "config.pbtxt").write_text(
        ONNX + 'input { name: "label" data_type: TYPE_STRING dims: [ 1 ] }'
        'output { name: "same" data_type: TYPE_STRING dims: [ 1 ] }'
    )


def labelled_ensemble(models: Path) -> None:
    """Write an ensemble whose second step takes strings of the request, and numbers that the first has on the GPU."""
    (models / "label" / "1").mkdir(parents=True)
    (models / "label" / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 16\n'
        'input [{ name: "x" data_type: TYPE_FP32 dims: [ 256 ] }, { name: "l" data_type: TYPE_STRING dims: [ 1 ] }]\n'
        'output [{ name: "y" data_type: TYPE_FP32 dims: [ 256 ] }, { name: "s" data_type: TYPE_STRING dims: [ 1 ] }]\n'
        'ensemble_scheduling { step { model_name: "first" model_version: -1 '
        'input_map { key: "x" value: "x" } output_map { key: "y" value: "t" } }\n'
        'step { model_name: "labelled" model_version: -1 '
        'input_map { key: "x" value: "t" } input_map { key: "label" value: "l" } '
        'output_map { key: "y" value: "y" } output_map { key: "same" value: "s" } } }'
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    delayed = CudaMachine(tmp_path_factory.mktemp("machine"), STAND_IN_CUDA_FRAMEWORKS="1", STAND_IN_CUDA_DELAY_MS="1")
    models = tmp_path_factory.mktemp("models")
    onnx_model(models, "first")
    onnx_model(models, "last")
    torch_model(models, "between")
    ensemble(models, "mixed", "first", "between", "last")
    labelled_model(models)
    labelled_ensemble(models)
    with serving(models, models / "log", environment=delayed.environment) as server:
        yield server


@pytest.mark.parametrize(("name", "factor"), [("first", 2), ("mixed", 8)])
def test_one_copy_in_and_one_out(server: Serving, name: str, factor: int) -> None:
    before = copies(server)
    for turn in range(5):
        given = np.random.default_rng(turn).random((1 + turn, 256), np.float32)
        assert (infer(server, name, given) == given * factor).all()
    assert copies(server) - before == {"to_device": 5, "to_host": 5}


@pytest.mark.parametrize(("name", "factor"), [("first", 2), ("mixed", 8)])
def test_rows_of_many_clients(server: Serving, name: str, factor: int) -> None:
    """Batches are joined, and copied beside each other, and everybody gets the answer to its own rows."""

    def ask(turn: int) -> bool:
        given = np.random.default_rng(turn).random((1 + turn % 3, 256), np.float32)
        return bool((infer(server, name, given) == given * np.float32(factor)).all())

    with ThreadPoolExecutor(12) as clients:
        assert all(clients.map(ask, range(150)))
    executions = server.metrics()['nv_inference_exec_count{model="first",version="1"}']
    requests = server.metrics()['nv_inference_request_success{model="first",version="1"}']
    assert executions < requests


def test_a_model_with_strings_gets_numbers_on_the_host(server: Serving) -> None:
    given = np.random.default_rng(0).random((2, 256), np.float32)
    inputs = [
        {"name": "x", "shape": [2, 256], "datatype": "FP32", "data": given.ravel().tolist()},
        {"name": "l", "shape": [2, 1], "datatype": "BYTES", "data": ["one", "two"]},
    ]
    before = copies(server)
    answer = server.json("POST", "/v2/models/label/infer", {"inputs": inputs})
    outputs = {each["name"]: each["data"] for each in answer["outputs"]}
    assert outputs["s"] == ["one", "two"]
    assert (np.array(outputs["y"], np.float32) == (given * 4).ravel()).all()
    assert copies(server) - before == {"to_device": 1, "to_host": 1}
