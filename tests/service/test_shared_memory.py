"""Tensors in system shared memory, by NVIDIA's clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from regions import region
from serving import HELD, IN_PROCESS, Serving, eventually, let_go, pbtxt, python_model, serving

DOUBLE = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy() * 2)])
        for request in requests
    ]
"""
COUNT = 150_528
BYTES = 4 * COUNT


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    models = tmp_path / "models"
    python_model(models, "double", DOUBLE)
    python_model(models, "inside", DOUBLE, pbtxt(parameters=IN_PROCESS))
    python_model(models, "held", HELD)
    with serving(models, tmp_path / "log", "--allow-client-shm=true") as running:
        yield running


def four_there_and_back() -> tuple[Any, Any]:
    """Four numbers in the region "in", and the wish for four in the region "out": gRPC's."""
    tensor = grpcclient.InferInput("INPUT0", [1, 4], "FP32")
    tensor.set_shared_memory("in", 16)
    wanted = grpcclient.InferRequestedOutput("OUTPUT0")
    wanted.set_shared_memory("out", 16)
    return tensor, wanted


def of(server: Serving, protocol: str) -> tuple[Any, Any]:
    module: Any = httpclient if protocol == "http" else grpcclient
    return module, module.InferenceServerClient(server.http if protocol == "http" else server.grpc)


@pytest.mark.parametrize("model", ["double", "inside"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_both_ways(server: Serving, protocol: str, model: str) -> None:
    module, client = of(server, protocol)
    with ExitStack() as stack:
        there = stack.enter_context(region(client, "in", BYTES))
        back = stack.enter_context(region(client, "out", BYTES + 64))
        tensor = module.InferInput("INPUT0", [1, COUNT], "FP32")
        tensor.set_shared_memory("in", BYTES)
        wanted = module.InferRequestedOutput("OUTPUT0")
        wanted.set_shared_memory("out", BYTES, offset=64)
        for number in range(3):
            sent = np.full((1, COUNT), number + 1.5, np.float32)
            shm.set_shared_memory_region(there, [sent])
            answer = client.infer(model, [tensor], outputs=[wanted])
            assert answer.get_output("OUTPUT0") is not None
            got = shm.get_contents_as_numpy(back, np.float32, [1, COUNT], offset=64)
            assert np.array_equal(got, sent * 2)
            assert np.array_equal(shm.get_contents_as_numpy(there, np.float32, [1, COUNT]), sent)
    client.close()


@pytest.mark.parametrize("model", ["mischief", "mischief_inside"])
def test_a_model_changes_what_it_is_given_and_not_what_the_client_has(tmp_path: Path, model: str) -> None:
    mischief = """
def execute(self, requests):
    array = requests[0].inputs()[0].as_numpy()
    array[:] = 0
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)])]
"""
    python_model(tmp_path / "models", "mischief", mischief)
    python_model(tmp_path / "models", "mischief_inside", mischief, pbtxt(parameters=IN_PROCESS))
    with serving(tmp_path / "models", tmp_path / "log", "--allow-client-shm=true") as server:
        _, client = of(server, "http")
        with region(client, "in", BYTES) as there:
            sent = np.arange(COUNT, dtype=np.float32)
            shm.set_shared_memory_region(there, [sent])
            tensor = httpclient.InferInput("INPUT0", [1, COUNT], "FP32")
            tensor.set_shared_memory("in", BYTES)
            assert not client.infer(model, [tensor]).as_numpy("OUTPUT0").any()
            assert np.array_equal(shm.get_contents_as_numpy(there, np.float32, [COUNT]), sent)
        client.close()


def test_a_stream(server: Serving) -> None:
    _, client = of(server, "grpc")
    came: list[Any] = []
    done = threading.Event()

    def answered(result: Any, error: Any) -> None:
        came.append(error or result)
        done.set()

    with region(client, "in", 16) as there, region(client, "out", 16) as back:
        shm.set_shared_memory_region(there, [np.arange(4, dtype=np.float32)])
        tensor, wanted = four_there_and_back()
        client.start_stream(answered)
        client.async_stream_infer("double", [tensor], outputs=[wanted])
        assert done.wait(20)
        client.stop_stream()
        assert shm.get_contents_as_numpy(back, np.float32, [4]).tolist() == [0, 2, 4, 6]
    client.close()


def test_a_region_that_is_unregistered_in_use_stays_until_the_answer(server: Serving, tmp_path: Path) -> None:
    _, client = of(server, "http")
    _, other = of(server, "grpc")
    with region(client, "in", 16) as there, region(client, "out", 16) as back:
        shm.set_shared_memory_region(there, [np.arange(-1, 3, dtype=np.float32)])
        tensor, wanted = four_there_and_back()
        done = threading.Event()
        other.async_infer("held", [tensor], lambda result, error: done.set(), outputs=[wanted])
        eventually(lambda: "executes" in server.text)
        client.unregister_system_shared_memory("in")
        client.unregister_system_shared_memory()
        assert [each["name"] for each in client.get_system_shared_memory_status()] == ["in", "out"]
        with pytest.raises(InferenceServerException, match="shared memory region 'in' already in manager"):
            client.register_system_shared_memory("in", "/nobody", 16)
        let_go(tmp_path / "models" / "held")
        assert done.wait(20)
        assert client.get_system_shared_memory_status() == []
        assert shm.get_contents_as_numpy(back, np.float32, [4]).tolist() == [-1, 0, 1, 2]
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'in'"):
            other.infer("double", [tensor])
    client.close()
    other.close()


def test_disabled_unless_the_flag_is_given(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "double", DOUBLE)
    with serving(tmp_path / "models", tmp_path / "log") as server:
        for protocol in ("http", "grpc"):
            _, client = of(server, protocol)
            with pytest.raises(InferenceServerException, match="--allow-client-shm=true"):
                client.register_system_shared_memory("in", "/nobody", 16)
            assert (
                not client.get_system_shared_memory_status(as_json=True).get("regions")
                if protocol == "grpc"
                else (client.get_system_shared_memory_status() == [])
            )
            client.close()
