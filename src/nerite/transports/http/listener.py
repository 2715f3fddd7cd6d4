"""The HTTP port: opening it, and closing it in good order."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Final

from nerite.core.byte_budget import ACCESS_LOG, Memo
from nerite.core.tensor import Buffer
from nerite.transports import tcp
from nerite.transports.access_log import AccessRecord, peer_of
from nerite.transports.http import reply, routes
from nerite.transports.http.connection import HttpConnection
from nerite.transports.http.handler import HttpHandler, HttpShared
from nerite.transports.limits import LOOKS, TransportLimits

# An HTTP connection whose exchanges stand in the access log.

_CONSOLE = "/ui"
"""What begins like this is the console's own. It reads its numbers every two seconds: that would drown the rest."""
_GONE = 499
"""The status of an exchange whose client did not wait for the answer, as other servers write it."""


class LoggedHttpConnection(HttpConnection):
    """Notes when a request begins to arrive, and what is sent in answer."""

    _access: AccessRecord | None = None
    """The exchange of which something has arrived."""
    _size = 0
    """Bytes of a body that came in pieces."""
    _status = 0
    _sent = 0
    """Status and bytes of a reply that is sent in chunks."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End, perhaps in the middle of an exchange."""
        if self._head is not None and not self._closing:
            self._note(_GONE)
        super().connection_lost(exc)

    def buffer_updated(self, nbytes: int) -> None:
        """Take note of bytes received."""
        if self._access is None:
            self._access = AccessRecord(peer_of(self._transport))
        super().buffer_updated(nbytes)

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send the reply to the current exchange, and go on to the next request."""
        if self._head is not None and not self._closing:
            first = bytes(parts[0])
            body = len(first) - first.index(b"\r\n\r\n") - 4
            self._note(_status_of(first), body + sum(map(len, parts[1:])))
        super().send(parts)

    def open(self, first: bytes, data: bytes = b"") -> None:
        """Begin a reply that comes in chunks."""
        self._status = _status_of(first)
        self._sent = len(data)
        super().open(first, data)

    def send_chunk(self, data: bytes) -> None:
        """Send a part of the reply."""
        self._sent += len(data)
        super().send_chunk(data)

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Send a part of the reply that is large."""
        self._sent += sum(map(len, pieces))
        super().send_pieces(pieces)

    def close_reply(self) -> None:
        """End a reply that ``open`` began."""
        if self._head is not None and not self._closing:
            self._note(self._status, self._sent)
        super().close_reply()

    def _complete(self, body: memoryview) -> None:
        self._size = len(body)
        super()._complete(body)

    def _refuse_bytes(self, reason: str) -> None:
        self._note(400)
        super()._refuse_bytes(reason)

    def _note(self, status: int, sent: int = 0) -> None:
        """Write the line of the current exchange, before it is over: when it is, the next one begins."""
        access, self._access = self._access or AccessRecord(peer_of(self._transport)), None
        head = self._head
        if head is not None:
            access.method, access.path = head.method, head.path
            access.received = self._size if head.chunked else head.content_length
            access.model, access.version = _named(head.path)
        self._size = 0
        if status < 400 and access.path.startswith(_CONSOLE):
            return
        access.asks(self.request)
        access.answered(status, sent)


def _status_of(first: bytes) -> int:
    """Return the status of a reply that begins like this."""
    return int(first[9:12])


_names: Final[Memo[str, tuple[str, str]]] = Memo()
"""By path."""


def _named(path: str) -> tuple[str, str]:
    """Return the model and the version that a path names."""
    named = _names.get(path)
    if named is None:
        route = routes.find_route(path)
        arguments = route.arguments if route is not None else {}
        named = arguments.get("model", ""), arguments.get("version", "")
        ACCESS_LOG.put(_names, path, named, 256 + 2 * len(path))
    return named


_FULL = "Service Unavailable: as many connections are open as --max-connections allows. Try again in 1 s"


class HttpListener:
    """Accepts connections and knows those that are open."""

    def __init__(
        self,
        name: str,
        handler: HttpHandler,
        max_body: int,
        bounds: TransportLimits,
        upload_seconds: float,
        *,
        access_log: bool = False,
        whole_heads: bool = False,
    ) -> None:
        """``upload_seconds``: how long a request may arrive without coming on; 0 for any time.

        ``whole_heads``: headers are passed on to models, those that name spans among them.
        """
        self._name = name
        self._connection = LoggedHttpConnection if access_log else HttpConnection
        self._shared = HttpShared(handler, max_body, bounds, whole_heads=whole_heads)
        self._upload_seconds = upload_seconds
        self._port: tcp.TcpPort | None = None
        self._look_timer: asyncio.TimerHandle | None = None

    async def open(
        self, address: str, port: int, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen; return the port, which matters if 0 was asked for. Raises ``Unavailable`` if it cannot be had."""
        self._port, number = await tcp.listen(
            self._name,
            lambda: self._connection(self._shared),
            address,
            port,
            bounds=self._shared.bounds,
            refusal=reply.farewell(503, _FULL, retry_after=1).encode(),
            reuse_port=reuse_port,
            tls=tls,
        )
        if self._upload_seconds:
            self._look()
        return number

    def _look(self) -> None:
        """Look after requests that arrive slowly, all of them, every now and then."""
        loop = asyncio.get_running_loop()
        seconds = self._shared.bounds.patience(self._upload_seconds)
        for connection in tuple(self._shared.connections):
            connection.look(loop.time(), seconds)
        self._look_timer = loop.call_later(self._upload_seconds / LOOKS, self._look)

    def forget(self) -> None:
        """Look at every head anew, also on connections that are open: what is allowed has changed."""
        self._shared.heads.clear()
        for connection in self._shared.connections:
            connection.forget()

    def drain(self) -> None:
        """Have every connection, also those that come yet, close with its next answer, which tells the client."""
        self._shared.draining = True
        for connection in self._shared.connections:
            connection.drain()

    def admit_no_more(self) -> None:
        """Have no more connections begin; those that have begun are accepted."""
        if self._port is not None:
            tcp.admit_no_more(self._port.sockets)

    def stop_accepting(self) -> None:
        """Close the port, and every connection as soon as it has nothing under way."""
        if self._port is not None:
            self._port.close()
        for connection in tuple(self._shared.connections):
            connection.shut_down()

    def abort(self) -> None:
        """Close what is left, at once."""
        if self._look_timer is not None:
            self._look_timer.cancel()
        for connection in tuple(self._shared.connections):
            connection.abort()

    @property
    def open_connections(self) -> int:
        """Connections that are open."""
        return len(self._shared.connections)
