"""The HTTP port: opening it, and closing it in good order."""

from __future__ import annotations

import asyncio
import ssl

from nerite.transports import tcp
from nerite.transports.http.connection import HttpConnection
from nerite.transports.http.handler import Handler
from nerite.transports.http.logged_connection import LoggedHttpConnection
from nerite.transports.http.shared import Shared

_LOOKS = 8
"""Within the time that a request may stand still."""


class HttpListener:
    """Accepts connections and knows those that are open."""

    def __init__(
        self,
        name: str,
        handler: Handler,
        max_body: int,
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
        self._shared = Shared(handler, max_body, whole_heads=whole_heads)
        self._upload_seconds = upload_seconds
        self._server: asyncio.Server | None = None
        self._look_timer: asyncio.TimerHandle | None = None

    async def open(
        self, address: str, port: int, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen; return the port, which matters if 0 was asked for. Raises ``Unavailable`` if it cannot be had."""
        self._server = await tcp.listen(
            self._name, lambda: self._connection(self._shared), address, port, reuse_port=reuse_port, tls=tls
        )
        if self._upload_seconds:
            self._look()
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def _look(self) -> None:
        """Look after requests that arrive slowly, all of them, every now and then."""
        loop = asyncio.get_running_loop()
        for connection in tuple(self._shared.connections):
            connection.look(loop.time(), self._upload_seconds)
        self._look_timer = loop.call_later(self._upload_seconds / _LOOKS, self._look)

    def forget(self) -> None:
        """Look at every head anew, also on connections that are open: what is allowed has changed."""
        self._shared.heads.clear()
        for connection in self._shared.connections:
            connection.forget()

    def stop_accepting(self) -> None:
        """Close the port, and every connection as soon as it has nothing under way."""
        if self._server is not None:
            self._server.close()
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
