"""PyTriton's interface: servers of callables, with the clients of the interface over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nerite.pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
    PyTritonClientClosedError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelUnavailableError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from nerite.pytriton.decorators import batch, fill_optionals, first_value, sample, triton_context
from nerite.pytriton.exceptions import (
    PyTritonBadParameterError,
    PyTritonInvalidOperationError,
    PyTritonUnrecoverableError,
)
from nerite.pytriton.model_config import ModelConfig, Tensor
from nerite.pytriton.model_config.common import ModelWarmup, WarmupInput
from nerite.pytriton.triton import RemoteTriton, Triton, TritonConfig, TritonSecurityConfig
from pages import ROOT, Page
from serving import eventually, served

PAGE = Page("docs/pytriton.md")
FLOAT = Tensor(name="x", dtype=np.float32, shape=(-1,))
OUT = Tensor(name="y", dtype=np.float32, shape=(-1,))
warmed: list[int] = []


@batch
def double(x: Any) -> Any:
    return {"y": x * 2}


@fill_optionals(t=np.array([2.0], np.float32))
@batch
@first_value("w")
def scaled(x: Any, t: Any, **more: Any) -> Any:
    return {"y": x * t * more.get("w", np.float32(1))}


@sample
def alone(text: Any) -> Any:
    return [np.array([text.item().decode().upper()])]


@batch
def parts(x: Any) -> Any:
    for number in range(3):
        yield {"y": x + np.float32(number)}


async def parts_later(requests: Any) -> Any:
    for number in range(3):
        await asyncio.sleep(0)
        yield [{"y": request["x"] + np.float32(number)} for request in requests]


async def later(requests: Any) -> Any:
    await asyncio.sleep(0.001)
    return [{"y": request["x"]} for request in requests]


def with_parameters(requests: Any) -> Any:
    return [{"y": each["x"] * np.float32(each.parameters["factor"])} for each in requests]


@batch
@triton_context
def failing(x: Any, triton_context: Any) -> Any:
    raise ValueError(f"{triton_context.model_config.model_name} cannot")


class Numbered:
    def __init__(self, number: int) -> None:
        self.number = number

    @batch
    def __call__(self, x: Any) -> Any:
        return [np.full_like(x, self.number)]


@batch
def warm(x: Any) -> Any:
    warmed.append(len(x))
    return [x]


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    config = TritonConfig(
        http_port=0, grpc_port=0, metrics_port=0, http_address="127.0.0.1", grpc_address="127.0.0.1",
        http_header_forward_pattern="head.*", log_verbose=0,
    )  # fmt: skip
    warmup = ModelWarmup("first", 2, {"x": WarmupInput(np.float32, (1,), random_data=True)})
    with Triton(config=config, security_config=TritonSecurityConfig(access_token="secret")) as running:
        running.bind("Double", double, [FLOAT], [OUT], config=ModelConfig(max_batch_size=16), strict=True)
        optional = [Tensor(name=name, dtype=np.float32, shape=(1,), optional=True) for name in ("t", "w")]
        running.bind("Scaled", scaled, [FLOAT, *optional], [OUT], strict=True)
        text = Tensor(name="text", dtype=bytes, shape=(1,))
        running.bind("Alone", alone, [text], [Tensor(dtype=bytes, shape=(1,))], config=ModelConfig(batching=False))
        running.bind("Parts", parts, [FLOAT], [OUT], config=ModelConfig(decoupled=True), strict=True)
        running.bind("PartsLater", parts_later, [FLOAT], [OUT], config=ModelConfig(decoupled=True))
        running.bind("Later", later, [FLOAT], [OUT])
        running.bind("Parameters", with_parameters, [FLOAT], [OUT])
        running.bind("Failing", failing, [FLOAT], [OUT])
        running.bind("Numbered", [Numbered(1), Numbered(2)], [FLOAT], [OUT])
        running.bind("Warm", warm, [FLOAT], [OUT], config=ModelConfig(model_warmup=[warmup]))
        running.run()
        assert running.is_alive() and running.is_connected()
        yield running


@pytest.fixture(params=["http", "grpc"])
def url(triton: Triton, request: pytest.FixtureRequest) -> str:
    scheme: str = request.param
    return f"{scheme}://127.0.0.1:{triton.ports['HTTP' if scheme == 'http' else 'gRPC']}"


ROW = np.array([[1.0, 2.0]], np.float32)


def test_batches_and_samples(url: str) -> None:
    with ModelClient(url, "Double") as client:
        assert client.infer_batch(ROW)["y"].tolist() == [[2, 4]]
        assert client.infer_sample(x=ROW[0])["y"].tolist() == [2, 4]
        assert client.model_config.max_batch_size == 16
        with pytest.raises(PyTritonClientValueError):
            client.infer_batch(ROW, ROW)
    with pytest.raises(PyTritonClientClosedError):
        client.infer_batch(ROW)


def test_optional_inputs(url: str) -> None:
    with ModelClient(url, "Scaled") as client:
        assert client.infer_batch(ROW)["y"].tolist() == [[2, 4]]
        assert client.infer_batch(x=ROW, w=np.array([[3]], np.float32))["y"].tolist() == [[6, 12]]


def test_without_a_batch(url: str) -> None:
    with ModelClient(url, "Alone") as client:
        assert client.infer_sample(np.array(["é"]))["OUTPUT_1"].tolist() == ["É".encode()]


def test_parameters_and_headers(triton: Triton) -> None:
    with ModelClient(f"127.0.0.1:{triton.ports['HTTP']}", "Parameters") as client:
        assert client.infer_batch(ROW, parameters={"factor": 3})["y"].tolist() == [[3, 6]]


def test_errors(url: str) -> None:
    with (
        ModelClient(url, "Failing") as client,
        pytest.raises(PyTritonClientInferenceServerError, match="ValueError: Failing cannot"),
    ):
        client.infer_batch(ROW)
    with (
        ModelClient(url, "Parts") as client,
        pytest.raises(PyTritonClientModelUnavailableError, match="use DecoupledModelClient"),
    ):
        client.infer_batch(ROW)
    with (
        ModelClient(url, "Nothing", init_timeout_s=0.2) as client,
        pytest.raises(PyTritonClientTimeoutError, match=r"Model Nothing is not ready within 0\.2 s"),
    ):
        client.infer_batch(ROW)


def test_futures(url: str) -> None:
    with FuturesModelClient(url, "Double", max_workers=4) as client:
        futures = [client.infer_sample(ROW[0] * number) for number in range(20)]
        assert [future.result()["y"].tolist() for future in futures] == [[2 * n, 4 * n] for n in range(20)]


def test_event_loops(url: str) -> None:
    async def ask() -> list[Any]:
        async with AsyncioModelClient(url, "Later") as client:
            return await asyncio.gather(*(client.infer_sample(ROW[0] * number) for number in range(10)))

    assert [each["y"].tolist() for each in asyncio.run(ask())] == [[n, 2 * n] for n in range(10)]


@pytest.mark.parametrize("model", ["Parts", "PartsLater"])
def test_streams(triton: Triton, model: str) -> None:
    url = f"grpc://127.0.0.1:{triton.ports['gRPC']}"
    with DecoupledModelClient(url, model) as client:
        assert [part["y"].tolist() for part in client.infer_batch(ROW)] == [[[1, 2]], [[2, 3]], [[3, 4]]]
        assert [part["y"].tolist() for part in client.infer_sample(ROW[0])] == [[1, 2], [2, 3], [3, 4]]

    async def read() -> list[Any]:
        async with AsyncioDecoupledModelClient(url, model) as client:
            return [part["y"].tolist() async for part in client.infer_sample(ROW[0])]

    assert asyncio.run(read()) == [[1, 2], [2, 3], [3, 4]]


def test_several_callables_are_instances(triton: Triton) -> None:
    url = f"127.0.0.1:{triton.ports['HTTP']}"
    with FuturesModelClient(url, "Numbered", max_workers=8) as client:
        found = {client.infer_sample(ROW[0]).result()["y"][0] for _ in range(20)}
    assert found <= {1.0, 2.0}


def test_warm_up(triton: Triton) -> None:
    assert warmed[0] == 2


def test_restricted_endpoints(triton: Triton) -> None:
    url = f"127.0.0.1:{triton.ports['HTTP']}"
    assert triton.get_access_token() == "secret"
    with ModelClient(url, "Double") as client, pytest.raises(PyTritonClientInferenceServerError):
        client.load_model()
    with ModelClient(url, "Double", access_token="secret") as client:
        client.load_model()
        assert client.infer_batch(ROW)["y"].tolist() == [[2, 4]]


def test_models_are_bound_while_it_runs(triton: Triton) -> None:
    triton.bind("Bound", double, [FLOAT], [OUT])
    with ModelClient(f"127.0.0.1:{triton.ports['HTTP']}", "Bound") as client:
        assert client.infer_batch(ROW)["y"].tolist() == [[2, 4]]


def test_what_cannot_be_bound(triton: Triton) -> None:
    with pytest.raises(PyTritonBadParameterError, match="bound models have the version 1"):
        triton.bind("Double", double, [FLOAT], [OUT], model_version=2)
    with pytest.raises(PyTritonBadParameterError, match="must be a callable"):
        triton.bind("Double", [], [FLOAT], [OUT])
    with pytest.raises(PyTritonInvalidOperationError, match="nerite route"):
        RemoteTriton("localhost")
    with pytest.raises(PyTritonBadParameterError, match="is none of"):
        TritonSecurityConfig(restricted_endpoints=["everything"])


def test_unrecoverable_errors_end_the_server() -> None:
    def broken(requests: Any) -> Any:
        raise PyTritonUnrecoverableError("out of order")

    config = TritonConfig(http_port=0, grpc_port=0, metrics_port=0, http_address="127.0.0.1")
    triton = Triton(config=config)
    triton.bind("Broken", broken, [FLOAT], [OUT])

    def ask() -> None:
        eventually(lambda: "HTTP" in triton.ports)
        with (
            ModelClient(f"127.0.0.1:{triton.ports['HTTP']}", "Broken") as client,
            pytest.raises(PyTritonClientInferenceServerError, match="out of order"),
        ):
            client.infer_batch(ROW)

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(PyTritonUnrecoverableError, match="out of order"):
        triton.serve()
    asking.join()
    assert not triton.is_alive()


def test_the_page(tmp_path: Path) -> None:
    program = PAGE.block("triton.serve()").replace(
        "with Triton()", "from nerite.pytriton.triton import TritonConfig\n\nwith Triton(config=TritonConfig("
        "http_port=0, grpc_port=0, metrics_port=0, http_address='127.0.0.1'))",
    )  # fmt: skip
    (tmp_path / "server.py").write_text(program)
    with served([sys.executable, "server.py"], tmp_path / "log", "Started HTTPService at") as running:
        client = PAGE.block("ModelClient(").replace("localhost:8000", running.http)
        done = subprocess.run([sys.executable, "-c", client], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "[2.]" in done.stdout
