"""The HTTP port: opening it, and closing it in good order."""

from __future__ import annotations

import asyncio
import ssl

from nerite.transports import tcp
from nerite.transports.bounds import LOOKS, Bounds
from nerite.transports.http import reply
from nerite.transports.http.connection import HttpConnection
from nerite.transports.http.handler import Handler
from nerite.transports.http.logged_connection import LoggedHttpConnection
from nerite.transports.http.shared import Shared

_FULL = "Service Unavailable: as many connections are open as --max-connections allows. Try again in 1 s"


class HttpListener:
    """Accepts connections and knows those that are open."""

    def __init__(
        self,
        name: str,
        handler: Handler,
        max_body: int,
        bounds: Bounds,
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
        self._shared = Shared(handler, max_body, bounds, whole_heads=whole_heads)
        self._upload_seconds = upload_seconds
        self._port: tcp.Port | None = None
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
