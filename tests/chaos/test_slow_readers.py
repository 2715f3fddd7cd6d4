"""Clients that ask and do not read: what waits for them is bounded, and others are served."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path

import h2.connection
import h2.settings
import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from faults import Bystanders, resident
from nerite.wire.grpc_service import ModelInferRequest
from serving import IDENTITY, Serving, eventually, pbtxt, python_model, serving

LARGE = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros((1, 1000000), np.float32))])
        for _ in requests
    ]
"""
ANSWER = 4_000_000
HELD = 40 * ANSWER
"""What the server may hold for one client: far less than what it asks for."""


def settled(server: Serving) -> int:
    """Bytes of memory, once they do not grow any more."""
    last, now = 0, resident(server)
    while now > last + 1_000_000:
        time.sleep(0.5)
        last, now = now, resident(server)
    return now


@pytest.mark.timeout(120)
def test_over_http(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "large", LARGE, pbtxt(batch=8))
    with serving(tmp_path / "models", tmp_path / "log") as server:
        server.infer("large", [1.0])
        before = resident(server)
        request = body_of("large")
        host, port = server.http.split(":")
        with socket.create_connection((host, int(port))) as client:
            client.setblocking(False)
            sent = 0
            try:
                while sent < 10_000:
                    client.send(request)
                    sent += 1
            except BlockingIOError:
                pass
            assert sent > 100
            assert settled(server) - before < HELD
            assert len(server.infer("large", [1.0])) == 1_000_000


def body_of(model: str) -> bytes:
    body = json.dumps(
        {
            "inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}],
            "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
        }
    ).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def requests_of(client: h2.connection.H2Connection, count: int, model: str = "large") -> bytes:
    """The bytes of so many calls, with windows that let all the answers come."""
    client.initiate_connection()
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
    client.increment_flow_control_window(2**30)
    message = ModelInferRequest(
        model_name=model,
        inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1]}],
        raw_input_contents=[b"\0\0\0\0"],
    ).SerializeToString()
    for _ in range(count):
        stream = client.get_next_available_stream_id()
        path = "/inference.GRPCInferenceService/ModelInfer"
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        client.send_headers(stream, [*fields.items(), ("content-type", "application/grpc"), ("te", "trailers")])
        client.send_data(stream, b"\0" + len(message).to_bytes(4) + message, end_stream=True)
    return client.data_to_send()


def test_over_grpc(tmp_path: Path) -> None:
    """Each call has its answer kept, and no more; they go with the client, and nobody else has to wait."""
    python_model(tmp_path / "models", "large", LARGE, pbtxt(batch=8))
    with serving(tmp_path / "models", tmp_path / "log") as server:
        host, port = server.grpc.split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(requests_of(h2.connection.H2Connection(), 30))
            done = 'nv_inference_request_success{model="large",version="1"}'
            eventually(lambda: server.metrics().get(done) == 30)
            with grpcclient.InferenceServerClient(server.grpc) as other:
                tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
                tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
                assert other.infer("large", [tensor]).as_numpy("OUTPUT0").nbytes == ANSWER
        # What the answers lay in is used again: without that the next ones would need as much once more.
        held = resident(server)
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(requests_of(h2.connection.H2Connection(), 30))
            eventually(lambda: server.metrics().get(done) == 61)
            assert resident(server) < held + 10 * ANSWER


READERS = 10
HUGE = 32_000_000


@pytest.mark.timeout(180)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_many_that_do_not_read(tmp_path: Path, protocol: str) -> None:
    """Their answers are there once, others do not wait for them, and the memory goes when they do."""
    python_model(tmp_path / "models", "huge", LARGE.replace("1000000", str(HUGE // 4)), pbtxt(batch=1, more=""))
    python_model(tmp_path / "models", "other", IDENTITY)
    with serving(tmp_path / "models", tmp_path / "log") as server, contextlib.ExitStack() as readers:
        before = resident(server)
        host, port = (server.http if protocol == "http" else server.grpc).split(":")
        done = 'nv_inference_request_success{model="huge",version="1"}'
        with Bystanders(server):
            for _ in range(READERS):
                line = readers.enter_context(socket.create_connection((host, int(port))))
                over_grpc = requests_of(h2.connection.H2Connection(), 1, "huge")
                line.sendall(body_of("huge") if protocol == "http" else over_grpc)
            eventually(lambda: server.metrics().get(done) == READERS)
            # What a segment of memory has beyond an answer is not touched.
            assert resident(server) - before < READERS * HUGE * 1.2
            readers.close()
            eventually(lambda: resident(server) - before < 2 * HUGE)
