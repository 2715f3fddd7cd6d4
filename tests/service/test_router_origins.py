"""Pages of other origins and the limits of a router: what is allowed by the cluster file, and what refusals name."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from routing import ROUTER, Received, events, pool, response, routing, stand_ins
from serving import PATIENCE, eventually

APP = "https://app.example"
INFER = "/v2/models/m/infer"
CHAT = "/v1/chat/completions"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def answer(asked: Received, connection: socket.socket) -> bytes:
    return events("1", "[DONE]") if asked.path == CHAT else response()


def test_pages_of_named_origins_may_read_every_answer(tmp_path: Path) -> None:
    keys = f'cors-origins = ["{APP}"]\n'
    with (
        stand_ins(1, answer) as (member,),
        routing(tmp_path, pool(member.address), router=ROUTER + keys) as router,
    ):
        for method, path, body, expected in (
            ("POST", INFER, b"{}", 200),
            ("POST", CHAT, ASKED, 200),
            ("POST", "/v2/models/none/infer", b"{}", 404),
            ("GET", "/v2/health/ready", b"", 200),
            ("GET", "/v2/nothing", b"", 404),
        ):
            for _ in range(2):  # heads are remembered
                status, told, _ = router.ask(method, path, body, Origin=APP)
                assert (status, told["Access-Control-Allow-Origin"], told["Vary"]) == (expected, APP, "Origin")
                assert told["Access-Control-Expose-Headers"]
        wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for path in (INFER, CHAT, "/v1/audio/speech"):
            status, told, _ = router.ask("OPTIONS", path, Origin=APP, **wanted)
            assert (status, told["Access-Control-Allow-Origin"]) == (204, APP)
            assert "POST" in told["Access-Control-Allow-Methods"]
            assert "authorization" in told["Access-Control-Allow-Headers"]
        assert all("origin" not in asked.headers for asked in member.requests)
        status, told, body = router.ask("POST", INFER, b"{}", Origin="https://else.example")
        assert (status, "Access-Control-Allow-Origin" in told) == (403, False)
        assert "add 'https://else.example' to cors-origins in [router] of the cluster file" in json.loads(body)["error"]
        status, told, _ = router.ask("GET", "/v2/health/live")
        assert (status, "Access-Control-Allow-Origin" in told) == (200, False)


@pytest.mark.parametrize("path", [INFER, CHAT])
def test_bytes_in_flight(tmp_path: Path, path: str) -> None:
    keys = "max-bytes-in-flight = 100000\n"
    with stand_ins(1) as (member,), routing(tmp_path, pool(member.address), router=ROUTER + keys) as router:
        status, _, body = router.ask("POST", path, json.dumps({"model": "m", "text": "x" * 200_000}).encode())
        assert status == 429
        assert "100000 bytes that max-bytes-in-flight in [router] of the cluster file allows" in body.decode()
        assert router.ask("POST", INFER, b"{}")[0] == 200


def test_connections(tmp_path: Path) -> None:
    done = threading.Event()

    def held(asked: Received, connection: socket.socket) -> bytes:
        done.wait(PATIENCE)
        return response()

    keys = "max-connections = 1\n"
    with stand_ins(1, held) as (member,), routing(tmp_path, pool(member.address), router=ROUTER + keys) as router:
        place = ("127.0.0.1", router.ports["HTTPService"])
        with socket.create_connection(place, PATIENCE) as first:
            first.sendall(f"POST {INFER} HTTP/1.1\r\nContent-Length: 0\r\n\r\n".encode())
            eventually(lambda: len(member.requests) == 1)
            with socket.create_connection(place, PATIENCE) as second:
                told = b"".join(iter(lambda: second.recv(1 << 16), b""))
            done.set()
        assert b"max-connections in [router] of the cluster file" in told
