"""Tensors of every size, both protocols, worker and in process: the same bytes come back, and memory does not grow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

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

CALLS = """
def execute(self, requests):
    calls = [pb_utils.InferenceRequest(
        model_name="within", requested_output_names=["OUTPUT0"], inputs=request.inputs()
    ) for request in requests]
    return [pb_utils.InferenceResponse(call.exec().output_tensors()) for call in calls]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
REFUSES = "def execute(self, requests):\n    raise pb_utils.TritonModelException('no')"
CACHED = "dynamic_batching {} response_cache { enable: true }"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("large")
    python_model(folder / "models", "apart", IDENTITY)
    python_model(folder / "models", "within", IDENTITY, pbtxt(parameters=IN_PROCESS))
    python_model(folder / "models", "keeper", KEEPER, pbtxt(batch=1, more=""))
    python_model(folder / "models", "calls", CALLS)
    python_model(folder / "models", "cached", IDENTITY, pbtxt(more=CACHED, parameters=IN_PROCESS))
    python_model(folder / "models", "decoupled", IDENTITY, pbtxt(more=DECOUPLED))
    python_model(folder / "models", "refuses", REFUSES)
    with serving(folder / "models", folder / "log", "--cache-config=local,size=1048576") as running:
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


def test_memory_that_workers_share_has_no_name(server: Serving) -> None:
    """A name could be told to a client, who would then read and write what others have sent."""
    for model in ("apart", "within"):
        server.infer(model, [1.0] * 150_528)
    shared = []
    for pid in (server.process.pid, *server.workers().values()):
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        shared += [line.split(maxsplit=5)[-1] for line in maps if line.split()[1] == "rw-s"]
    assert any(name.startswith("/memfd:nerite") for name in shared)
    assert not any(name.startswith(("/dev/shm", "/tmp")) for name in shared)


def test_a_model_may_keep_its_inputs(server: Serving) -> None:
    with httpclient.InferenceServerClient(server.http, network_timeout=30) as client:
        for number in range(30):
            array = np.full((1, 150_528), number, dtype=np.float32)
            tensor = httpclient.InferInput("INPUT0", array.shape, "FP32")
            tensor.set_data_from_numpy(array)
            answer = client.infer("keeper", [tensor]).as_numpy("OUTPUT0")
            assert answer[0][0] == sum(range(max(0, number - 7), number + 1))


@pytest.mark.parametrize("library", [httpclient, grpcclient], ids=["http", "grpc"])
@pytest.mark.parametrize("model", ["apart", "calls", "cached", "decoupled", "none", "refuses"])
def test_a_request_is_freed_when_it_is_answered(server: Serving, model: str, library: Any) -> None:
    """And not when the collector comes: it counts objects, and a hundred of these requests are few."""
    array = np.zeros((1, 2_000_000), np.float32)
    tensor = library.InferInput("INPUT0", array.shape, "FP32")
    tensor.set_data_from_numpy(array)
    with library.InferenceServerClient(server.http if library is httpclient else server.grpc) as client:
        before = 0
        for number in range(20):
            with contextlib.suppress(InferenceServerException):
                client.infer(model, [tensor])
            before = before or (resident(server.process.pid) if number == 4 else 0)
    assert resident(server.process.pid) - before < 60


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
