"""The gRPC port: opening it, and closing it in good order."""

from __future__ import annotations

import asyncio
import ssl

from nerite.config.options import KeepaliveOptions
from nerite.http2 import Limits, refusal
from nerite.transports import tcp
from nerite.transports.bounds import LOOKS, Bounds
from nerite.transports.grpc.connection import GrpcConnection, Service, Shared
from nerite.transports.grpc.keepalive import Rules
from nerite.transports.grpc.logged_connection import LoggedGrpcConnection

_FULL = "as many connections are open as --max-connections allows"


class GrpcListener:
    """Accepts connections and knows those that are open."""

    def __init__(
        self,
        service: Service,
        keepalive: KeepaliveOptions,
        bounds: Bounds,
        upload_seconds: float,
        *,
        access_log: bool = False,
    ) -> None:
        """``upload_seconds``: how long a message may arrive without coming on; 0 for any time."""
        self._connection = LoggedGrpcConnection if access_log else GrpcConnection
        limits = Limits(
            min_recv_ping_interval_without_data_ms=keepalive.min_recv_ping_interval_without_data_ms,
            max_ping_strikes=keepalive.max_ping_strikes,
            permit_pings_without_calls=keepalive.permit_without_calls,
        )
        self._shared = Shared(service, limits, Rules(keepalive), bounds)
        self._upload_seconds = upload_seconds
        every = self._shared.rules.look_every
        self._look_every = min(every, upload_seconds / LOOKS) if upload_seconds else every
        self._port: tcp.Port | None = None
        self._look_timer: asyncio.TimerHandle | None = None

    async def open(
        self, address: str, port: int, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen; return the port, which matters if 0 was asked for. Raises ``Unavailable`` if it cannot be had."""
        loop = asyncio.get_running_loop()
        self._port, number = await tcp.listen(
            "GRPC",
            lambda: self._connection(self._shared, loop),
            address,
            port,
            bounds=self._shared.bounds,
            refusal=refusal(self._shared.limits, _FULL),
            reuse_port=reuse_port,
            tls=tls,
        )
        self._look()
        return number

    def _look(self) -> None:
        """Look after silent and old connections, and messages that arrive slowly, all of them, every now and then."""
        loop = asyncio.get_running_loop()
        seconds = self._shared.bounds.patience(self._upload_seconds)
        for connection in tuple(self._shared.connections):
            connection.look(loop.time())
            if seconds:
                connection.look_at_arrivals(loop.time(), seconds)
        self._look_timer = loop.call_later(self._look_every, self._look)

    def forget(self) -> None:
        """Look at every head anew, also on connections that are open: what is allowed has changed."""
        for connection in self._shared.connections:
            connection.http2.forget_headers()

    def drain(self) -> None:
        """Have every client know that its connection ends soon, so that it sends its next calls elsewhere."""
        for connection in tuple(self._shared.connections):
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
