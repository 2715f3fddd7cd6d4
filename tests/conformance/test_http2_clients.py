"""HTTP/2 clients of others against a running server: grpc-js, grpcio (sync and aio), h2load, nghttp."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from nerite.wire.grpc_service import ModelInferRequest, ModelInferResponse
from serving import IDENTITY, PATIENCE, Serving, pbtxt, python_model, serving
from tools import install_node_packages, require

ROOT = Path(__file__).resolve().parents[2]
NODE = Path(__file__).with_name("node")
INFER = "/inference.GRPCInferenceService/ModelInfer"
SLEEPY = """
def execute(self, requests):
    for request in requests:
        time.sleep(float(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().reshape(-1)[0]))
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
        )
        for request in requests
    ]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("http2")
    python_model(folder / "models", "identity", IDENTITY)
    python_model(folder / "models", "sleepy", SLEEPY, pbtxt(batch=1, more=""))
    with serving(folder / "models", folder / "log") as running:
        yield running


def question(size: int, model: str = "identity", request_id: str = "") -> bytes:
    return ModelInferRequest(
        model_name=model,
        id=request_id,
        inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": [1, size]}],
        raw_input_contents=[np.arange(size, dtype=np.float32).tobytes()],
    ).SerializeToString()


def check(answer: bytes, size: int, request_id: str = "") -> None:
    response = ModelInferResponse.FromString(answer)
    assert response.id == request_id
    assert response.raw_output_contents[0] == np.arange(size, dtype=np.float32).tobytes()


HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.mark.timeout(180)
def test_grpc_js(server: Serving) -> None:
    install_node_packages(NODE)
    done = subprocess.run(
        ["node", NODE / "client.js", server.grpc, ROOT / "src"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["live"] == {"live": True}
    assert got["metadata"] == "identity"
    assert got["sizes"] == [True] * 5
    assert got["together"] == [True] * 64
    assert got["large_together"] == [True] * 8
    assert got["unknown"] == {"code": 5, "details": "Request for unknown model: 'nobody' is not found"}
    assert got["wrong"]["code"] == 3
    assert got["deadline"]["code"] == 4
    assert got["cancelled"]["code"] == 1


@pytest.mark.parametrize("window", [None, 65535])
def test_grpcio_sync(server: Serving, window: int | None) -> None:
    options = list(UNLIMITED)
    if window is not None:
        # Without probing for bandwidth the client stays at the window that HTTP/2 begins with.
        options += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window)]
    with grpc.insecure_channel(server.grpc, options) as channel:
        infer = channel.unary_unary(INFER)
        for size in (0, 1, 100, 16_000, 150_528, 3_000_000):
            check(infer(question(size, request_id=str(size)), timeout=30), size, str(size))
        futures = [(size, infer.future(question(size), timeout=30)) for size in (5, 70_000, 200_000) for _ in range(10)]
        for size, future in futures:
            check(future.result(), size)


def test_grpcio_aio(server: Serving) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(server.grpc, UNLIMITED) as channel:
            infer = channel.unary_unary(INFER)

            async def one(size: int) -> None:
                check(await infer(question(size), timeout=30), size)

            await asyncio.gather(*(one(size) for size in [1, 1000, 50_000, 400_000] * 8))

    asyncio.run(run())


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests(server: Serving, compression: grpc.Compression) -> None:
    with grpc.insecure_channel(
        server.grpc, [*UNLIMITED, ("grpc.default_compression_algorithm", compression.value)]
    ) as channel:
        infer = channel.unary_unary(INFER)
        for size in (16, 100_000):
            check(infer(question(size), compression=compression, timeout=30), size)


def test_metadata_that_is_too_large_is_refused_alone(server: Serving) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(INFER)
        with pytest.raises(grpc.RpcError):
            infer(question(1), metadata=[("big", "x" * 40_000)], timeout=10)
        check(infer(question(1), timeout=10), 1)


@pytest.mark.parametrize(("connections", "streams"), [(1, 1), (1, 100), (8, 8)])
@pytest.mark.parametrize("size", [16, 150_528])
def test_h2load(server: Serving, tmp_path: Path, connections: int, streams: int, size: int) -> None:
    require("h2load")
    message = question(size)
    body = tmp_path / "body"
    body.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    count = 2000 if size == 16 else 200
    done = subprocess.run(
        [
            "h2load",
            f"-n{count}",
            f"-c{connections}",
            f"-m{streams}",
            "-d",
            body,
            *HEADERS,
            f"http://{server.grpc}{INFER}",
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    (succeeded,) = re.findall(r"(\d+) succeeded", done.stdout)
    (status,) = re.findall(r"status codes: (\d+) 2xx", done.stdout)
    assert (int(succeeded), int(status)) == (count, count)


def test_nghttp_sees_headers_and_trailers(server: Serving, tmp_path: Path) -> None:
    require("nghttp")
    message = question(4)
    body = tmp_path / "body"
    body.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    done = subprocess.run(
        ["nghttp", "-v", "-d", body, *HEADERS, f"http://{server.grpc}{INFER}"],
        capture_output=True,
        timeout=20,
        check=True,
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout.decode("latin-1"))
    assert ":status: 200" in plain
    assert "content-type: application/grpc" in plain
    assert "grpc-status: 0" in plain
    assert "PROTOCOL_ERROR" not in plain


def test_http1_on_the_grpc_port_is_told_so(server: Serving) -> None:
    import http.client

    connection = http.client.HTTPConnection(server.grpc, timeout=10)
    connection.request("GET", "/v2/health/live")
    answer = connection.getresponse()
    assert answer.status == 400
    assert b"gRPC port" in answer.read()
