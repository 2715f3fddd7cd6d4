"""Decisions that are posted to a webhook: sent again if that may help, and never in the way of the server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from nerite.rollouts.webhook import DELAYS, Delivery, DeliveryFailed, Webhooks, deliver, post
from serving import eventually

ONE = Delivery("http://receiver.example/a", b"{}")


def attempts(*outcomes: bool | None) -> tuple[list[float], DeliveryFailed | None]:
    """Return the delays between attempts with these outcomes, and the failure. None: refused for good."""
    waited: list[float] = []
    left = list(outcomes)

    def send(delivery: Delivery) -> None:
        outcome = left.pop(0)
        if not outcome:
            raise DeliveryFailed("no", retryable=outcome is not None)

    failure = deliver(ONE, lambda seconds: waited.append(seconds) or False, send)  # type: ignore[func-returns-value]
    assert not left
    return waited, failure


def test_it_is_sent_again_as_long_as_that_may_help() -> None:
    assert attempts(True) == ([], None)
    assert attempts(False, False, True) == ([*DELAYS[:2]], None)
    assert attempts(None)[0] == []
    waited, failure = attempts(*[False] * (len(DELAYS) + 1))
    assert waited == [*DELAYS]
    assert str(failure) == "no"


def test_a_server_that_stops_does_not_wait() -> None:
    def send(delivery: Delivery) -> None:
        raise DeliveryFailed("down", retryable=True)

    assert str(deliver(ONE, lambda seconds: True, send)) == "down"


class Receiver(HTTPServer):
    """Keeps what it gets; answers with ``status``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.got: list[tuple[str, str, object]] = []


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, self.headers["Content-Type"], body))
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_what_a_receiver_gets(receiver: Receiver) -> None:
    webhooks = Webhooks()
    url = f"http://127.0.0.1:{receiver.server_port}/hook?team=a"
    webhooks.send(url, {"state": "promoted"})
    webhooks.send(url, {"state": "rolled_back"})
    eventually(lambda: len(receiver.got) == 2)
    webhooks.close()
    webhooks.join()
    assert receiver.got[0] == ("/hook?team=a", "application/json", {"state": "promoted"})


@pytest.mark.parametrize(("status", "retryable"), [(500, True), (503, True), (429, True), (404, False), (302, False)])
def test_answers_of_a_receiver(receiver: Receiver, status: int, retryable: bool) -> None:
    receiver.status = status
    with pytest.raises(DeliveryFailed, match=f"it answers {status}") as caught:
        post(Delivery(f"http://127.0.0.1:{receiver.server_port}", b"{}"))
    assert caught.value.retryable == retryable
    assert len(receiver.got) == 1


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(DeliveryFailed) as caught:
            post(Delivery(f"http://127.0.0.1:{free.getsockname()[1]}", b"{}"))
    assert caught.value.retryable


def test_too_many_are_dropped_and_nothing_waits() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        webhooks = Webhooks()
        for number in range(1000):
            webhooks.send(f"http://127.0.0.1:{silent.getsockname()[1]}", {"number": number})
        webhooks.close()
    webhooks.join()
