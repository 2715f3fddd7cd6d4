"""A real router for tests, ``nerite route`` as a subprocess, and members of which each test says what they answer."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from serving import NERITE, Serving, program

ADMIN_KEY = 'admin-key = "x-admin-key=tests"\n'
"""Line of a router with a policy whose tests read the figures of all tenants, with ``Serving.json``."""
ROUTER = '[router]\nhttp-port = 0\ngrpc-port = 0\nmetrics-port = 0\nexit-timeout = "20s"\n'


def pool(*members: str, name: str = "main", **keys: Any) -> str:
    """Return the table of a pool. Its members are checked often."""
    settings = {"name": name, "members": list(members), "health-interval": "200ms"}
    settings |= {key.replace("_", "-"): value for key, value in keys.items()}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if value != []]
    return "\n".join(("[[pool]]", *lines, ""))


@contextmanager
def routing(
    folder: Path,
    *pools: str,
    router: str = ROUTER,
    clean: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Serving]:
    """Run a router on free ports of 127.0.0.1, in front of these pools."""
    file = folder / "cluster.toml"
    file.write_text(router + "\n" + "\n".join(pools))
    command = [NERITE, "route", file]
    with program(
        command, folder / "router.log", clean=clean, internal_errors=not clean, environment=environment
    ) as running:
        yield running


class Received(NamedTuple):
    """A request as a member got it."""

    method: str
    path: str
    headers: dict[str, str]
    """By lower-case name."""
    body: bytes


Answer = Callable[[Received, socket.socket], "bytes | None"]
"""Returns the response, or writes it itself and returns None; then the connection is closed."""


def response(body: bytes = b"{}", status: int = 200, content_type: str = "application/json", more: str = "") -> bytes:
    """Return a response with a length."""
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def events(*texts: str, end: bool = True) -> bytes:
    """Return a response of server-sent events in chunks."""
    chunks = b"".join(chunk(f"data: {text}\n\n".encode()) for text in texts)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunks + (b"0\r\n\r\n" if end else b"")


def chunk(data: bytes) -> bytes:
    """Return data as a chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class StandInMember:
    """A server of which the test says what it answers. It is healthy and serves ``models`` unless told otherwise."""

    def __init__(
        self,
        answer: Answer = lambda asked, connection: response(),
        models: tuple[str, ...] = ("m",),
        port: int = 0,
        adapters: tuple[str, ...] = (),
        host: str = "127.0.0.1",
    ) -> None:
        """``adapters`` are models, too, and LoRA adapters of the first one."""
        self.answer = answer
        self.models = models
        self.adapters = adapters
        self.ready = True
        self.requests: list[Received] = []
        """What came, without health checks."""
        self.closed = threading.Semaphore(0)
        """Released when a connection has ended on which something was asked."""
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server((host, port), backlog=128)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """End like a killed process: nothing listens any more, and connections are reset."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in tuple(self._connections):
            reset(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        asked = 0
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as file:
            while (request := read_request(file)) is not None:
                answer = self._healthy(request)
                if answer is None:
                    asked += 1
                    self.requests.append(request)
                    answer = self.answer(request, connection)
                if answer is None:
                    break
                connection.sendall(answer)
        self._connections.discard(connection)
        if asked:
            self.closed.release()

    def _healthy(self, request: Received) -> bytes | None:
        if request.path in ("/v2/health/ready", "/health"):
            return response(status=200 if self.ready else 400)
        if request.headers.get("user-agent") == "nerite-route" and request.path == "/v2/repository/index":
            return response(json.dumps(self.listed()).encode())
        if request.headers.get("user-agent") == "nerite-route" and request.path == "/v1/models":
            entries = [{"id": name, "object": "model", "parent": None} for name in self.models]
            entries += [{"id": name, "object": "model", "parent": self.models[0]} for name in self.adapters]
            return response(json.dumps({"object": "list", "data": entries}).encode())
        return None

    def listed(self) -> list[Any]:
        """Return the index of its model repository."""
        return [{"name": name, "version": "1", "state": "READY"} for name in self.models]


def read_request(file: Any) -> Received | None:
    """Read a request; None at the end of the connection."""
    line = file.readline().decode()
    if not line:
        return None
    method, path, _ = line.split(" ")
    headers: dict[str, str] = {}
    while (line := file.readline().decode().rstrip("\r\n")) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(iter(lambda: _read_chunk(file), b""))
    else:
        body = file.read(int(headers.get("content-length", "0")))
    return Received(method, path, headers, body)


def _read_chunk(file: Any) -> bytes:
    data: bytes = file.read(int(file.readline(), 16))
    file.readline()
    return data


def reset(connection: socket.socket) -> None:
    """Close a connection with a reset."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def stand_ins(count: int, answer: Answer | None = None, **more: Any) -> Iterator[list[StandInMember]]:
    """Run so many members."""
    made = [StandInMember(answer, **more) if answer is not None else StandInMember(**more) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            each.stop()


def samples(router: Serving, name: str) -> Mapping[str, float]:
    """Return the samples of a metric by their labels."""
    return {key: value for key, value in router.metrics().items() if key.partition("{")[0] == name}
