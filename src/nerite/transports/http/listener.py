"""HTTP ports, and connections that write the access log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nerite.core.byte_budget import ACCESS_LOG, Memo
from nerite.core.tensor import Buffer
from nerite.transports.access_log import AccessRecord, peer_of
from nerite.transports.http import reply, routes
from nerite.transports.http.connection import HttpConnection
from nerite.transports.http.handler import HttpHandler, HttpShared
from nerite.transports.limits import CHECKS, TransportLimits
from nerite.transports.tcp_listener import TcpListener

_CONSOLE = "/ui"
"""Prefix of the console's paths. It polls every two seconds, so only its errors are logged, lest it flood the log."""
_CLIENT_CLOSED = 499
"""Logged status of an exchange whose client disconnected before the reply, as in other servers."""


class LoggedHttpConnection(HttpConnection):
    """HTTP connection that writes each exchange to the access log."""

    _access: AccessRecord | None = None
    """Record of the exchange whose request has begun to arrive."""
    _size = 0
    """Size of a body that arrived in pieces."""
    _status = 0
    _sent = 0
    """Status and size of a reply that is sent in chunks."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Log an unfinished exchange, then release everything."""
        if self._head is not None and not self._closing:
            self._log_exchange(_CLIENT_CLOSED)
        super().connection_lost(exc)

    def buffer_updated(self, nbytes: int) -> None:
        """Process ``nbytes`` received bytes."""
        if self._access is None:
            self._access = AccessRecord(peer_of(self._transport))
        super().buffer_updated(nbytes)

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send the complete reply to the current exchange, then continue with the next request."""
        if self._head is not None and not self._closing:
            first = bytes(parts[0])
            body = len(first) - first.index(b"\r\n\r\n") - 4
            self._log_exchange(_status_of(first), body + sum(map(len, parts[1:])))
        super().send(parts)

    def open(self, first: bytes, data: bytes = b"") -> None:
        """Begin a reply that is sent in chunks."""
        self._status = _status_of(first)
        self._sent = len(data)
        super().open(first, data)

    def send_chunk(self, data: bytes) -> None:
        """Send one chunk of the reply."""
        self._sent += len(data)
        super().send_chunk(data)

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Send one large chunk of the reply without copying it."""
        self._sent += sum(map(len, pieces))
        super().send_pieces(pieces)

    def send_bytes(self, data: Buffer) -> None:
        """Send bytes of the reply as they are."""
        self._sent += len(data)
        super().send_bytes(data)

    def end_reply(self) -> None:
        """End the reply that ``open`` began."""
        if self._head is not None and not self._closing:
            self._log_exchange(self._status, self._sent)
        super().end_reply()

    def _complete(self, body: memoryview) -> None:
        self._size = len(body)
        super()._complete(body)

    def _hang_up(self, status: int, reason: str, retry_after: int = 0) -> None:
        self._log_exchange(status)
        super()._hang_up(status, reason, retry_after)

    def _log_exchange(self, status: int, sent: int = 0) -> None:
        """Log the current exchange. Must be called before it ends, because the next one then begins at once."""
        access, self._access = self._access or AccessRecord(peer_of(self._transport)), None
        head = self._head
        if head is not None:
            access.method, access.path = head.method, head.path
            access.received = self._size if head.chunked else head.content_length
            access.model, access.version = _model_in_path(head.path)
        self._size = 0
        if status < 400 and access.path.startswith(_CONSOLE):
            return
        access.asks(self.request)
        access.answered(status, sent)


def _status_of(first: bytes) -> int:
    """Return the status in the first bytes of a reply."""
    return int(first[9:12])


_models_by_path: Final[Memo[str, tuple[str, str]]] = Memo()
"""Model and version by path."""


def _model_in_path(path: str) -> tuple[str, str]:
    """Return the model and version in a path; empty strings if it has none."""
    named = _models_by_path.get(path)
    if named is None:
        route = routes.find_route(path)
        arguments = route.arguments if route is not None else {}
        named = arguments.get("model", ""), arguments.get("version", "")
        ACCESS_LOG.put(_models_by_path, path, named, 256 + 2 * len(path))
    return named


_TOO_MANY_CONNECTIONS = "Service Unavailable: the limit of open connections ({}) is reached. Try again in 1 s"


class HttpListener(TcpListener[HttpShared]):
    """Accepts HTTP connections on a port."""

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
        size_setting: str = "--http-max-input-size",
    ) -> None:
        """``upload_seconds``: maximum time without progress while a request arrives; 0 for no limit.

        ``size_setting`` is what sets ``max_body``, for error texts. ``whole_heads``: trace context lines stay in the
        head, because headers are forwarded to models.
        """
        shared = HttpShared(handler, max_body, bounds, whole_heads=whole_heads)
        shared.size_setting = size_setting
        refusal = reply.farewell(503, _TOO_MANY_CONNECTIONS.format(bounds.connections_setting), retry_after=1)
        super().__init__(name, shared, refusal.encode(), upload_seconds / CHECKS)
        self._connection = LoggedHttpConnection if access_log else HttpConnection
        self._upload_seconds = upload_seconds

    def _connect(self) -> HttpConnection:
        return self._connection(self._shared)

    def _check(self, now: float) -> None:
        seconds = self._shared.bounds.patience(self._upload_seconds)
        for connection in tuple(self._shared.connections):
            connection.check(now, seconds)

    def forget(self) -> None:
        """Discard cached heads and remembered requests, also on open connections: access rules have changed."""
        self._shared.heads.clear()
        for connection in self._shared.connections:
            connection.forget()

    def drain(self) -> None:
        """Make every connection, including new ones, close after its next reply, which announces that to the client."""
        self._shared.draining = True
        super().drain()
