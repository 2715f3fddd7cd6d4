"""Thousands of connections that do nothing: they take little, and others are served as before."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import Bystanders, resident
from serving import IDENTITY, Serving, eventually, python_model, serving

CONNECTIONS = 5_000
FOR_EACH = 16 * 1024
"""Bytes that the server may need for one of them."""


@pytest.fixture
def _many_files() -> Iterator[None]:
    """Let this process have so many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CONNECTIONS + 1_000:
        pytest.skip(f"a process may have {hard} files open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (CONNECTIONS + 1_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files(server: Serving, *fronts: int) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in (server.process.pid, *fronts))


@pytest.mark.usefixtures("_many_files")
def test_idle_connections(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "other", IDENTITY)
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = f"POST /v2/models/other/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving(tmp_path / "models", tmp_path / "log") as server, Bystanders(server):
        places = [(host, int(port)) for host, port in (each.split(":") for each in (server.http, server.grpc))]
        fronts = server.fronts().values()
        memory, files = resident(server, *fronts), open_files(server, *fronts)
        with contextlib.ExitStack() as idle:
            for number in range(CONNECTIONS):
                line = idle.enter_context(socket.create_connection(places[number % 2], timeout=60))
                if number % 4 == 0:  # Some have asked once.
                    line.sendall(head + body)
                    assert line.recv(4096).startswith(b"HTTP/1.1 200 OK")
            eventually(lambda: open_files(server, *fronts) >= files + CONNECTIONS)
            assert resident(server, *fronts) - memory < CONNECTIONS * FOR_EACH
        eventually(lambda: open_files(server, *fronts) < files + 20)
