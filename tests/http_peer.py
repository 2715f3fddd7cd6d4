"""An HTTP client made of bare bytes, and a handler that answers as its test says."""

from __future__ import annotations

from collections.abc import Callable

from doubles import FakeTransport
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse
from nerite.transports.http.connection import HttpConnection
from nerite.transports.http.handler import HttpQuestion, HttpShared
from nerite.transports.http.head import RequestHead
from nerite.transports.http.reply import Reply
from nerite.transports.limits import TransportLimits


class FakeHandler:
    """Answers every request with what it was, at once or when it is told to.

    A path that contains ``refuse`` is refused before its body, ``later`` waits for ``answer_next``. In a body under
    ``again`` three bytes say what is asked, and the rest is data.
    """

    def __init__(self) -> None:
        self.handled: list[tuple[str, str, bytes]] = []
        self.known = 0
        """Requests that were recognised."""
        self.waiting: list[tuple[HttpConnection, bytes]] = []
        self.buffers: list[memoryview] = []
        """To be offered for the bodies that come."""
        self.on_handle: Callable[[HttpConnection, RequestHead], None] = lambda connection, head: None

    def begin(self, head: RequestHead) -> Reply | None:
        return Reply(403, head.path.encode(), "text/plain") if "refuse" in head.path else None

    def receive_buffer(self, head: RequestHead) -> memoryview | None:
        return self.buffers.pop() if self.buffers else None

    def handle(self, connection: HttpConnection, head: RequestHead, body: memoryview) -> HttpQuestion | None:
        assert not body.readonly
        self.handled.append((head.method, head.path, bytes(body)))
        echo = head.path.encode() + b" " + bytes(body)
        self.on_handle(connection, head)
        if "later" in head.path:
            self.waiting.append((connection, echo))
        else:
            connection.send([Reply(200, echo, "text/plain").encode()])
        return HttpQuestion(3, (head, bytes(body[:3])), 1024) if "again" in head.path and len(body) >= 3 else None

    def handle_again(self, connection: HttpConnection, meaning: tuple[RequestHead, bytes], data: bytearray) -> None:
        self.known += 1
        head, text = meaning
        self.handle(connection, head, memoryview(bytearray(text + data)))

    def answer_next(self) -> None:
        connection, echo = self.waiting.pop(0)
        connection.send([Reply(200, echo, "text/plain").encode()])

    def answer(self, connection: HttpConnection, request: InferenceRequest, response: InferenceResponse) -> None:
        connection.send([Reply(200, b"inferred " + request.id.encode(), "text/plain").encode()])


class Peer:
    """A connection with a client on its other end."""

    kind = HttpConnection

    def __init__(
        self, handler: FakeHandler | None = None, max_body: int = 10_000_000, bounds: TransportLimits | None = None
    ) -> None:
        self.handler = handler or FakeHandler()
        self.bounds = bounds or TransportLimits()
        self.shared = HttpShared(self.handler, max_body, self.bounds)
        self.connection = self.kind(self.shared)
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def send(self, data: bytes) -> None:
        """Send bytes, as far as the server reads."""
        while data and not self.transport.closed:
            buffer = self.connection.get_buffer(-1)
            assert len(buffer) > 0
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            data = data[size:]
            self.connection.buffer_updated(size)

    def answers(self) -> list[tuple[int, bytes]]:
        """Status and body of the replies since the last time."""
        return [(status, body) for status, _, body in replies(self.transport.taken())]

    def lose(self) -> None:
        self.transport.close()
        self.connection.connection_lost(None)


def request(path: str, body: bytes = b"", *headers: str, method: str = "POST", version: str = "1.1") -> bytes:
    """A request with a sized body, if any."""
    lines = [f"{method} {path} HTTP/{version}", "Host: here", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(path: str, *chunks: bytes) -> bytes:
    """A request whose body comes in chunks."""
    coded = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return request(path, b"", "Transfer-Encoding: chunked") + coded + b"0\r\n\r\n"


def replies(stream: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Take a stream of replies apart. Fails on anything that is none, and on a body that is cut off."""
    found = []
    while stream:
        head, end, stream = stream.partition(b"\r\n\r\n")
        assert end
        first, *lines = head.decode().split("\r\n")
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1"
        headers = dict(line.lower().split(": ", 1) for line in lines)
        size = int(headers.get("content-length", "0"))
        assert len(stream) >= size
        found.append((int(status), headers, stream[:size]))
        stream = stream[size:]
    return found
