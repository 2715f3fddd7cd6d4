"""Clients that ask without a pause, each over one connection, and tell which of their connections were lost."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import h2.connection
import h2.exceptions
import numpy as np

from nerite.wire.grpc_service import ModelInferRequest
from raw_grpc import INFER, STREAM, RawGrpc, framed
from serving import PATIENCE, Serving, binary_request, eventually

SMALL: Final = np.arange(4, dtype=np.float32).reshape(1, -1)
LARGE: Final = np.arange(150_000, dtype=np.float32).reshape(1, -1)
"""600 KB."""
SEQUENCE: Final = 5
"""Number of requests of a sequence."""


class LostConnectionError(Exception):
    """The connection has ended before the answer."""


class MovedConnectionError(Exception):
    """The server has asked for another connection, and h2 reads no more of this one after GOAWAY."""


class HttpClient:
    """One HTTP connection at a time."""

    def __init__(self, server: Serving) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.ports["HTTPService"], timeout=PATIENCE)
        self._connection.connect()
        self.port: int = self._connection.sock.getsockname()[1]

    def ask(self, model: str, body: bytes, headers: dict[str, str]) -> bytes:
        """Ask a model; return the body of the answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            self._connection.request("POST", f"/v2/models/{model}/infer", body, named)
            answer = self._connection.getresponse()
            data = answer.read()
        except (ConnectionError, http.client.HTTPException) as error:
            raise LostConnectionError from error
        assert answer.status == 200, data
        return data

    def close(self) -> None:
        self._connection.close()


class GrpcClient:
    """One gRPC connection at a time."""

    def __init__(self, server: Serving) -> None:
        self._connection = RawGrpc(server)
        self.port: int = self._connection.socket.getsockname()[1]

    def ask(self, model: str, tensor: np.ndarray[Any, Any], path: str) -> None:
        """Ask a model, which answers without an error."""
        request = ModelInferRequest(model_name=model)
        request.inputs.add(name="INPUT0", datatype="FP32", shape=tensor.shape)
        request.raw_input_contents.append(tensor.tobytes())
        connection = self._connection
        try:
            stream = connection.begin(path)
            connection.send(stream, framed(request.SerializeToString()), end=True)
            while stream not in connection.ended and not connection.closed:
                connection.hear()
        except h2.exceptions.ProtocolError as error:
            if connection.http2.state_machine.state is not h2.connection.ConnectionState.CLOSED:
                raise
            raise MovedConnectionError from error
        if stream not in connection.ended:
            raise LostConnectionError
        assert connection.status(stream)[0] == 0, connection.status(stream)

    def close(self) -> None:
        self._connection.close()


class Asking:
    """A thread that asks over one connection, and over another when that is lost."""

    def __init__(self, ask: Callable[[Serving], Iterator[int]], server: Serving, over: threading.Event) -> None:
        """``ask`` yields the local port of its connection after each answer."""
        self.answered = 0
        self.lost: list[int] = []
        """Local ports of lost connections."""
        self.port = 0
        self.wrong: list[str] = []
        self._ask = ask
        self._server = server
        self._over = over
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def successor(self) -> Asking:
        """Return a client like this one, which has ended because of an error."""
        self.thread.join()
        successor = Asking(self._ask, self._server, self._over)
        successor.lost = self.lost
        return successor

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                for port in self._ask(self._server):
                    self.port = port
                    self.answered += 1
                    if self._over.is_set():
                        return
            except MovedConnectionError:
                continue
            except LostConnectionError:
                self.lost.append(self.port)
            except Exception as error:  # whatever it is, the test is to tell of it
                self.wrong.append(f"{self._ask.__name__}: {error!r}")
                return


def small_over_http(server: Serving) -> Iterator[int]:
    return _over_http(server, SMALL)


def large_over_http(server: Serving) -> Iterator[int]:
    return _over_http(server, LARGE)


def _over_http(server: Serving, tensor: np.ndarray[Any, Any]) -> Iterator[int]:
    client = HttpClient(server)
    try:
        while True:
            assert client.ask("work", *binary_request(tensor)).endswith(tensor.tobytes())
            yield client.port
    finally:
        client.close()


def sequence_over_http(server: Serving) -> Iterator[int]:
    """Each answer is the sum of what was asked so far."""
    client = HttpClient(server)
    try:
        while True:
            expected = 0.0
            for place in range(SEQUENCE):
                expected += place
                flags = {
                    "sequence_id": client.port,
                    "sequence_start": place == 0,
                    "sequence_end": place == SEQUENCE - 1,
                }
                tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [place]}
                body = json.dumps({"inputs": [tensor], "parameters": flags}).encode()
                assert json.loads(client.ask("sums", body, {}))["outputs"][0]["data"] == [expected]
                yield client.port
    finally:
        client.close()


def small_over_grpc(server: Serving) -> Iterator[int]:
    return _over_grpc(server, "work", SMALL, INFER)


def large_over_grpc(server: Serving) -> Iterator[int]:
    return _over_grpc(server, "work", LARGE, INFER)


def decoupled_over_grpc(server: Serving) -> Iterator[int]:
    return _over_grpc(server, "several", SMALL, STREAM)


def _over_grpc(server: Serving, model: str, tensor: np.ndarray[Any, Any], path: str) -> Iterator[int]:
    client = GrpcClient(server)
    try:
        while True:
            client.ask(model, tensor, path)
            yield client.port
    finally:
        client.close()


KINDS: Final = (
    small_over_http,
    large_over_http,
    sequence_over_http,
    small_over_grpc,
    large_over_grpc,
    decoupled_over_grpc,
)


class Load:
    """Clients of all kinds, ``each`` of each kind, for as long as the block lasts."""

    def __init__(self, server: Serving, each: int = 3) -> None:
        self._over = threading.Event()
        self.clients = [Asking(kind, server, self._over) for kind in KINDS for _ in range(each)]

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for client in self.clients:
            client.thread.join()

    @property
    def wrong(self) -> list[str]:
        return [wrong for client in self.clients for wrong in client.wrong]

    @property
    def lost(self) -> list[int]:
        """Local ports of the lost connections."""
        return [port for client in self.clients for port in client.lost]

    def go_on(self) -> None:
        """Have the clients go on that had an error answer, because their model was not there for a while."""
        for number, client in enumerate(self.clients):
            if client.wrong:
                self.clients[number] = client.successor()

    def progress(self, clients: Sequence[Asking] | None = None, answers: int = 2) -> None:
        """Return when all clients, or these, have had more answers."""
        asked = self.clients if clients is None else clients
        before = [client.answered for client in asked]
        eventually(
            lambda: (
                bool(self.wrong)
                or all(client.answered >= most + answers for client, most in zip(asked, before, strict=True))
            ),
            what="some clients have had no answer",
        )
        assert not self.wrong, self.wrong


def peers(pid: int) -> set[int]:
    """Return the ports of the clients that a process is connected to."""
    links = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(each))
        except OSError:  # it was closed meanwhile
            continue
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in links:
            found.add(int(fields[2].rpartition(":")[2], 16))
    return found - {0}
