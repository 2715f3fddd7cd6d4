"""One connection: kept, made anew where the server has closed it, and what is said of servers that misbehave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from nerite.client import Client, ClientError

LIVE = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@contextmanager
def peer(*talks: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the address of a server that has one talk on each connection, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for talk in talks:
                with listening.accept()[0] as accepted:
                    talk(accepted)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(20)
        assert not thread.is_alive()


def answer(*answers: bytes) -> Callable[[socket.socket], None]:
    """Return a talk that reads a request and answers it, for each of ``answers``, and closes."""

    def talk(accepted: socket.socket) -> None:
        for text in answers:
            received = b""
            while not received.endswith(b"\r\n\r\n"):
                received += accepted.recv(65536)
            accepted.sendall(text)

    return talk


def test_one_connection_for_several_requests() -> None:
    with peer(answer(LIVE, LIVE)) as url, Client(url) as client:
        assert client.live()
        assert client.ready()


def test_a_connection_that_was_closed_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, connected = socket.create_connection, list[socket.socket]()
    monkeypatch.setattr(
        socket, "create_connection", lambda *to, **more: connected.append(connect(*to, **more)) or connected[-1]
    )
    with peer(answer(LIVE), answer(LIVE)) as url, Client(url) as client:
        assert client.live()
        # The end of the connection arrives on its own time.
        assert connected[0].recv(1, socket.MSG_PEEK) == b""
        assert client.live()


def test_a_request_is_never_sent_twice() -> None:
    with peer(answer(b""), answer(LIVE)) as url, Client(url) as client:
        with pytest.raises(ClientError, match=f"the connection to http://{url} broke"):
            client.model("m")
        assert client.live()


def test_an_answer_that_ends_too_early() -> None:
    with (
        peer(answer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}")) as url,
        Client(url) as client,
        pytest.raises(ClientError, match="broke: IncompleteRead"),
    ):
        client.model("m")


def test_no_answer_in_time() -> None:
    done = threading.Event()
    with peer(lambda accepted: done.wait(20) and None) as url, Client(url, timeout=0.1) as client:
        with pytest.raises(ClientError, match=f"no answer from http://{url} in 0.1 seconds") as late:
            client.models()
        assert late.value.status is None
        done.set()


def test_a_server_of_another_kind() -> None:
    with (
        peer(answer(b"SSH-2.0-OpenSSH\r\n")) as url,
        Client(url) as client,
        pytest.raises(ClientError, match=r"does not speak HTTP.*: is that the port for gRPC"),
    ):
        client.models()


@pytest.mark.parametrize(
    ("body", "text"), [(b'{"error":"why"}', "why"), (b"gone", "gone"), (b"", "HTTP status 503"), (b"[]", "[]")]
)
def test_what_an_error_says(body: bytes, text: str) -> None:
    head = b"HTTP/1.1 503 Sorry\r\nContent-Length: %d\r\n\r\n" % len(body)
    with peer(answer(head + body)) as url, Client(url) as client:
        with pytest.raises(ClientError) as error:
            client.model("m")
        assert (str(error.value), error.value.status) == (text, 503)


def test_an_answer_that_is_no_json() -> None:
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno"
    with (
        peer(answer(body)) as url,
        Client(url) as client,
        pytest.raises(ClientError, match="the server's answer to /v2/models/m is not JSON"),
    ):
        client.model("m")


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"127.0.0.1:{listening.getsockname()[1]}"
    with Client(url) as client:
        with pytest.raises(ClientError, match=f"cannot reach http://{url}: Connection refused"):
            client.models()
        assert not client.live()
        assert not client.ready()
