"""generate_stream with real clients: events as they come, and nobody works for nobody."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_streams import DECOUPLED, ENDLESS, THREADED

from serving import Serving, eventually, pbtxt, python_model, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    models = tmp_path / "models"
    python_model(models, "threaded", THREADED, pbtxt(batch=1, more=DECOUPLED))
    python_model(models, "endless", ENDLESS.replace("SENT", str(tmp_path / "sent")), pbtxt(batch=1, more=DECOUPLED))
    with serving(models, tmp_path / "log") as running:
        yield running


def test_events(server: Serving) -> None:
    connection = http.client.HTTPConnection(server.http, timeout=20)
    for count in (3, 1):
        body = json.dumps({"INPUT0": count})
        connection.request("POST", "/v2/models/threaded/generate_stream", body)
        answer = connection.getresponse()
        assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        events = [json.loads(event.removeprefix("data: ")) for event in answer.read().decode().split("\n\n") if event]
        assert [event["OUTPUT0"] for event in events] == list(range(count))
    connection.close()


def ask(server: Serving, model: str, value: int) -> socket.socket:
    host, port = server.http.split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    body = json.dumps({"INPUT0": value}).encode()
    connection.sendall(
        b"POST /v2/models/%b/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
        % (model.encode(), len(body), body)
    )
    return connection


def test_a_client_that_hangs_up_ends_the_work(server: Serving) -> None:
    with ask(server, "threaded", 100_000) as connection:
        assert b"data: " in connection.recv(65536)
    eventually(lambda: "cancelled after" in server.text)


def test_a_client_that_does_not_read_makes_the_model_wait(server: Serving, tmp_path: Path) -> None:
    with ask(server, "endless", 1) as connection:
        assert connection.recv(1000)
        counts: list[int] = []

        def settled() -> bool:
            counts.append(int((tmp_path / "sent").read_text() or 0) if (tmp_path / "sent").exists() else 0)
            return len(counts) > 100 and counts[-1] == counts[-100] > 0

        eventually(settled)
        # An event has 40,000 characters; the sockets' buffers hold some megabytes.
        assert counts[-1] < 1_000
    eventually(lambda: "cancelled after" in server.text)
