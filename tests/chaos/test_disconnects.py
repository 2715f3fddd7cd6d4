"""Clients that go away, at every point of a request: the work stops, and nothing of them is left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from nerite.wire.grpc_service import ModelInferRequest
from serving import IDENTITY, Serving, eventually, pbtxt, python_model, serving

WORK = """
def execute(self, requests):
    (request,) = requests
    value = float(request.inputs()[0].as_numpy().reshape(-1)[0])
    print(f"began {value}.", flush=True)
    until = time.monotonic() + value
    while time.monotonic() < until and not request.is_cancelled():
        time.sleep(0.01)
    print(f"{'cancelled' if request.is_cancelled() else 'finished'} {value}.", flush=True)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[value]], np.float32))])]
"""
ENDLESS = """
def execute(self, requests):
    (request,) = requests
    value = float(request.inputs()[0].as_numpy().reshape(-1)[0])
    sender = request.get_response_sender()
    print(f"began {value}.", flush=True)
    sent = 0
    while not sender.is_cancelled():
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros((1, 10000), np.float32))]))
        sent += 1
        with open("SENT", "w") as file:
            file.write(str(sent))
    print(f"cancelled {value}.", flush=True)
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ONE = pbtxt(batch=1, more="")
values = itertools.count(1000)
"""A number for each request, by which the model's log tells which it is; so many seconds would it take."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("disconnects")
    models = folder / "models"
    python_model(models, "work", WORK, ONE)
    endless = pbtxt(batch=1, more="model_transaction_policy { decoupled: true }")
    python_model(models, "endless", ENDLESS.replace("SENT", str(folder / "sent")), endless)
    python_model(models, "echo", IDENTITY, pbtxt())
    with serving(models, folder / "log", "--grpc-keepalive-time=500", "--grpc-keepalive-timeout=500") as running:
        yield running
    assert "Traceback" not in running.text
    assert not re.search("Found [1-9]", running.text), "requests were left at the end"


def sockets(server: Serving) -> int:
    """How many sockets the server has open. (The memory that tensors lie in has descriptors too, and is used again.)"""
    found = 0
    for descriptor in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(descriptor).startswith("socket:")
    return found


def connections(server: Serving) -> int:
    """How many connections the system has at the server's ports that are not over."""
    ports = {f"{port:04X}" for port in server.ports.values()}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    over = {"06", "0A"}  # TIME_WAIT, LISTEN
    return sum(fields[1].rpartition(":")[2] in ports and fields[3] not in over for fields in lines)


def pending(server: Serving) -> float:
    return sum(value for name, value in server.metrics().items() if "pending_request_count" in name)


def served(server: Serving) -> bool:
    """Whether other clients are answered, and rightly."""
    return server.infer("echo", [3.0]) == [3.0]


class Http:
    """A client of bare bytes."""

    def __init__(self, server: Serving, path: str) -> None:
        host, port = server.http.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self._path = path

    def ask(self, model: str, value: float, part: float = 1.0, padding: int = 0) -> None:
        """Send that part of a request."""
        body: dict[str, Any] = {"INPUT0": value}
        if self._path == "infer":
            body = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}]}
        raw = b" " * padding + json.dumps(body).encode()
        head = b"POST /v2/models/%b/%b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        whole = head % (model.encode(), self._path.encode(), len(raw)) + raw
        self.socket.sendall(whole[: int(len(whole) * part)])

    def first_bytes(self) -> bytes:
        """Wait for the beginning of what comes back."""
        return self.socket.recv(1024)


class Grpc:
    """A client that has HTTP/2 from h2, and a socket."""

    def __init__(self, server: Serving, method: str) -> None:
        host, port = server.grpc.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self._method = method
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self._h2.initiate_connection()

    def ask(self, model: str, value: float, part: float = 1.0, padding: int = 0) -> None:
        """Send that part of a request; a stream of requests stays open."""
        message = ModelInferRequest(
            model_name=model,
            id=" " * padding,
            inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1]}],
            raw_input_contents=[struct.pack("<f", value)],
        ).SerializeToString()
        framed = b"\0" + len(message).to_bytes(4) + message
        path = f"/inference.GRPCInferenceService/{self._method}"
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        self._h2.send_headers(1, [*fields.items(), ("content-type", "application/grpc"), ("te", "trailers")])
        rest = memoryview(framed)[: int(len(framed) * part)]
        while len(rest):
            while not (room := min(self._h2.local_flow_control_window(1), 16_384)):
                self.socket.sendall(self._h2.data_to_send())
                self._h2.receive_data(self.socket.recv(65536))
            self._h2.send_data(1, bytes(rest[:room]))
            rest = rest[room:]
        if part == 1.0 and self._method == "ModelInfer":
            self._h2.end_stream(1)
        self.socket.sendall(self._h2.data_to_send())

    def first_bytes(self) -> bytes:
        """Wait for the beginning of the first message that comes back."""
        while True:
            for event in self._h2.receive_data(self.socket.recv(65536)):
                if isinstance(event, h2.events.DataReceived):
                    return bytes(event.data)
            self.socket.sendall(self._h2.data_to_send())


Client = Http | Grpc
TRANSPORTS: dict[str, Callable[[Serving], Client]] = {
    "HTTP infer": lambda server: Http(server, "infer"),
    "HTTP generate_stream": lambda server: Http(server, "generate_stream"),
    "gRPC unary": lambda server: Grpc(server, "ModelInfer"),
    "gRPC stream": lambda server: Grpc(server, "ModelStreamInfer"),
}
STREAMING = ("HTTP generate_stream", "gRPC stream")


def say_goodbye(client: Client) -> None:
    client.socket.close()


def hang_up(client: Client) -> None:
    """Reset the connection, as a crash does."""
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.close()


LEAVE = {"close": say_goodbye, "reset": hang_up}


@pytest.fixture(params=LEAVE)
def leave(request: pytest.FixtureRequest) -> Callable[[Client], None]:
    found: Callable[[Client], None] = LEAVE[request.param]
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(server: Serving) -> Iterator[None]:
    """Every gauge and every socket is after a test what it was before."""
    # Each answers once: what is made at the first request is there.
    assert served(server)
    assert server.infer("work", [0.0]) == [0.0]
    eventually(lambda: connections(server) == 0)
    before = sockets(server)
    yield
    eventually(lambda: pending(server) == 0, what="requests wait")
    assert served(server)
    assert server.infer("work", [0.0]) == [0.0], "its instance is free"
    eventually(lambda: connections(server) == 0, what="connections are open")
    assert sockets(server) == before


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("padding", [0, 200_000], ids=["small", "large"])
def test_while_it_sends(server: Serving, transport: str, padding: int, leave: Callable[[Client], None]) -> None:
    value = float(next(values))
    client = TRANSPORTS[transport](server)
    client.ask("work", value, 0.9, padding)
    eventually(lambda: connections(server) == 1)
    assert served(server)
    leave(client)
    eventually(lambda: connections(server) == 0)
    assert f"began {value}." not in server.text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_while_it_waits_for_its_turn(server: Serving, transport: str, leave: Callable[[Client], None]) -> None:
    holding, value = float(next(values)), float(next(values))
    holder = TRANSPORTS["HTTP infer"](server)
    holder.ask("work", holding)
    eventually(lambda: f"began {holding}." in server.text)
    client = TRANSPORTS[transport](server)
    client.ask("work", value)
    eventually(lambda: pending(server) == 1)
    assert served(server)
    leave(client)
    eventually(lambda: pending(server) == 0)
    leave(holder)
    eventually(lambda: f"cancelled {holding}." in server.text)
    assert f"began {value}." not in server.text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_while_the_model_computes(server: Serving, transport: str, leave: Callable[[Client], None]) -> None:
    value = float(next(values))
    client = TRANSPORTS[transport](server)
    client.ask("work", value)
    eventually(lambda: f"began {value}." in server.text)
    assert served(server)
    leave(client)
    eventually(lambda: f"cancelled {value}." in server.text)


@pytest.mark.parametrize("transport", STREAMING)
def test_while_responses_come(server: Serving, transport: str, leave: Callable[[Client], None]) -> None:
    value = float(next(values))
    client = TRANSPORTS[transport](server)
    client.ask("endless", value)
    assert client.first_bytes()
    assert served(server)
    leave(client)
    eventually(lambda: f"cancelled {value}." in server.text)


def standstill(server: Serving, sent: Path) -> int:
    """Wait until the model sends no more; return how many responses it has sent."""
    counts: list[int] = []

    def still() -> bool:
        counts.append(int(sent.read_text() or 0) if sent.exists() else 0)
        return len(counts) > 100 and counts[-1] == counts[-100] > 0

    eventually(still, what="the model goes on")
    return counts[-1]


@pytest.mark.parametrize("transport", STREAMING)
def test_while_it_does_not_read(server: Serving, transport: str, leave: Callable[[Client], None]) -> None:
    """The model pauses, what waits for the client is bounded, and it goes with the client."""
    value = float(next(values))
    sent = server.log.parent / "sent"
    sent.unlink(missing_ok=True)
    client = TRANSPORTS[transport](server)
    client.ask("endless", value)
    assert standstill(server, sent) * 40_000 < 40_000_000
    assert served(server)
    leave(client)
    eventually(lambda: f"cancelled {value}." in server.text)


FROZEN = """
import socket, sys, time
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(bytes.fromhex(sys.argv[2]))
print("sent", flush=True)
time.sleep(1000)
"""


class Recorded(Grpc):
    """Makes the bytes of a request, and sends none."""

    def __init__(self) -> None:
        self.socket: Any = self
        self.bytes = b""
        self._method = "ModelStreamInfer"
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self._h2.initiate_connection()

    def sendall(self, data: bytes) -> None:
        self.bytes += data


def test_a_client_that_is_there_and_does_nothing(server: Serving) -> None:
    """Its system still acknowledges what comes, so that only HTTP/2's pings can tell that nobody is at home."""
    value = float(next(values))
    recorded = Recorded()
    recorded.ask("work", value)
    port = server.grpc.rpartition(":")[2]
    client = subprocess.Popen([sys.executable, "-c", FROZEN, port, recorded.bytes.hex()], stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None and client.stdout.readline() == b"sent\n"
        client.send_signal(signal.SIGSTOP)
        eventually(lambda: f"began {value}." in server.text)
        eventually(lambda: f"cancelled {value}." in server.text, 15)  # by default gRPC waits for 20 s
    finally:
        client.kill()
        client.wait()
        client.stdout.close()


@pytest.mark.parametrize("service", ["HTTPService", "GRPCInferenceService", "Metrics"])
def test_the_system_watches_for_peers_that_vanish(server: Serving, service: str) -> None:
    port = server.ports[service]
    with socket.create_connection(("127.0.0.1", port)) as client:
        mine = client.getsockname()[1]

        def timer() -> str:
            """The timer of the server's end, as the system's table has it: 02 is keepalive."""
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(f":{port:04X}") and fields[2].endswith(f":{mine:04X}"):
                    return fields[5][:2]
            return ""

        eventually(lambda: timer() == "02")


def test_uploads_that_break_off_give_their_memory_back(server: Serving) -> None:
    """The memory that large tensors are received into is used again."""
    size = 32 << 20
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "INPUT0",
                    "shape": [1, size // 4],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": size},
                }
            ]
        }
    ).encode()
    start = (
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: %d\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(head), len(head) + size, head)
    )

    def shared() -> int:
        return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[2]) * 4096

    before = shared()
    for _ in range(8):
        client = TRANSPORTS["HTTP infer"](server)
        client.socket.sendall(start + bytes(size - 1))
        hang_up(client)
        eventually(lambda: connections(server) == 0)
    assert shared() - before < 3 * size


BEGINNINGS = {
    "head": (b"POST /v2/models/echo/infer HTT", b"HTTP/1.1 408 Request Timeout"),
    "body": (
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{",
        b"HTTP/1.1 408 Request Timeout",
    ),
    "chunks": (
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nf4240\r\n{",
        b"HTTP/1.1 408 Request Timeout",
    ),
    "a body that was refused": (
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n{",
        b"HTTP/1.1 400 Bad Request",
    ),
}


def dribble(connection: socket.socket) -> bytes:
    """Send a byte now and then until the server hangs up; return what it said."""
    connection.settimeout(0.1)
    answer = b""
    with contextlib.suppress(ConnectionError):
        while True:
            try:
                piece = connection.recv(65536)
            except TimeoutError:
                connection.sendall(b" ")
                continue
            if not piece:
                break
            answer += piece
    return answer


@pytest.mark.parametrize("what", BEGINNINGS)
def test_a_request_that_does_not_come_on(tmp_path: Path, what: str) -> None:
    """Not even a byte now and then keeps it; whoever has nothing under way may stay."""
    beginning, status = BEGINNINGS[what]
    python_model(tmp_path / "models", "echo", IDENTITY, pbtxt())
    with serving(tmp_path / "models", tmp_path / "log", "--http-upload-timeout=1") as patient:
        idle, slow = Http(patient, "infer"), Http(patient, "infer")
        slow.socket.sendall(beginning)
        assert dribble(slow.socket).startswith(status)
        slow.socket.close()
        idle.ask("echo", 3.0)
        assert idle.first_bytes().startswith(b"HTTP/1.1 200")
        idle.socket.close()
