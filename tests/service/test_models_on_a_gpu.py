"""PyTorch's models on a GPU, and ensembles there: with a stand-in for CUDA, which counts copies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from cuda_machine import CONFIG, CudaMachine, copies, ensemble, infer, torch_model
from serving import Serving, eventually, python_model, serving

pytest.importorskip("torch")

PYTHON = """
    def execute(self, requests):
        from device_arrays import DeviceArray, numpy_of
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "x")
            array = given.as_numpy() if given.is_cpu() else numpy_of(given)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", DeviceArray(array * 2))]))
        return responses
"""
CALLER = """
    def execute(self, requests):
        memory = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0)
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "x")
            for _ in range(3):
                call = pb_utils.InferenceRequest(
                    model_name="twice", requested_output_names=["y"], inputs=[tensor], preferred_memory=memory
                )
                answer = call.exec()
                assert not answer.has_error(), answer.error().message()
                output = pb_utils.get_output_tensor_by_name(answer, "y")
                tensor = pb_utils.Tensor.from_dlpack("x", output.to_dlpack())
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", tensor.to_dlpack())]))
        return responses
"""
PYTHON_CONFIG = CONFIG.replace("pytorch", "python") + (
    'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> CudaMachine:
    return CudaMachine(tmp_path_factory.mktemp("machine"), STAND_IN_CUDA_FRAMEWORKS="1", STAND_IN_CUDA_DELAY_MS="1")


@pytest.fixture(scope="module")
def server(machine: CudaMachine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    models = tmp_path_factory.mktemp("models")
    torch_model(models, "twice")
    torch_model(models, "also_twice")
    ensemble(models, "three", "twice", "also_twice", "twice")
    python_model(models, "in_python", PYTHON, PYTHON_CONFIG)
    ensemble(models, "mixed", "twice", "in_python", "also_twice")
    python_model(models, "caller", CALLER, PYTHON_CONFIG)
    with serving(models, models / "log", "--allow-client-shm=true", environment=machine.environment) as server:
        yield server


def test_one_copy_in_and_one_out(server: Serving) -> None:
    before = copies(server)
    for turn in range(5):
        given = np.random.default_rng(turn).random((1 + turn, 256), np.float32)
        assert (infer(server, "twice", given) == given * 2).all()
    assert copies(server) - before == {"to_device": 5, "to_host": 5}


def test_an_ensemble_makes_one_copy_in_and_one_out(server: Serving) -> None:
    before = copies(server)
    for turn in range(5):
        given = np.random.default_rng(turn).random((1 + turn, 256), np.float32)
        assert (infer(server, "three", given) == given * 8).all()
    assert copies(server) - before == {"to_device": 5, "to_host": 5}


def settled(server: Serving, model: str, expected: Counter[str]) -> None:
    """Wait until a request makes these copies: workers are granted memory on the GPU after they have asked for it."""

    def made() -> Counter[str]:
        before = copies(server)
        given = np.random.default_rng(0).random((2, 256), np.float32)
        assert (infer(server, model, given) == given * 8).all()
        return copies(server) - before

    eventually(lambda: made() == expected)


def test_between_processes_tensors_stay_on_the_gpu(server: Serving) -> None:
    """The model's own copies are counted apart: it makes a new tensor of what it got."""
    settled(server, "mixed", Counter(to_device=1, to_host=1, on_device=2))


def test_a_model_calls_others_on_the_gpu(server: Serving) -> None:
    settled(server, "caller", Counter(to_device=1, to_host=1, on_device=3))


@pytest.mark.parametrize("model", ["twice", "three", "mixed"])
def test_rows_of_many_clients(server: Serving, model: str) -> None:
    """Batches are joined, and copied beside each other, and everybody gets the answer to its own rows."""
    factor = 2 if model == "twice" else 8

    def ask(turn: int) -> bool:
        given = np.random.default_rng(turn).random((1 + turn % 3, 256), np.float32)
        return bool((infer(server, model, given) == given * np.float32(factor)).all())

    with ThreadPoolExecutor(12) as clients:
        assert all(clients.map(ask, range(150)))
    executions = server.metrics()['nv_inference_exec_count{model="twice",version="1"}']
    requests = server.metrics()['nv_inference_request_success{model="twice",version="1"}']
    assert executions < requests


def test_the_pool_of_pinned_memory(server: Serving) -> None:
    given = np.random.default_rng(1).random((16, 256), np.float32)
    used = "nv_pinned_memory_pool_used_bytes"
    seen = Event()

    def ask() -> None:
        while not seen.is_set():
            infer(server, "twice", given)

    with ThreadPoolExecutor() as callers:
        for _ in range(4):
            callers.submit(ask)
        try:
            eventually(lambda: server.metrics()[used] > 0)
        finally:
            seen.set()
    eventually(lambda: server.metrics()[used] == 0)
    assert server.metrics()["nv_pinned_memory_pool_total_bytes"] == 256 << 20


def test_pools_of_other_sizes(machine: CudaMachine, tmp_path: Path) -> None:
    """Requests that do not fit in the pinned memory, and no pool on the GPU: all goes by the host, and is right."""
    torch_model(tmp_path / "models", "twice", CONFIG + "optimization { output_pinned_memory { enable: false } }")
    torch_model(tmp_path / "models", "also_twice", CONFIG + "optimization { input_pinned_memory { } }")
    python_model(tmp_path / "models", "in_python", PYTHON, PYTHON_CONFIG)
    ensemble(tmp_path / "models", "mixed", "twice", "in_python", "also_twice")
    flags = ("--pinned-memory-pool-byte-size=4096", "--cuda-memory-pool-byte-size=0:0")
    with serving(tmp_path / "models", tmp_path / "log", *flags, environment=machine.environment) as server:
        for turn in range(5):
            given = np.random.default_rng(turn).random((1 + 3 * turn, 256), np.float32)
            assert (infer(server, "mixed", given) == given * 8).all()
        metrics = server.metrics()
        assert metrics["nv_pinned_memory_pool_total_bytes"] == 4096
        assert not [name for name in metrics if name.startswith("nerite_cuda_memory_pool")]
        assert copies(server)["to_host"] == 5 * 3


def test_no_room_on_the_gpu(tmp_path: Path) -> None:
    machine = CudaMachine(tmp_path, STAND_IN_CUDA_FRAMEWORKS="1", STAND_IN_CUDA_MEMORY=str(12 << 10))
    torch_model(tmp_path / "models", "twice")
    with serving(tmp_path / "models", tmp_path / "log", environment=machine.environment) as server:
        small, large = np.ones((2, 256), np.float32), np.ones((16, 256), np.float32)
        assert (infer(server, "twice", small) == 2).all()
        for _ in range(2):
            tensor = {"name": "x", "shape": [16, 256], "datatype": "FP32", "data": large.ravel().tolist()}
            status, _, body = server.ask("POST", "/v2/models/twice/infer", {"inputs": [tensor]})
            assert (status, json.loads(body)["error"]) == (503, "CUDA error: out of memory")
            assert (infer(server, "twice", small) == 2).all()


@pytest.mark.parametrize(
    "function", ["cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventSynchronize"]
)
def test_a_call_of_cuda_that_fails(function: str, tmp_path: Path) -> None:
    """It fails one request, with CUDA's message, and the next ones are answered."""
    faults = ",".join(f"{function}:{nth}:cudaErrorLaunchFailure" for nth in (4, 5, 9, 12))
    machine = CudaMachine(tmp_path, STAND_IN_CUDA_FRAMEWORKS="1", STAND_IN_CUDA_FAIL=faults)
    torch_model(tmp_path / "models", "twice")
    with serving(tmp_path / "models", tmp_path / "log", environment=machine.environment) as server:
        given = np.random.default_rng(0).random((2, 256), np.float32)
        tensor = {"name": "x", "shape": [2, 256], "datatype": "FP32", "data": given.ravel().tolist()}
        failed = 0
        for _ in range(20):
            status, _, body = server.ask("POST", "/v2/models/twice/infer", {"inputs": [tensor]})
            answer = json.loads(body)
            if status == 200:
                assert (np.array(answer["outputs"][0]["data"], np.float32).reshape(2, 256) == given * 2).all()
            else:
                failed += 1
                assert "unspecified launch failure" in answer["error"]
        assert 2 <= failed <= 4
        eventually(lambda: server.metrics()["nv_pinned_memory_pool_used_bytes"] == 0)
