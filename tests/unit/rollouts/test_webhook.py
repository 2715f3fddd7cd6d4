"""Decisions that are posted to webhooks: sent again if that may help, and never in the way of anything else."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from nerite.core.errors import InvalidArgument
from nerite.rollouts import webhook
from nerite.rollouts.webhook import (
    DELAYS,
    MAX_RECEIVERS,
    MAX_WAITING,
    Delivery,
    DeliveryFailed,
    WebhookClient,
    Webhooks,
    deliver,
    is_public,
)

ONE = Delivery("http://receiver.example/a", b"{}")


def attempts(*outcomes: bool | None) -> tuple[list[float], DeliveryFailed | None]:
    """Return the delays between attempts with these outcomes, and the failure. None: refused for good."""
    waited: list[float] = []
    left = list(outcomes)

    async def send(delivery: Delivery) -> None:
        outcome = left.pop(0)
        if not outcome:
            raise DeliveryFailed("no", retryable=outcome is not None)

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    failure = asyncio.run(deliver(ONE, send, sleep))
    assert not left
    return waited, failure


def test_it_is_sent_again_as_long_as_that_may_help() -> None:
    assert attempts(True) == ([], None)
    assert attempts(False, False, True) == ([*DELAYS[:2]], None)
    assert attempts(None)[0] == []
    waited, failure = attempts(*[False] * (len(DELAYS) + 1))
    assert waited == [*DELAYS]
    assert str(failure) == "no"


class Receiver(HTTPServer):
    """Keeps what it gets; answers with ``status``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.got: list[tuple[str, str, object]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


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


def post(url: str, *hosts: str, own: bool = True) -> None:
    asyncio.run(WebhookClient(hosts).post(Delivery(url, b"{}", own)))


def run(steps: Callable[[Webhooks], Awaitable[None]], *hosts: str) -> None:
    """Run a coroutine with webhooks."""

    async def main() -> None:
        webhooks = Webhooks(WebhookClient(hosts))
        try:
            async with asyncio.timeout(30):
                await steps(webhooks)
        finally:
            webhooks.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_what_a_receiver_gets(receiver: Receiver) -> None:
    async def steps(webhooks: Webhooks) -> None:
        url = f"{receiver.url.replace('://', '://user:secret@')}/hook?team=a"
        webhooks.send(url, {"state": "promoted"}, own=True)
        webhooks.send(url, {"state": "rolled_back"}, own=True)
        assert webhooks.loop.waiting == 2
        await until(lambda: not webhooks.loop.waiting)

    run(steps)
    assert receiver.got == [
        ("/hook?team=a", "application/json", {"state": "promoted"}),
        ("/hook?team=a", "application/json", {"state": "rolled_back"}),
    ]


@pytest.mark.parametrize(("status", "retryable"), [(500, True), (503, True), (429, True), (404, False), (302, False)])
def test_answers_of_a_receiver(receiver: Receiver, status: int, retryable: bool) -> None:
    receiver.status = status
    with pytest.raises(DeliveryFailed, match=f"it answers {status}") as caught:
        post(receiver.url)
    assert caught.value.retryable == retryable
    assert len(receiver.got) == 1


def answering(answer: bytes, *, closes: bool = True) -> str:
    """Return the URL of a receiver that sends these bytes to whoever connects, once."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening, listening.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(answer)
            if not closes:
                connection.recv(1)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed the connection without an answer"),
        (b"HTTP/1.1 two hundred\r\n\r\n", "what is not HTTP/1.1"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what is not HTTP/1.1"),
        (b"\0" * 200_000, "what is not HTTP/1.1"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 507 Full\r\n\r\n", "it answers 507"),
    ],
)
def test_odd_answers(answer: bytes, why: str) -> None:
    with pytest.raises(DeliveryFailed, match=why):
        post(answering(answer))


def test_an_answer_without_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "ATTEMPT_SECONDS", 0.1)
    with pytest.raises(DeliveryFailed, match=r"did not answer within 0\.1 s"):
        post(answering(b"HTTP/1.1 2", closes=False))


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(DeliveryFailed) as caught:
            post(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert caught.value.retryable


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(DeliveryFailed) as caught:
        post("http://receiver.invalid/")
    assert caught.value.retryable


# Where documents may go.


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.100.100.200", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:7f00:1::", False),
        ("fd00:ec2::254", False),
        ("fe80::1%eth0", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) == public


def test_requests_name_public_hosts_alone_and_files_any(receiver: Receiver) -> None:
    for url in (
        receiver.url,
        receiver.url.replace("127.0.0.1", "localhost"),
        receiver.url.replace("127.0.0.1", "0x7f.1"),
    ):
        with pytest.raises(InvalidArgument, match=r"not public.*allow it with --webhook-allowed-host"):
            asyncio.run(WebhookClient().check_given(url))
        with pytest.raises(DeliveryFailed, match="not public") as caught:
            post(url, own=False)
        assert not caught.value.retryable
    assert not receiver.got
    post(receiver.url)
    assert len(receiver.got) == 1


def test_a_list_of_hosts_holds_for_all(receiver: Receiver) -> None:
    for own in (False, True):
        post(receiver.url, "127.0.0.1", own=own)
        post(receiver.url, "*", own=own)
        with pytest.raises(
            DeliveryFailed, match=r"host '127\.0\.0\.1' is not allowed: add it to --webhook-allowed-host"
        ):
            post(receiver.url, "hooks.example", own=own)
    assert len(receiver.got) == 4


def test_a_name_with_another_address_the_second_time(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the address that was checked is the one that is connected to."""
    resolved: list[str] = []

    def resolve(host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        resolved.append(host)
        address = "93.184.216.34" if len(resolved) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    connected: list[str] = []

    async def connect(host: str, *_: object, **__: object) -> tuple[Any, Any]:
        connected.append(host)
        raise ConnectionRefusedError

    monkeypatch.setattr(webhook.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    url = f"http://rebinding.example:{receiver.server_port}/"
    with pytest.raises(DeliveryFailed):
        post(url, own=False)
    assert connected == ["93.184.216.34"]
    with pytest.raises(DeliveryFailed, match="not public"):
        post(url, own=False)
    assert len(connected) == 1


# The queues.


def test_a_silent_receiver_delays_no_other(receiver: Receiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def steps(webhooks: Webhooks) -> None:
            for number in range(1000):
                webhooks.send(f"http://127.0.0.1:{silent.getsockname()[1]}", {"number": number}, own=True)
            webhooks.send(receiver.url, {"state": "promoted"}, own=True)
            async with asyncio.timeout(5):
                await until(lambda: bool(receiver.got))
            assert webhooks.loop.waiting >= MAX_WAITING

        run(steps)


def test_the_number_of_receivers_is_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]

        async def steps(webhooks: Webhooks) -> None:
            for number in range(2 * MAX_RECEIVERS):
                webhooks.send(f"http://127.0.0.{number + 1}:{port}", {}, own=True)
            assert webhooks.loop.waiting == MAX_RECEIVERS

        run(steps)


@pytest.mark.parametrize(
    "error", [UnicodeError("label empty or too long"), RecursionError(), ValueError(), KeyError(1)]
)
def test_whatever_a_delivery_raises_is_the_failure_of_its_document(receiver: Receiver, error: Exception) -> None:
    class Odd(WebhookClient):
        mended = False

        async def post(self, delivery: Delivery) -> None:
            if b"odd" in delivery.body and not self.mended:
                raise error
            await super().post(delivery)

    async def steps() -> None:
        webhooks = Webhooks(client := Odd())
        webhooks.send(receiver.url, {"state": "odd"}, own=True)
        webhooks.send(receiver.url, {"state": "promoted"}, own=True)
        async with asyncio.timeout(10):
            await until(lambda: bool(receiver.got))
            await until(lambda: not webhooks.loop.waiting)
            (letter,) = webhooks.loop.dead_letters
            assert letter.unit.endswith(f"for {receiver.url}") and "incident" in letter.text
            client.mended = True
            webhooks.loop.retry(letter.unit)
            await until(lambda: len(receiver.got) == 2)
        assert not webhooks.loop.dead_letters
        webhooks.close()

    asyncio.run(steps())
    assert [state for _, _, state in receiver.got] == [{"state": "promoted"}, {"state": "odd"}]


def test_a_document_that_is_discarded_is_gone(receiver: Receiver) -> None:
    class Broken(WebhookClient):
        async def post(self, delivery: Delivery) -> None:
            raise RuntimeError

    async def steps() -> None:
        webhooks = Webhooks(Broken())
        webhooks.send(receiver.url, {}, own=True)
        await until(lambda: bool(webhooks.loop.dead_letters))
        webhooks.loop.discard(webhooks.loop.dead_letters[0].unit)
        assert not webhooks.loop.dead_letters and not webhooks.loop.waiting
        webhooks.close()

    asyncio.run(steps())
