"""Front processes that are stopped, killed or not there: what becomes of connections."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from process_family import name_of, processes_of
from serving import IDENTITY, PATIENCE, Serving, eventually, pbtxt, python_model, serving

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("fronts")
    python_model(folder / "models", "identity", IDENTITY, pbtxt())
    with serving(folder / "models", folder / "log", "--front-processes=2", "--access-log=true") as running:
        yield running


def fronts(server: Serving) -> list[int]:
    return [pid for pid in processes_of(server.process.pid) if name_of(pid).startswith("front_")]


def connected(place: str) -> socket.socket:
    host, port = place.split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def test_connections_wait_for_fronts_that_are_busy(server: Serving) -> None:
    """More than the system lets a process send to another that receives nothing."""
    stopped = fronts(server)
    assert len(stopped) == 2
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(connected(server.http)) for _ in range(700)]
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        for client in clients:
            client.sendall(LIVE)
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert fronts(server) == stopped, "none was killed"


def test_connections_wait_for_fronts_that_start_again(server: Serving) -> None:
    before = fronts(server)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: set(fronts(server)).isdisjoint(before))
    for _ in range(20):
        assert server.infer("identity", [1.0]) == [1.0]
    assert len(fronts(server)) == 2
    assert server.metrics()["nerite_front_restarts_total"] == 2


def test_a_handshake_that_fails_leaves_no_connection(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY, pbtxt())
    with serving(tmp_path / "models", tmp_path / "log", "--front-processes=2", *_tls(tmp_path)) as running:
        for _ in range(4):
            with connected(running.grpc) as client:
                client.sendall(LIVE)
                with contextlib.suppress(ConnectionError):
                    client.recv(65536)
        eventually(lambda: running.metrics()['nerite_connections{port="grpc"}'] == 0)


def _tls(folder: Path) -> list[str]:
    certificate = trustme.CA().issue_cert("localhost")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    files = {"key": folder / "key.pem", "cert": folder / "certificate.pem"}
    flags = [f"--grpc-server-{name}={file}" for name, file in files.items()]
    return ["--grpc-use-ssl=true", *flags]
