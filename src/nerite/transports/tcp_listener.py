"""A port and its open connections, whatever they speak: opened, checked now and then, drained and closed."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

from nerite.transports import tcp
from nerite.transports.limits import TransportLimits


class ListenerConnection(Protocol):
    """A connection of a listener."""

    def drain(self) -> None:
        """Announce to the client that the connection ends soon."""

    def shut_down(self) -> None:
        """Close the connection as soon as it is idle."""

    def abort(self) -> None:
        """Close the connection at once."""


class ListenerState(Protocol):
    """What all connections of a listener share."""

    closed: Callable[[], None]
    """Called when a connection has ended."""

    @property
    def bounds(self) -> TransportLimits:
        """Limits of the connections."""

    @property
    def connections(self) -> Collection[ListenerConnection]:
        """Open connections."""


StateT = TypeVar("StateT", bound=ListenerState)


class TcpListener(ABC, Generic[StateT]):
    """Accepts connections on a port, keeps track of those that are open, and closes them gracefully."""

    def __init__(self, name: str, shared: StateT, refusal: bytes, check_interval: float) -> None:
        """``refusal`` is sent to clients over the connection limit.

        ``check_interval``: seconds between two checks of the connections; 0 for no checks.
        """
        self._name = name
        self._shared = shared
        self._refusal = refusal
        self._check_interval = check_interval
        self._port: tcp.TcpPort | None = None
        self._check_timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def _connect(self) -> asyncio.BaseProtocol:
        """Return a new connection."""

    @abstractmethod
    def _check(self, now: float) -> None:
        """Close the connections that have made no progress for too long. ``now`` is the time of the loop."""

    async def open(
        self, address: str, port: int, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen and return the port, which matters if ``port`` is 0. Raises ``Unavailable`` if it cannot be opened."""
        self._port, number = await tcp.listen(
            self._name,
            self._connect,
            address,
            port,
            bounds=self._shared.bounds,
            refusal=self._refusal,
            reuse_port=reuse_port,
            tls=tls,
        )
        self._check_again()
        return number

    def adopt(self, tls: ssl.SSLContext | None, closed: Callable[[], None]) -> tcp.AdoptedPort:
        """Serve connections that another process accepts; return the port that takes them.

        ``closed`` is called when one of them has ended.
        """
        self._shared.closed = closed
        self._port = port = tcp.AdoptedPort(self._connect, self._shared.bounds, self._refusal, tls, closed)
        self._check_again()
        return port

    def _check_again(self) -> None:
        if self._check_interval:
            loop = asyncio.get_running_loop()
            self._check_timer = loop.call_later(self._check_interval, self._check_again)
            self._check(loop.time())

    def drain(self) -> None:
        """Announce to all clients that their connection ends soon, so that they send further requests elsewhere."""
        for connection in tuple(self._shared.connections):
            connection.drain()

    def admit_no_more(self) -> None:
        """Stop new connections from being established; those already established are still accepted."""
        if self._port is not None:
            tcp.admit_no_more(self._port.sockets)

    def stop_accepting(self) -> None:
        """Close the port, and each connection as soon as it is idle."""
        if self._port is not None:
            self._port.close()
        for connection in tuple(self._shared.connections):
            connection.shut_down()

    def abort(self) -> None:
        """Close all remaining connections at once."""
        if self._check_timer is not None:
            self._check_timer.cancel()
        for connection in tuple(self._shared.connections):
            connection.abort()

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        return len(self._shared.connections)
