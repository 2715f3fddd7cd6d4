"""An HTTP connection whose exchanges stand in the access log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nerite.core.byte_budget import ACCESS_LOG, Memo
from nerite.core.tensor import Buffer
from nerite.transports.access_log import Access, peer_of
from nerite.transports.http import routes
from nerite.transports.http.connection import HttpConnection

_CONSOLE = "/ui"
"""What begins like this is the console's own. It reads its numbers every two seconds: that would drown the rest."""
_GONE = 499
"""The status of an exchange whose client did not wait for the answer, as other servers write it."""


class LoggedHttpConnection(HttpConnection):
    """Notes when a request begins to arrive, and what is sent in answer."""

    _access: Access | None = None
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
            self._access = Access(peer_of(self._transport))
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
        access, self._access = self._access or Access(peer_of(self._transport)), None
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
        route = routes.find(path)
        arguments = route.arguments if route is not None else {}
        named = arguments.get("model", ""), arguments.get("version", "")
        ACCESS_LOG.put(_names, path, named, 256 + 2 * len(path))
    return named
