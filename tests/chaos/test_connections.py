"""Connections in masses: idle, stalled, or more than there may be. Others are served, and little memory is used."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from faults import resident
from raw_grpc import RawGrpc, Watch
from serving import IDENTITY, Serving, eventually, pbtxt, python_model, serving

IDLE = 5_000
MB = 2**20
UNDER_64_FILES = ("sh", "-c", 'ulimit -n 64 && exec "$@"', "sh")
HELD_UP = 2.0
"""Seconds for which no other request may wait, however busy the machine is."""


@pytest.fixture
def files() -> Iterator[None]:
    """Let the test itself have as many connections as it needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * IDLE:
        pytest.skip(f"the system allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(server: Serving, service: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.ports[service]), timeout=30)


def value(server: Serving, name: str) -> float:
    return server.metrics()[name]


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("files")
def test_thousands_of_idle_connections(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "identity", IDENTITY)
    with serving(tmp_path / "models", tmp_path / "log") as server, contextlib.ExitStack() as idle:
        server.infer("identity", [1.0])
        before = resident(server)
        with Watch(server) as watch:
            for number in range(IDLE):
                service = ("HTTPService", "GRPCInferenceService")[number % 2]
                idle.enter_context(connect(server, service))
            eventually(lambda: value(server, 'nerite_connections{port="grpc"}') >= IDLE // 2)
            for _ in range(20):
                assert server.infer("identity", [1.0]) == [1.0]
        assert watch.longest < HELD_UP
        assert median(watch.seconds) < 0.1
        assert (resident(server) - before) / IDLE < 20_000
        assert value(server, 'nerite_connections_closed_total{reason="displaced"}') == 0


@pytest.mark.timeout(240)
def test_more_connections_than_there_may_be(tmp_path: Path) -> None:
    """Under a limit of 64 open files, too: models load, and those that come are answered."""
    python_model(tmp_path / "models", "identity", IDENTITY)
    flags = ("--model-control-mode=explicit",)
    with (
        serving(tmp_path / "models", tmp_path / "log", *flags, within=UNDER_64_FILES) as server,
        contextlib.ExitStack() as idle,
    ):
        assert value(server, "nerite_connections_limit") == 32
        for number in range(300):
            idle.enter_context(connect(server, ("HTTPService", "GRPCInferenceService")[number % 2]))
        eventually(lambda: value(server, 'nerite_connections_closed_total{reason="displaced"}') > 200)
        assert server.ask("POST", "/v2/repository/models/identity/load")[0] == 200
        for _ in range(20):
            assert server.infer("identity", [1.0]) == [1.0]
        client = RawGrpc(server)
        assert client.ask(b"")[0] == 5
        client.close()
        assert value(server, 'nerite_connections_closed_total{reason="refused"}') == 0


@pytest.mark.timeout(240)
def test_calls_that_stand_still_are_ended(tmp_path: Path) -> None:
    """400 of them, each with 200 KB of what it announces."""
    python_model(tmp_path / "models", "identity", IDENTITY, pbtxt())
    with serving(tmp_path / "models", tmp_path / "log", "--grpc-upload-timeout=5") as server:
        server.infer("identity", [1.0])
        before = resident(server)
        clients = [RawGrpc(server) for _ in range(4)]
        with Watch(server) as watch:
            calls = [(client, client.begin()) for client in clients for _ in range(100)]
            for client, call in calls:
                client.send(call, b"\0" + (100 * MB).to_bytes(4) + bytes(200_000))
            held = value(server, "nerite_bytes_in_flight")
            for client, call in calls:
                assert client.status(call)[0] == 4
        for client in clients:
            client.close()
        assert held > 50 * MB
        assert watch.longest < HELD_UP
        assert value(server, 'nerite_arrivals_refused_total{reason="stalled"}') == 400
        eventually(lambda: value(server, "nerite_bytes_in_flight") == 0)
        eventually(lambda: resident(server) < before + 30 * MB)
