"""What flags change that no other test starts a server with."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event, PingAckReceived, PingReceived, ResponseReceived
from tritonclient.grpc.service_pb2 import ModelInferRequest

from serving import IDENTITY, NERITE, PATIENCE, Serving, pbtxt, python_model, serving


@pytest.fixture
def models(tmp_path: Path) -> Path:
    python_model(tmp_path / "models", "identity", IDENTITY)
    return tmp_path / "models"


class Http2Client:
    """A connection to the gRPC port, frame by frame."""

    def __init__(self, server: Serving) -> None:
        self.socket = socket.create_connection(server.grpc.split(":"), PATIENCE)
        self.http2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self.http2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.socket.sendall(self.http2.data_to_send())

    def events(self) -> Iterator[Event]:
        """Yield what the server says, up to its GOAWAY; then wait for the end of the connection."""
        received = b""
        while data := self.socket.recv(65_536):
            received += data
            # Frame by frame, as h2 takes none after a GOAWAY.
            while len(received) >= 9 and len(received) >= (size := 9 + int.from_bytes(received[:3])):
                events = self.http2.receive_data(received[:size])
                received = received[size:]
                yield from events
                if any(isinstance(event, ConnectionTerminated) for event in events):
                    while self.socket.recv(65_536):
                        pass
                    return
            self.flush()


@pytest.fixture
def connected() -> Iterator[Callable[[Serving], Http2Client]]:
    clients = []

    def connect(server: Serving) -> Http2Client:
        clients.append(Http2Client(server))
        return clients[-1]

    yield connect
    for client in clients:
        client.socket.close()


def test_two_servers_on_one_port(models: Path, tmp_path: Path) -> None:
    shared = ["--reuse-http-port=true", "--reuse-grpc-port=true"]
    with serving(models, tmp_path / "first", *shared) as first:
        same = [f"--http-port={first.http.split(':')[1]}", f"--grpc-port={first.grpc.split(':')[1]}"]
        with serving(models, tmp_path / "second", *shared, *same) as second:
            assert (first.http, first.grpc) == (second.http, second.grpc)
        refused = subprocess.run(
            [NERITE, "serve", models, *same, "--metrics-port=0"], capture_output=True, text=True, timeout=PATIENCE
        )
        assert (refused.returncode, "already in use" in refused.stderr + refused.stdout) == (1, True)


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_levels_of_the_log(tmp_path: Path, level: str) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY)
    python_model(tmp_path / "models", "broken", "raise ValueError(5)")

    def letters(*flags: str) -> set[str]:
        ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--grpc-infer-thread-count=4")
        run = subprocess.run(
            [NERITE, "serve", tmp_path / "models", *ports, *flags], capture_output=True, text=True, timeout=PATIENCE
        )
        assert run.returncode == 1
        return {line[0] for line in (run.stdout + run.stderr).splitlines() if line[1:5].isdigit()}

    assert letters() == {"I", "W", "E"}
    assert letters(f"--log-{level}=false") == {"I", "W", "E"} - {level[0].upper()}


def test_a_configuration_of_another_name(models: Path, tmp_path: Path) -> None:
    (models / "identity" / "configs").mkdir()
    (models / "identity" / "configs" / "large.pbtxt").write_text(pbtxt(batch=64))
    with serving(models, tmp_path / "log", "--model-config-name=large") as server:
        assert server.json("GET", "/v2/models/identity/config")["max_batch_size"] == 64


def test_metrics_on_an_address_of_their_own(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", "--metrics-address=127.0.0.2") as server:
        port = server.ports["Metrics"]
        with closing(socket.create_connection(("127.0.0.2", port), PATIENCE)):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), PATIENCE)


def test_ports_that_sagemaker_allows(models: Path) -> None:
    flags = ("--allow-sagemaker=true", "--sagemaker-safe-port-range=18990-18999", "--sagemaker-port=18990")
    run = subprocess.run(
        [NERITE, "serve", models, *flags, "--http-port=18000"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert run.returncode == 1
    assert "cannot listen to HTTP requests at port 18000, allowed port range is [18990, 18999]" in run.stderr


@pytest.mark.parametrize("level", ["none", "low", "medium", "high"])
def test_answers_are_compressed(
    models: Path, tmp_path: Path, connected: Callable[[Serving], Http2Client], level: str
) -> None:
    with serving(models, tmp_path / "log", f"--grpc-infer-response-compression-level={level}") as server:
        client = connected(server)
        request = ModelInferRequest(model_name="identity", raw_input_contents=[bytes(4 * 64)])
        request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 64])
        message = request.SerializeToString()
        client.http2.send_headers(
            1,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", "/inference.GRPCInferenceService/ModelInfer"),
                (":authority", server.grpc),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
                ("grpc-accept-encoding", "identity,deflate,gzip"),
            ],
        )
        client.http2.send_data(1, b"\0" + len(message).to_bytes(4) + message, end_stream=True)
        client.flush()
        head = next(event for event in client.events() if isinstance(event, ResponseReceived))
        encoding = dict(head.headers or ()).get("grpc-encoding", "identity")
        assert (encoding == "identity") == (level == "none")


def test_clients_are_asked_whether_they_are_there(
    models: Path, tmp_path: Path, connected: Callable[[Serving], Http2Client]
) -> None:
    """Once, as the client sends no data; then the connection has lived as long as it may."""
    flags = (
        "--grpc-keepalive-time=100",
        "--grpc-keepalive-permit-without-calls=true",
        "--grpc-http2-max-pings-without-data=1",
        "--grpc-max-connection-age=2000",
        "--grpc-max-connection-age-grace=100",
    )
    with serving(models, tmp_path / "log", *flags) as server:
        events = list(connected(server).events())
        assert sum(isinstance(event, PingReceived) for event in events) == 1
        assert isinstance(events[-1], ConnectionTerminated)


@pytest.mark.parametrize(
    "flags",
    [
        ("--grpc-keepalive-permit-without-calls=true", "--grpc-http2-min-recv-ping-interval-without-data=0"),
        ("--grpc-http2-max-ping-strikes=20",),
    ],
)
def test_clients_that_may_ask_often(
    models: Path, tmp_path: Path, connected: Callable[[Serving], Http2Client], flags: tuple[str, ...]
) -> None:
    with serving(models, tmp_path / "log", *flags) as server:
        client = connected(server)
        asked = [number.to_bytes(8) for number in range(10)]
        for each in asked:
            client.http2.ping(each)
        client.flush()
        answers = (event.ping_data for event in client.events() if isinstance(event, PingAckReceived))
        assert list(islice(answers, len(asked))) == asked


def test_clients_that_ask_too_often(models: Path, tmp_path: Path, connected: Callable[[Serving], Http2Client]) -> None:
    flags = ("--grpc-http2-min-recv-ping-interval-without-data=60000", "--grpc-http2-max-ping-strikes=3")
    with serving(models, tmp_path / "log", *flags) as server:
        client = connected(server)
        for number in range(5):
            client.http2.ping(number.to_bytes(8))
        client.flush()
        (end,) = [event for event in client.events() if isinstance(event, ConnectionTerminated)]
        assert (end.error_code, end.additional_data) == (ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_pings")


def test_the_name_of_the_server(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", "--id=box") as server:
        assert server.json("GET", "/v2")["name"] == "box"


def test_configurations_that_are_not_completed(models: Path, tmp_path: Path) -> None:
    (models / "identity" / "config.pbtxt").unlink()
    flags = ("--disable-auto-complete-config", "--exit-on-error=false")
    with serving(models, tmp_path / "log", *flags) as server:
        (model,) = server.json("POST", "/v2/repository/index")
        assert "config.pbtxt" in model["reason"]


def test_a_body_of_more_than_it_may_have(models: Path, tmp_path: Path) -> None:
    with serving(models, tmp_path / "log", "--http-max-input-size=1000") as server:
        status, _, body = server.ask("POST", "/v2/models/identity/infer", {"id": "x" * 1000})
        assert (status, b"--http-max-input-size" in body) == (400, True)
