"""A client that goes away, or gives up, takes its request along: in the queue, and at the model."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from serving import HELD, PATIENCE, Serving, eventually, let_go, pbtxt, python_model, serving

PENDING = 'nv_inference_pending_request_count{model="patient",version="1"}'
CANCELED = 'nv_inference_request_failure{model="patient",reason="CANCELED",version="1"}'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    python_model(models, "patient", HELD, pbtxt(batch=1, more=""))
    return models


def http_request(server: Serving, value: float) -> socket.socket:
    host, port = server.http.split(":")
    raw = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}]}).encode()
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b"POST /v2/models/patient/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    return connection


def grpc_input(value: float) -> list[grpcclient.InferInput]:
    tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[value]], dtype=np.float32))
    return [tensor]


def test_http_client_hangs_up_in_the_queue(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log") as server:
        first = http_request(server, -1)
        eventually(lambda: "executes -1" in server.text)
        second = http_request(server, 0.25)
        eventually(lambda: server.metrics()[PENDING] == 1)
        second.close()
        eventually(lambda: server.metrics()[PENDING] == 0)
        assert server.metrics()[CANCELED] == 1
        let_go(repository / "patient")
        assert first.recv(15) == b"HTTP/1.1 200 OK"
        first.close()
        assert server.infer("patient", [0.0]) == [0.0]
        assert "executes 0.25" not in server.text


def test_http_client_hangs_up_while_the_model_runs(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log") as server:
        running = http_request(server, -1)
        eventually(lambda: "executes -1" in server.text)
        running.close()
        let_go(repository / "patient")
        assert server.infer("patient", [0.0]) == [0.0]
        assert "Traceback" not in server.text


def test_grpc_call_is_cancelled_in_the_queue(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log") as server, grpcclient.InferenceServerClient(server.grpc) as client:
        first = client.async_infer("patient", grpc_input(-1), lambda result, error: None)
        eventually(lambda: "executes -1" in server.text)
        second = client.async_infer("patient", grpc_input(0.25), lambda result, error: None)
        eventually(lambda: server.metrics()[PENDING] == 1)
        second.cancel()
        eventually(lambda: server.metrics()[PENDING] == 0)
        assert server.metrics()[CANCELED] == 1
        first.cancel()
        let_go(repository / "patient")
        assert server.infer("patient", [0.0]) == [0.0]
        assert "executes 0.25" not in server.text


def test_grpc_deadline(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log") as server, grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(grpcclient.InferenceServerException, match="Deadline Exceeded"):
            client.infer("patient", grpc_input(-1), client_timeout=0.3)
        let_go(repository / "patient")


def test_the_server_keeps_a_deadline_itself(repository: Path, tmp_path: Path) -> None:
    """A client that only sends the timeout, and does not watch it, is answered DEADLINE_EXCEEDED."""
    from nerite.wire.grpc_service import ModelInferRequest

    with serving(repository, tmp_path / "log") as server:
        import h2.config
        import h2.connection
        import h2.events

        h2_client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        h2_client.initiate_connection()
        h2_client.send_headers(
            1,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":authority", "x"),
                (":path", "/inference.GRPCInferenceService/ModelInfer"),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
                ("grpc-timeout", "200m"),
            ],
        )
        message = ModelInferRequest(
            model_name="patient",
            inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1]}],
            raw_input_contents=[np.array([-1.0], dtype=np.float32).tobytes()],
        ).SerializeToString()
        h2_client.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
        host, port = server.grpc.split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(h2_client.data_to_send())
            trailers: dict[str, str] = {}
            while "grpc-status" not in trailers:
                for event in h2_client.receive_data(connection.recv(65536)):
                    if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                        trailers.update(event.headers)
        let_go(repository / "patient")
        assert trailers["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
