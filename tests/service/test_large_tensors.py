"""Tensors of every size, both protocols, worker and in process: the same bytes come back, and memory does not grow."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from serving import IDENTITY, IN_PROCESS, Serving, pbtxt, python_model, serving

SIZES = (0, 1, 7, 1000, 8191, 8192, 16384, 150528, 1 << 20, 5_000_001)
KEEPER = """
def initialize(self, args):
    self.kept = []

def execute(self, requests):
    arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
    self.kept = (self.kept + arrays)[-8:]
    total = np.array([[sum(float(kept.reshape(-1)[0]) for kept in self.kept)]], dtype=np.float32)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", total)]) for array in arrays]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("large")
    python_model(folder / "models", "apart", IDENTITY)
    python_model(folder / "models", "within", IDENTITY, pbtxt(parameters=IN_PROCESS))
    python_model(folder / "models", "keeper", KEEPER, pbtxt(batch=1, more=""))
    with serving(folder / "models", folder / "log") as running:
        yield running


def resident(pid: int) -> int:
    """Return the memory of a process in MiB, shared pages included."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 // (1 << 20)


@pytest.mark.parametrize("model", ["apart", "within"])
@pytest.mark.parametrize("size", SIZES)
def test_same_bytes_over_http(server: Serving, model: str, size: int) -> None:
    array = np.random.default_rng(size).random((1, size), dtype=np.float32)
    with httpclient.InferenceServerClient(server.http, network_timeout=30) as client:
        tensor = httpclient.InferInput("INPUT0", array.shape, "FP32")
        tensor.set_data_from_numpy(array)
        answer = client.infer(model, [tensor]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(answer, array)


@pytest.mark.parametrize("model", ["apart", "within"])
@pytest.mark.parametrize("size", SIZES)
def test_same_bytes_over_grpc(server: Serving, model: str, size: int) -> None:
    array = np.random.default_rng(size).random((1, size), dtype=np.float32)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        tensor = grpcclient.InferInput("INPUT0", array.shape, "FP32")
        tensor.set_data_from_numpy(array)
        answer = client.infer(model, [tensor]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(answer, array)


@pytest.mark.parametrize("model", ["apart", "within"])
def test_many_at_once_get_their_own(server: Serving, model: str) -> None:
    def call(seed: int) -> None:
        array = np.full((1, 20_000 + seed), seed, dtype=np.float32)
        tensor = grpcclient.InferInput("INPUT0", array.shape, "FP32")
        tensor.set_data_from_numpy(array)
        with grpcclient.InferenceServerClient(server.grpc) as client:
            for _ in range(5):
                np.testing.assert_array_equal(client.infer(model, [tensor]).as_numpy("OUTPUT0"), array)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(24)))


def test_a_model_may_keep_its_inputs(server: Serving) -> None:
    with httpclient.InferenceServerClient(server.http, network_timeout=30) as client:
        for number in range(30):
            array = np.full((1, 150_528), number, dtype=np.float32)
            tensor = httpclient.InferInput("INPUT0", array.shape, "FP32")
            tensor.set_data_from_numpy(array)
            answer = client.infer("keeper", [tensor]).as_numpy("OUTPUT0")
            assert answer[0][0] == sum(range(max(0, number - 7), number + 1))


def test_memory_does_not_grow(server: Serving) -> None:
    def rounds(count: int) -> None:
        array = np.ones((1, 150_528), dtype=np.float32)
        with httpclient.InferenceServerClient(server.http, network_timeout=30) as client:
            tensor = httpclient.InferInput("INPUT0", array.shape, "FP32")
            tensor.set_data_from_numpy(array)
            for _ in range(count):
                client.infer("apart", [tensor])

    rounds(50)
    worker = server.workers()["apart_0_0"]
    before = resident(server.process.pid), resident(worker)
    rounds(400)
    after = resident(server.process.pid), resident(worker)
    assert after[0] - before[0] < 20
    assert after[1] - before[1] < 20
